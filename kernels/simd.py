"""Vector and bit instructions that Numba does not offer, as LLVM code for any processor that LLVM supports.

Addresses are int64. LLVM splits the 16-lane vectors into vectors of the processor, so one source serves AVX-512, AVX2,
SSE and NEON.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from hvdx.kernels.tiles import ESCAPE, N_MAX, SHARES

_LANES = 16
_STRIDE = 4 * _LANES
_I8, _I16, _I32, _I64, _F32 = (ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType())
_FLOATS, _INTS = ir.VectorType(_F32, _LANES), ir.VectorType(_I32, _LANES)
#: Number of tiles that `read_entries` reads at once.
TILES = 8
_WORDS = ir.VectorType(_I64, TILES)
#: Prefetch distance in bytes: 1.5 pages of 4 KiB. Prefetching lets one core reach the bandwidth of memory.
AHEAD = 6144


def call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call an LLVM intrinsic by its name."""
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _splat(builder: Any, scalar: Any, kind: Any) -> Any:
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, kind.count), [0] * kind.count))


def _pointer(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    return builder.inttoptr(builder.add(address, ir.Constant(_I64, offset)), kind.as_pointer())


def _load(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    value = builder.load(_pointer(builder, address, offset, kind))
    value.align = 1 if kind == _I64 else 4
    return value


def _store(builder: Any, value: Any, address: Any, offset: int) -> None:
    builder.store(value, _pointer(builder, address, offset, value.type)).align = 1 if value.type == _I64 else 4


def _bits(builder: Any, lanes: Any) -> Any:
    """Return a mask of one bit per lane, as i64."""
    return builder.zext(builder.bitcast(lanes, _I16), _I64)


def make_intrinsic(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes `generate(builder, *arguments)` callable from Numba with this signature."""

    def wrap(generate: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            result = generate(builder, *arguments)
            if isinstance(result, tuple):
                return context.make_tuple(builder, signature.return_type, result)
            return context.get_dummy_value() if result is None else result

        # Numba takes the number of parameters from the function, so `typing` is built with that number.
        names = ", ".join(f"a{i}" for i in range(len(signature.args)))
        scope = {"result": (signature, codegen)}
        exec(f"def typing(context, {names}): return result", scope)
        return intrinsic(scope["typing"])

    return wrap


_BLOCKS = types.UniTuple(types.int64, 3)(*[types.int64] * 5, *[types.float32] * 4, *[types.int64] * 2)


@make_intrinsic(_BLOCKS)
def accumulate(builder: Any, *arguments: Any) -> tuple[Any, ...]:
    """Add blocks of 64 float32 at `update` to those at `residual`, and subtract +-tau from each sum that reaches tau.

    The arguments are residual, update, block, end, found, tau, limit, scale, back, marks, near. `scale` must be 1 and
    `back` 0; see `accumulate_ahead`.

    The new residual has the sign of the sum, also if it is zero. A sum that would still reach tau after the subtraction
    is stored whole, without the subtraction. An element of the update with an absolute value above `limit`, or NaN,
    counts as zero. For each block from `block` to `end` with a sum that reaches tau, four words are appended to the
    `found` records at `marks`: masks with one bit per element of the sums that reach tau, of the negative sums and of
    the whole sums, and the block's number. The int64 at `near` increase by the number of new residuals that reach each
    of SHARES of tau; a sum that is stored whole counts for each share.

    Returns three int64: the new number of records, 1 if some sum was stored whole, and 1 if some element counted as
    zero.
    """
    return _accumulate(builder, False, *arguments)


@make_intrinsic(_BLOCKS)
def accumulate_ahead(builder: Any, *arguments: Any) -> tuple[Any, ...]:
    """Do the work of `accumulate` for `scale` times the update, and subtract `back` times this from the new residual.

    A sum that is stored whole keeps what would be subtracted.
    """
    return _accumulate(builder, True, *arguments)


def _accumulate(
    builder: Any,
    ahead: bool,
    residual: Any,
    update: Any,
    block: Any,
    end: Any,
    found: Any,
    tau: Any,
    limit: Any,
    scale: Any,
    back: Any,
    marks: Any,
    near: Any,
) -> tuple[Any, ...]:
    taus, limits, scales, backs = (_splat(builder, x, _FLOATS) for x in (tau, limit, scale, back))
    shares = [_splat(builder, builder.fmul(tau, ir.Constant(_F32, share)), _FLOATS) for share in SHARES]
    signs = ir.Constant(_INTS, [1 << 31] * _LANES)
    none, flags = ir.Constant(_INTS, [0] * _LANES), ir.VectorType(ir.IntType(1), _LANES)
    # Adding -0.0 changes no number, not even the sign of a zero.
    nothing = ir.Constant(_FLOATS, [-0.0] * _LANES)
    reached = [cgutils.alloca_once_value(builder, none) for _ in SHARES]
    number = cgutils.alloca_once_value(builder, found)
    faults = cgutils.alloca_once_value(builder, ir.Constant(flags, [0] * _LANES))
    wholes = cgutils.alloca_once_value(builder, ir.Constant(_I64, 0))
    zero = ir.Constant(_I64, 0)
    with cgutils.for_range_slice(builder, block, end, ir.Constant(_I64, 1), _I64) as (index, _):
        shift = builder.mul(index, ir.Constant(_I64, 256))
        r, u = builder.add(residual, shift), builder.add(update, shift)
        hit, negative, whole = zero, zero, zero
        for offset in range(0, 256, 64):
            for address in (r, u):
                hint = [ir.Constant(_I32, v) for v in (0, 3, 1)]
                call(builder, "llvm.prefetch.p0", ir.VoidType(), _pointer(builder, address, offset + AHEAD, _I8), *hint)
        for offset in range(0, 256, _STRIDE):
            added = _load(builder, u, offset, _FLOATS)
            if ahead:
                added = builder.fmul(added, scales)
            fault = builder.fcmp_unordered(">", call(builder, f"llvm.fabs.v{_LANES}f32", _FLOATS, added), limits)
            builder.store(builder.or_(builder.load(faults), fault), faults)
            added = builder.select(fault, nothing, added)
            total = builder.fadd(_load(builder, r, offset, _FLOATS), added)
            sign = builder.and_(builder.bitcast(total, _INTS), signs)
            size = call(builder, f"llvm.fabs.v{_LANES}f32", _FLOATS, total)
            over = builder.fcmp_ordered(">=", size, taus)
            rest = builder.select(over, builder.fsub(size, taus), size)
            more = builder.fcmp_ordered(">=", rest, taus)
            left = builder.bitcast(builder.or_(builder.bitcast(rest, _INTS), sign), _FLOATS)
            if ahead:
                left = builder.fsub(left, builder.fmul(added, backs))
            _store(builder, builder.select(more, total, left), r, offset)
            lanes = ir.Constant(_I64, offset // 4)
            hit = builder.or_(hit, builder.shl(_bits(builder, over), lanes))
            below = builder.icmp_signed("<", builder.bitcast(total, _INTS), none)
            negative = builder.or_(negative, builder.shl(_bits(builder, below), lanes))
            whole = builder.or_(whole, builder.shl(_bits(builder, more), lanes))
            for count, share in zip(reached, shares, strict=True):
                near_it = builder.zext(builder.fcmp_ordered(">=", rest, share), _INTS)
                builder.store(builder.add(builder.load(count), near_it), count)
        builder.store(builder.or_(builder.load(wholes), whole), wholes)
        record = builder.add(marks, builder.mul(builder.load(number), ir.Constant(_I64, 32)))
        for i, word in enumerate((hit, negative, whole, index)):
            builder.store(word, _pointer(builder, record, 8 * i, _I64))
        some = builder.zext(builder.icmp_unsigned("!=", hit, zero), _I64)
        builder.store(builder.add(builder.load(number), some), number)
    for i, count in enumerate(reached):
        total = call(builder, f"llvm.vector.reduce.add.v{_LANES}i32", _I32, builder.load(count))
        pointer = _pointer(builder, near, 8 * i, _I64)
        builder.store(builder.add(builder.load(pointer), builder.zext(total, _I64)), pointer)
    some_whole = builder.zext(builder.icmp_unsigned("!=", builder.load(wholes), zero), _I64)
    some_fault = builder.zext(builder.icmp_unsigned("!=", _bits(builder, builder.load(faults)), zero), _I64)
    return builder.load(number), some_whole, some_fault


@make_intrinsic(types.uint64(types.int64, types.float32, types.float32))
def beyond(builder: Any, update: Any, limit: Any, scale: Any) -> Any:
    """Return a mask of the 64 float32 at `update` that, times `scale`, have absolute values above `limit` or NaN."""
    limits, scales = _splat(builder, limit, _FLOATS), _splat(builder, scale, _FLOATS)
    mask = ir.Constant(_I64, 0)
    for offset in range(0, 256, _STRIDE):
        scaled = builder.fmul(_load(builder, update, offset, _FLOATS), scales)
        size = call(builder, f"llvm.fabs.v{_LANES}f32", _FLOATS, scaled)
        lanes = _bits(builder, builder.fcmp_unordered(">", size, limits))
        mask = builder.or_(mask, builder.shl(lanes, ir.Constant(_I64, offset // 4)))
    return mask


@make_intrinsic(types.int64(types.int64))
def bit_lengths(builder: Any, gaps: Any) -> Any:
    """Return the sum of the bit lengths of the 64 uint32 at `gaps`."""
    total = ir.Constant(_INTS, [0] * _LANES)
    for offset in range(0, 256, _STRIDE):
        x = _load(builder, gaps, offset, _INTS)
        zeros = call(builder, f"llvm.ctlz.v{_LANES}i32", _INTS, x, ir.Constant(ir.IntType(1), 0))
        total = builder.add(total, builder.sub(ir.Constant(_INTS, [32] * _LANES), zeros))
    return builder.zext(call(builder, f"llvm.vector.reduce.add.v{_LANES}i32", _I32, total), _I64)


@make_intrinsic(types.int64(types.int64, types.int64))
def code_lengths(builder: Any, gaps: Any, k: Any) -> Any:
    """Return the bits of the 64 uint32 at `gaps` in the gap code with parameter k, without the k low bits of each."""

    def constant(value: int) -> Any:
        return ir.Constant(_INTS, [value] * _LANES)

    shift, total = _splat(builder, builder.trunc(k, _I32), _INTS), constant(0)
    for offset in range(0, 256, _STRIDE):
        q = builder.lshr(_load(builder, gaps, offset, _INTS), shift)
        escaped = builder.sub(q, constant(ESCAPE - 1))
        zeros = call(builder, f"llvm.ctlz.v{_LANES}i32", _INTS, escaped, ir.Constant(ir.IntType(1), 0))
        long = builder.sub(constant(ESCAPE - 1 + 64), builder.shl(zeros, constant(1)))
        short = builder.icmp_unsigned("<", q, constant(ESCAPE))
        total = builder.add(total, builder.select(short, builder.add(q, constant(1)), long))
    return builder.zext(call(builder, f"llvm.vector.reduce.add.v{_LANES}i32", _I32, total), _I64)


@make_intrinsic(types.int64(types.uint64))
def trailing_zeros(builder: Any, x: Any) -> Any:
    """Return the number of zero bits below the lowest set bit; 64 if no bit is set."""
    return call(builder, "llvm.cttz.i64", _I64, x, ir.Constant(ir.IntType(1), 0))


@make_intrinsic(types.int64(types.uint64))
def bit_length(builder: Any, x: Any) -> Any:
    """Return the number of bits of x without leading zeros; 0 for 0."""
    zeros = call(builder, "llvm.ctlz.i64", _I64, x, ir.Constant(ir.IntType(1), 0))
    return builder.sub(ir.Constant(_I64, 64), zeros)


@make_intrinsic(types.int64(types.uint64))
def population(builder: Any, x: Any) -> Any:
    """Return the number of set bits."""
    return call(builder, "llvm.ctpop.i64", _I64, x)


@make_intrinsic(types.uint64(types.int64))
def load_word(builder: Any, address: Any) -> Any:
    """Return the uint64 at an address, which may be unaligned."""
    return _load(builder, address, 0, _I64)


@make_intrinsic(types.void(types.int64, types.uint64))
def store_word(builder: Any, address: Any, value: Any) -> None:
    """Write a uint64 at an address, which may be unaligned."""
    _store(builder, value, address, 0)


@make_intrinsic(types.float32(types.int64))
def load_float(builder: Any, address: Any) -> Any:
    """Return the float32 at an address."""
    return _load(builder, address, 0, _F32)


@make_intrinsic(types.void(types.int64, types.float32))
def store_float(builder: Any, address: Any, value: Any) -> None:
    """Write a float32 at an address."""
    _store(builder, value, address, 0)


@make_intrinsic(types.uint8(types.int64))
def load_byte(builder: Any, address: Any) -> Any:
    """Return the byte at an address."""
    return builder.load(_pointer(builder, address, 0, _I8))


@make_intrinsic(types.uint32(types.int64))
def load_half(builder: Any, address: Any) -> Any:
    """Return the uint32 at an address, which may be unaligned."""
    value = builder.load(_pointer(builder, address, 0, _I32))
    value.align = 1
    return value


@make_intrinsic(types.void(types.int64))
def prefetch(builder: Any, address: Any) -> None:
    """Prefetch 128 bytes at an address. An invalid address has no effect."""
    for offset in (0, 64):
        hint = [ir.Constant(_I32, v) for v in (0, 3, 1)]
        call(builder, "llvm.prefetch.p0", ir.VoidType(), _pointer(builder, address, offset, _I8), *hint)


@make_intrinsic(types.int64(types.int64))
def fetch(builder: Any, address: Any) -> Any:
    """Prefetch the memory at an address for writing, and return the address."""
    hint = [ir.Constant(_I32, v) for v in (1, 3, 1)]
    call(builder, "llvm.prefetch.p0", ir.VoidType(), _pointer(builder, address, 0, _I8), *hint)
    return address


@make_intrinsic(types.int64(*[types.int64] * 6))
def read_entries(
    builder: Any, message: Any, last_word: Any, lanes: Any, entries: Any, triples: Any, singles: Any
) -> Any:
    """Read the gaps and signs of entries of 8 tiles at once. No branch depends on the bits.

    The arguments are the address of the message; the offset of its last 8 bytes, after which nothing is read; the
    address of five rows of 8 int64, with a column for each tile; and the address of the result, 8 uint64 for each
    entry: index << 2 | sign. The rows hold the position in bits, the index of the entry before, and the Rice parameter;
    the position and the index after the entries are written to the last two rows.

    Words of 64 bits are read, first `triples` words of three entries each, then `singles` words of one entry each.
    Returns a mask of the tiles whose results are wrong: those with entries that did not fit their word, or with an
    index above any update's.
    """

    def constant(value: int) -> Any:
        return ir.Constant(_WORDS, [value] * TILES)

    def larger(a: Any, b: Any) -> Any:
        return call(builder, f"llvm.umax.v{TILES}i64", _WORDS, a, b)

    def smaller(a: Any, b: Any) -> Any:
        return call(builder, f"llvm.umin.v{TILES}i64", _WORDS, a, b)

    one, bits, index, k = constant(1), *(_load(builder, lanes, 8 * TILES * row, _WORDS) for row in range(3))
    low, fixed, final = (
        builder.sub(builder.shl(one, k), one),
        builder.add(k, constant(2)),
        _splat(builder, last_word, _WORDS),
    )
    position, where = cgutils.alloca_once_value(builder, bits), cgutils.alloca_once_value(builder, index)
    longest, highest = (cgutils.alloca_once_value(builder, constant(0)) for _ in range(2))
    target = cgutils.alloca_once_value(builder, entries)

    def read_word(count: int) -> None:
        bit = builder.load(position)
        byte = smaller(builder.lshr(bit, constant(3)), final)
        word = constant(0)
        for tile in range(TILES):
            number = ir.Constant(_I32, tile)
            address = builder.add(message, builder.extract_element(byte, number))
            word = builder.insert_element(word, _load(builder, address, 0, _I64), number)
        begin = used = builder.sub(bit, builder.shl(byte, constant(3)))
        word = builder.lshr(word, smaller(begin, constant(63)))
        for _ in range(count):
            # A limit on the ones keeps shifts below 64. Words with more of them do not hold the entry anyway.
            stop = builder.or_(builder.xor(word, constant(-1)), constant(1 << 40))
            ones = call(builder, f"llvm.cttz.v{TILES}i64", _WORDS, stop, ir.Constant(ir.IntType(1), 0))
            z = builder.sub(larger(ones, constant(ESCAPE)), constant(ESCAPE))
            word = builder.lshr(builder.lshr(word, one), ones)
            power = builder.shl(one, z)
            more = builder.and_(word, builder.sub(power, one))
            # Without an escape z is 0, so this is the number of ones.
            quotient = builder.add(builder.add(power, more), builder.sub(builder.sub(ones, z), one))
            word = builder.lshr(word, z)
            gap = builder.or_(builder.shl(quotient, k), builder.and_(word, low))
            word = builder.lshr(word, k)
            after = builder.add(builder.load(where), builder.add(gap, one))
            builder.store(after, where)
            entry = builder.or_(builder.shl(after, constant(2)), builder.and_(word, one))
            address = builder.load(target)
            _store(builder, entry, address, 0)
            builder.store(builder.add(address, ir.Constant(_I64, 8 * TILES)), target)
            word = builder.lshr(word, one)
            used = builder.add(used, builder.add(builder.add(ones, z), fixed))
        builder.store(builder.add(bit, builder.sub(used, begin)), position)
        builder.store(larger(builder.load(longest), used), longest)
        builder.store(builder.or_(builder.load(highest), builder.load(where)), highest)

    for count, words in ((3, triples), (1, singles)):
        with cgutils.for_range(builder, words):
            read_word(count)
    for row, state in ((3, position), (4, where)):
        _store(builder, builder.load(state), lanes, 8 * TILES * row)
    wrong = builder.or_(
        builder.icmp_unsigned(">", builder.load(longest), constant(64)),
        builder.icmp_unsigned(">", builder.load(highest), constant(2 * N_MAX - 1)),
    )
    return builder.zext(builder.bitcast(wrong, ir.IntType(TILES)), _I64)


def _move_line(builder: Any, source: Any, target: Any, bypass: bool) -> None:
    values = builder.load(_pointer(builder, source, 0, _FLOATS))
    stores = (
        builder.store(ir.Constant(_FLOATS, [0.0] * _LANES), _pointer(builder, source, 0, _FLOATS)),
        builder.store(values, _pointer(builder, target, 0, _FLOATS)),
    )
    for each in (values, *stores):
        each.align = _STRIDE
    if bypass:
        stores[1].set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_I32, 1)]))


@make_intrinsic(types.void(types.int64, types.int64))
def move_line(builder: Any, source: Any, target: Any) -> None:
    """Copy a line of 64 bytes, and set it to zero at `source`. The addresses are multiples of 64."""
    _move_line(builder, source, target, False)


@make_intrinsic(types.void(types.int64, types.int64))
def stream_line(builder: Any, source: Any, target: Any) -> None:
    """Do the work of `move_line`, past the caches. Another thread may read the target after a `fence` of this one."""
    _move_line(builder, source, target, True)


@make_intrinsic(types.void())
def fence(builder: Any) -> None:
    """Complete the stores of this thread."""
    builder.fence("seq_cst")
