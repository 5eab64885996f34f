"""Vector and bit instructions that Numba does not offer, as LLVM code for any processor that LLVM supports.

Addresses are int64. LLVM splits the 16-lane vectors into vectors of the processor, so one source serves AVX-512, AVX2,
SSE and NEON.
"""

from collections.abc import Callable, Sequence
from typing import cast

from llvmlite import ir
from llvmlite.ir import IRBuilder, Value
from numba.core import cgutils, types
from numba.core.base import BaseContext
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

from hvdx.kernels.tiles import ESCAPE, N_MAX

#: Bits of a packed entry that hold its position (see `cpu_scan`).
POSITION = (1 << 30) - 1

_LANES = 16
_STRIDE = 4 * _LANES
_I8, _I16, _I32, _I64, _F32 = (ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType())
_FLOATS, _INTS, _BYTES = (ir.VectorType(kind, _LANES) for kind in (_F32, _I32, _I8))
_WIDE_LANES = 8
_WORDS, _HALVES = ir.VectorType(_I64, _WIDE_LANES), ir.VectorType(_I32, _WIDE_LANES)
#: Number of tiles that `read_entries` reads at once. Each instruction waits for the one before it, so two vectors of 8
#: tiles take hardly more time than one.
TILES = 16
#: Prefetch distance in bytes: 1.5 pages of 4 KiB. Prefetching lets one core reach the bandwidth of memory.
AHEAD = 6144


# Function that emits the instructions of an intrinsic: (builder, *arguments) -> result, a tuple of results, or None.
Generator = Callable[..., Value | tuple[Value, ...] | None]
# What Numba's compiler puts in the place of a call. Python never calls it.
Intrinsic = Callable[..., int]


def call(builder: IRBuilder, name: str, result: ir.Type, *arguments: Value) -> Value:
    """Call an LLVM intrinsic by its name."""
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _splat(builder: IRBuilder, scalar: Value, kind: ir.VectorType) -> Value:
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, kind.count), [0] * kind.count))


def _pointer(builder: IRBuilder, address: Value, offset: int, kind: ir.Type) -> Value:
    return builder.inttoptr(builder.add(address, ir.Constant(_I64, offset)), kind.as_pointer())


def _load(builder: IRBuilder, address: Value, offset: int, kind: ir.Type) -> Value:
    value = builder.load(_pointer(builder, address, offset, kind))
    value.align = 1 if kind == _I64 else 4
    return value


def _store(builder: IRBuilder, value: Value, address: Value, offset: int) -> None:
    builder.store(value, _pointer(builder, address, offset, value.type)).align = 1 if value.type == _I64 else 4


def _bits(builder: IRBuilder, lanes: Value) -> Value:
    """Return a mask of one bit per lane, as i64."""
    return builder.zext(builder.bitcast(lanes, _I16), _I64)


def make_intrinsic(signature: Signature) -> Callable[[Generator], Intrinsic]:
    """Return a decorator that makes `generate(builder, *arguments)` callable from Numba with this signature."""

    def wrap(generate: Generator) -> Intrinsic:
        def codegen(context: BaseContext, builder: IRBuilder, _: Signature, arguments: Sequence[Value]) -> Value:
            result = generate(builder, *arguments)
            if isinstance(result, tuple):
                return context.make_tuple(builder, signature.return_type, result)
            return context.get_dummy_value() if result is None else result

        # Numba takes the number of parameters from the function, so `typing` is built with that number.
        names = ", ".join(f"a{i}" for i in range(len(signature.args)))
        scope = {"result": (signature, codegen)}
        exec(f"def typing(context, {names}): return result", scope)
        compiled: Intrinsic = intrinsic(cast("Callable[..., object]", scope["typing"]))
        return compiled

    return wrap


_BLOCKS = types.UniTuple(types.int64, 3)(*[types.int64] * 5, *[types.float32] * 4, types.int64)


@make_intrinsic(_BLOCKS)
def accumulate(builder: IRBuilder, *arguments: Value) -> tuple[Value, ...]:
    """Add blocks of 64 float32 at `update` to those at `residual`, and subtract +-tau from each sum that reaches tau.

    The arguments are residual, update, block, end, found, tau, limit, scale, back, marks. `scale` must be 1 and `back`
    0; see `accumulate_ahead`.

    The new residual has the sign of the sum, also if it is zero. A sum that would still reach tau after the subtraction
    is stored whole, without the subtraction. An element of the update with an absolute value above `limit`, or NaN,
    counts as zero. For each block from `block` to `end` with a sum that reaches tau, four words are appended to the
    `found` records at `marks`: masks with one bit per element of the sums that reach tau, of the negative sums and of
    the whole sums, and the block's number.

    Returns three int64: the new number of records, 1 if some sum was stored whole, and 1 if some element counted as
    zero.
    """
    return _accumulate(builder, False, *arguments)


@make_intrinsic(_BLOCKS)
def accumulate_ahead(builder: IRBuilder, *arguments: Value) -> tuple[Value, ...]:
    """Do the work of `accumulate` for `scale` times the update, and subtract `back` times this from the new residual.

    A sum that is stored whole keeps what would be subtracted.
    """
    return _accumulate(builder, True, *arguments)


def _accumulate(
    builder: IRBuilder,
    ahead: bool,
    residual: Value,
    update: Value,
    block: Value,
    end: Value,
    found: Value,
    tau: Value,
    limit: Value,
    scale: Value,
    back: Value,
    marks: Value,
) -> tuple[Value, ...]:
    taus, limits, scales, backs = (_splat(builder, x, _FLOATS) for x in (tau, limit, scale, back))
    sign_bit, zero = ir.Constant(_INTS, [1 << 31] * _LANES), ir.Constant(_I64, 0)
    none, flags = ir.Constant(_INTS, [0] * _LANES), ir.VectorType(ir.IntType(1), _LANES)
    # Adding -0.0 changes no number, not even the sign of a zero.
    nothing = ir.Constant(_FLOATS, [-0.0] * _LANES)
    number = cgutils.alloca_once_value(builder, found)
    faults = cgutils.alloca_once_value(builder, ir.Constant(flags, [0] * _LANES))
    wholes, hit, negative, whole = (cgutils.alloca_once_value(builder, zero) for _ in range(4))
    offsets = range(0, 256, _STRIDE)

    def bits(lanes: Value) -> Value:
        return builder.bitcast(lanes, _INTS)

    def absolute(lanes: Value) -> Value:
        return call(builder, f"llvm.fabs.v{_LANES}f32", _FLOATS, lanes)

    def load_update(address: Value, offset: int) -> Value:
        values = _load(builder, address, offset, _FLOATS)
        return builder.fmul(values, scales) if ahead else values

    def subtract(total: Value, added: Value) -> tuple[Value, Value, Value]:
        """Return which sums reach tau, the absolute values after the subtraction, and the new residual."""
        over = builder.fcmp_ordered(">=", absolute(total), taus)
        rest = builder.select(over, builder.fsub(absolute(total), taus), absolute(total))
        left = builder.bitcast(builder.or_(bits(rest), builder.and_(bits(total), sign_bit)), _FLOATS)
        return over, rest, builder.fsub(left, builder.fmul(added, backs)) if ahead else left

    def masks(overs: list[Value], totals: list[Value]) -> None:
        minus = [builder.icmp_signed("<", bits(total), none) for total in totals]
        for target, lanes in ((hit, overs), (negative, minus)):
            mask = zero
            for offset, each in zip(offsets, lanes, strict=True):
                mask = builder.or_(mask, builder.shl(_bits(builder, each), ir.Constant(_I64, offset // 4)))
            builder.store(mask, target)

    def accumulate_block(r: Value, u: Value) -> None:
        """Process any block."""
        block_overs, block_totals, kept = [], [], zero
        for offset in offsets:
            added = load_update(u, offset)
            fault = builder.fcmp_unordered(">", absolute(added), limits)
            builder.store(builder.or_(builder.load(faults), fault), faults)
            added = builder.select(fault, nothing, added)
            total = builder.fadd(_load(builder, r, offset, _FLOATS), added)
            over, rest, left = subtract(total, added)
            more = builder.fcmp_ordered(">=", rest, taus)
            _store(builder, builder.select(more, total, left), r, offset)
            kept = builder.or_(kept, builder.shl(_bits(builder, more), ir.Constant(_I64, offset // 4)))
            block_overs.append(over)
            block_totals.append(total)
        masks(block_overs, block_totals)
        builder.store(kept, whole)
        builder.store(builder.or_(builder.load(wholes), kept), wholes)

    with cgutils.for_range_slice(builder, block, end, ir.Constant(_I64, 1), _I64) as (index, _):
        shift = builder.mul(index, ir.Constant(_I64, 256))
        r, u = builder.add(residual, shift), builder.add(update, shift)
        for offset in range(0, 256, 64):
            for address in (r, u):
                hint = [ir.Constant(_I32, v) for v in (0, 3, 1)]
                call(builder, "llvm.prefetch.p0", ir.VoidType(), _pointer(builder, address, offset + AHEAD, _I8), *hint)
        # First as if the block had no fault and no whole sum, which is then checked for all elements at once.
        overs: list[Value] = []
        totals: list[Value] = []
        lefts: list[Value] = []
        most_added, most_rest = none, none
        for offset in offsets:
            added = load_update(u, offset)
            totals.append(builder.fadd(_load(builder, r, offset, _FLOATS), added))
            over, rest, left = subtract(totals[-1], added)
            overs.append(over)
            lefts.append(left)
            most_added = call(builder, f"llvm.umax.v{_LANES}i32", _INTS, most_added, bits(absolute(added)))
            most_rest = call(builder, f"llvm.umax.v{_LANES}i32", _INTS, most_rest, bits(rest))
        unusual = builder.or_(
            builder.icmp_unsigned(">", most_added, bits(limits)), builder.icmp_unsigned(">=", most_rest, bits(taus))
        )
        unusual = builder.icmp_unsigned("!=", _bits(builder, unusual), zero)
        with builder.if_else(unusual, likely=False) as (slowly, quickly):
            with slowly:
                accumulate_block(r, u)
            with quickly:
                for offset, left in zip(offsets, lefts, strict=True):
                    _store(builder, left, r, offset)
                masks(overs, totals)
                builder.store(zero, whole)
        record = builder.add(marks, builder.mul(builder.load(number), ir.Constant(_I64, 32)))
        words = (*(builder.load(mask) for mask in (hit, negative, whole)), index)
        for i, word in enumerate(words):
            builder.store(word, _pointer(builder, record, 8 * i, _I64))
        some = builder.zext(builder.icmp_unsigned("!=", words[0], zero), _I64)
        builder.store(builder.add(builder.load(number), some), number)
    some_whole = builder.zext(builder.icmp_unsigned("!=", builder.load(wholes), zero), _I64)
    some_fault = builder.zext(builder.icmp_unsigned("!=", _bits(builder, builder.load(faults)), zero), _I64)
    return builder.load(number), some_whole, some_fault


@make_intrinsic(types.uint64(types.int64, types.float32, types.float32))
def beyond(builder: IRBuilder, update: Value, limit: Value, scale: Value) -> Value:
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
def bit_lengths(builder: IRBuilder, gaps: Value) -> Value:
    """Return the sum of the bit lengths of the 64 uint32 at `gaps`."""
    total = ir.Constant(_INTS, [0] * _LANES)
    for offset in range(0, 256, _STRIDE):
        x = _load(builder, gaps, offset, _INTS)
        zeros = call(builder, f"llvm.ctlz.v{_LANES}i32", _INTS, x, ir.Constant(ir.IntType(1), 0))
        total = builder.add(total, builder.sub(ir.Constant(_INTS, [32] * _LANES), zeros))
    return builder.zext(call(builder, f"llvm.vector.reduce.add.v{_LANES}i32", _I32, total), _I64)


@make_intrinsic(types.int64(types.int64, types.int64))
def code_lengths(builder: IRBuilder, gaps: Value, k: Value) -> Value:
    """Return the bits of the 64 uint32 at `gaps` in the gap code with parameter k, without the k low bits of each."""

    def constant(value: int) -> Value:
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


@make_intrinsic(types.void(*[types.int64] * 4))
def unpack_entries(builder: IRBuilder, entries: Value, count: Value, gaps: Value, signs: Value) -> None:
    """Split packed entries into the uint32 gaps between them and uint8 signs: 1 for a negative one, 2 for a multiple.

    The arguments are addresses and a number of entries, which is rounded up to a multiple of 16.
    """

    def constant(value: int) -> Value:
        return ir.Constant(_INTS, [value] * _LANES)

    with cgutils.for_range_slice(builder, ir.Constant(_I64, 0), count, ir.Constant(_I64, _LANES), _I64) as (first, _):
        source = builder.add(entries, builder.shl(first, ir.Constant(_I64, 2)))
        one, next_one = (_load(builder, source, offset, _INTS) for offset in (0, 4))
        here, there = (builder.and_(x, constant(POSITION)) for x in (one, next_one))
        gap = builder.sub(builder.sub(there, here), constant(1))
        _store(builder, gap, builder.add(gaps, builder.shl(first, ir.Constant(_I64, 2))), 0)
        multiple = builder.and_(builder.lshr(one, constant(29)), constant(2))
        flags = builder.or_(builder.lshr(one, constant(31)), multiple)
        target = _pointer(builder, builder.add(signs, first), 0, _BYTES)
        builder.store(builder.trunc(flags, _BYTES), target).align = 1


@make_intrinsic(types.int64(*[types.int64] * 6))
def code_entries(
    builder: IRBuilder, gaps: Value, signs: Value, k: Value, length: Value, words: Value, sizes: Value
) -> Value:
    """Write the codes of up to 64 gaps, each followed by a sign, in the gap code with parameter k.

    The arguments are the addresses of uint32 gaps and uint8 signs, k, the number of gaps, and the addresses of 32
    uint64 for the codes of two entries each, and of 32 uint64 for their numbers of bits. 64 gaps and signs are read.

    Returns the largest number of bits of an entry. If it is above 28, the codes are wrong.
    """

    def constant(value: int) -> Value:
        return ir.Constant(_INTS, [value] * _LANES)

    def pairs(lanes: Value) -> tuple[Value, Value]:
        wide = builder.bitcast(lanes, _WORDS)
        return builder.and_(wide, ir.Constant(_WORDS, [0xFFFFFFFF] * _WIDE_LANES)), builder.lshr(
            wide, ir.Constant(_WORDS, [32] * _WIDE_LANES)
        )

    ks, lengths = (_splat(builder, builder.trunc(x, _I32), _INTS) for x in (k, length))
    one = constant(1)
    low, longest = builder.sub(builder.shl(one, ks), one), constant(0)
    for i in range(4):
        x = _load(builder, gaps, 64 * i, _INTS)
        flags = builder.load(_pointer(builder, signs, 16 * i, _BYTES))
        flags.align = 1
        sign = builder.and_(builder.zext(flags, _INTS), one)
        q = builder.lshr(x, ks)
        # e and z are those of `docs/wire-format.md`; below the escape they are 1 and 0.
        e = builder.sub(call(builder, f"llvm.umax.v{_LANES}i32", _INTS, q, constant(ESCAPE)), constant(ESCAPE - 1))
        z = builder.sub(constant(31), call(builder, f"llvm.ctlz.v{_LANES}i32", _INTS, e, ir.Constant(ir.IntType(1), 0)))
        ones = builder.add(call(builder, f"llvm.umin.v{_LANES}i32", _INTS, q, constant(ESCAPE)), z)
        more = builder.sub(e, builder.shl(one, z))
        rest = builder.or_(builder.and_(x, low), builder.shl(sign, ks))
        rest = builder.or_(more, builder.shl(rest, z))
        code = builder.shl(rest, builder.add(ones, one))
        code = builder.or_(code, builder.sub(builder.shl(one, ones), one))
        size = builder.add(builder.add(ones, z), builder.add(ks, constant(2)))
        number = ir.Constant(_INTS, list(range(_LANES * i, _LANES * (i + 1))))
        used = builder.icmp_unsigned("<", number, lengths)
        code, size = (builder.select(used, each, constant(0)) for each in (code, size))
        longest = call(builder, f"llvm.umax.v{_LANES}i32", _INTS, longest, size)
        (first, second), (bits, more_bits) = pairs(code), pairs(size)
        _store(builder, builder.or_(first, builder.shl(second, bits)), words, 64 * i)
        _store(builder, builder.add(bits, more_bits), sizes, 64 * i)
    return builder.zext(call(builder, f"llvm.vector.reduce.umax.v{_LANES}i32", _I32, longest), _I64)


@make_intrinsic(types.int64(types.uint64))
def trailing_zeros(builder: IRBuilder, x: Value) -> Value:
    """Return the number of zero bits below the lowest set bit; 64 if no bit is set."""
    return call(builder, "llvm.cttz.i64", _I64, x, ir.Constant(ir.IntType(1), 0))


@make_intrinsic(types.int64(types.uint64))
def bit_length(builder: IRBuilder, x: Value) -> Value:
    """Return the number of bits of x without leading zeros; 0 for 0."""
    zeros = call(builder, "llvm.ctlz.i64", _I64, x, ir.Constant(ir.IntType(1), 0))
    return builder.sub(ir.Constant(_I64, 64), zeros)


@make_intrinsic(types.int64(types.uint64))
def population(builder: IRBuilder, x: Value) -> Value:
    """Return the number of set bits."""
    return call(builder, "llvm.ctpop.i64", _I64, x)


@make_intrinsic(types.uint64(types.int64))
def load_word(builder: IRBuilder, address: Value) -> Value:
    """Return the uint64 at an address, which may be unaligned."""
    return _load(builder, address, 0, _I64)


@make_intrinsic(types.void(types.int64, types.uint64))
def store_word(builder: IRBuilder, address: Value, value: Value) -> None:
    """Write a uint64 at an address, which may be unaligned."""
    _store(builder, value, address, 0)


@make_intrinsic(types.float32(types.int64))
def load_float(builder: IRBuilder, address: Value) -> Value:
    """Return the float32 at an address."""
    return _load(builder, address, 0, _F32)


@make_intrinsic(types.void(types.int64, types.float32))
def store_float(builder: IRBuilder, address: Value, value: Value) -> None:
    """Write a float32 at an address."""
    _store(builder, value, address, 0)


@make_intrinsic(types.uint8(types.int64))
def load_byte(builder: IRBuilder, address: Value) -> Value:
    """Return the byte at an address."""
    return builder.load(_pointer(builder, address, 0, _I8))


@make_intrinsic(types.uint32(types.int64))
def load_half(builder: IRBuilder, address: Value) -> Value:
    """Return the uint32 at an address, which may be unaligned."""
    value = builder.load(_pointer(builder, address, 0, _I32))
    value.align = 1
    return value


@make_intrinsic(types.void(types.int64, types.uint32))
def store_half(builder: IRBuilder, address: Value, value: Value) -> None:
    """Write a uint32 at an address, which may be unaligned."""
    builder.store(value, _pointer(builder, address, 0, _I32)).align = 1


@make_intrinsic(types.void(types.int64))
def prefetch(builder: IRBuilder, address: Value) -> None:
    """Prefetch 128 bytes at an address. An invalid address has no effect."""
    for offset in (0, 64):
        hint = [ir.Constant(_I32, v) for v in (0, 3, 1)]
        call(builder, "llvm.prefetch.p0", ir.VoidType(), _pointer(builder, address, offset, _I8), *hint)


@make_intrinsic(types.int64(types.int64))
def fetch(builder: IRBuilder, address: Value) -> Value:
    """Prefetch the memory at an address for writing, and return the address."""
    hint = [ir.Constant(_I32, v) for v in (1, 3, 1)]
    call(builder, "llvm.prefetch.p0", ir.VoidType(), _pointer(builder, address, 0, _I8), *hint)
    return address


@make_intrinsic(types.int64(*[types.int64] * 6))
def read_entries(
    builder: IRBuilder,
    message: Value,
    last_word: Value,
    lanes: Value,
    entries: Value,
    triples: Value,
    singles: Value,
) -> Value:
    """Read the gaps and signs of entries of TILES tiles at once. No branch depends on the bits.

    The arguments are the address of the message; the offset of its last 8 bytes, after which nothing is read; the
    address of five rows of int64, with a column for each tile; and the address of the result, a row of uint32 for each
    entry: the lowest bits of index << 2 | sign. The rows hold the position in bits, the index of the entry before, and
    the Rice parameter; the position and the index after the entries are written to the last two rows.

    Words of 64 bits are read, first `triples` words of three entries each, then `singles` words of one entry each.
    Returns a mask of the tiles whose results are wrong: those with entries that did not fit their word, or with an
    index above any update's.
    """

    def constant(value: int) -> Value:
        return ir.Constant(_WORDS, [value] * _WIDE_LANES)

    def larger(a: Value, b: Value) -> Value:
        return call(builder, f"llvm.umax.v{_WIDE_LANES}i64", _WORDS, a, b)

    def smaller(a: Value, b: Value) -> Value:
        return call(builder, f"llvm.umin.v{_WIDE_LANES}i64", _WORDS, a, b)

    one, final, groups = constant(1), _splat(builder, last_word, _WORDS), range(0, TILES, _WIDE_LANES)
    bits, index, k = ([_load(builder, lanes, 8 * (TILES * row + g), _WORDS) for g in groups] for row in range(3))
    low = [builder.sub(builder.shl(one, each), one) for each in k]
    fixed = [builder.add(each, constant(2)) for each in k]
    position, where = ([cgutils.alloca_once_value(builder, each) for each in some] for some in (bits, index))
    longest, highest = ([cgutils.alloca_once_value(builder, constant(0)) for _ in groups] for _ in range(2))
    target = cgutils.alloca_once_value(builder, entries)

    def load_words(g: int) -> tuple[Value, Value, Value]:
        bit = builder.load(position[g])
        byte = smaller(builder.lshr(bit, constant(3)), final)
        word = constant(0)
        for tile in range(_WIDE_LANES):
            number = ir.Constant(_I32, tile)
            address = builder.add(message, builder.extract_element(byte, number))
            word = builder.insert_element(word, _load(builder, address, 0, _I64), number)
        begin = builder.sub(bit, builder.shl(byte, constant(3)))
        return builder.lshr(word, smaller(begin, constant(63))), begin, begin

    def read_entry(g: int, word: Value, used: Value, address: Value) -> tuple[Value, Value]:
        # A limit on the ones keeps shifts below 64. Words with more of them do not hold the entry anyway.
        stop = builder.or_(builder.xor(word, constant(-1)), constant(1 << 40))
        ones = call(builder, f"llvm.cttz.v{_WIDE_LANES}i64", _WORDS, stop, ir.Constant(ir.IntType(1), 0))
        z = builder.sub(larger(ones, constant(ESCAPE)), constant(ESCAPE))
        word = builder.lshr(builder.lshr(word, one), ones)
        power = builder.shl(one, z)
        more = builder.and_(word, builder.sub(power, one))
        # Without an escape z is 0, so this is the number of ones.
        quotient = builder.add(builder.add(power, more), builder.sub(builder.sub(ones, z), one))
        word = builder.lshr(word, z)
        gap = builder.or_(builder.shl(quotient, k[g]), builder.and_(word, low[g]))
        word = builder.lshr(word, k[g])
        after = builder.add(builder.load(where[g]), builder.add(gap, one))
        builder.store(after, where[g])
        entry = builder.or_(builder.shl(after, constant(2)), builder.and_(word, one))
        _store(builder, builder.trunc(entry, _HALVES), address, 4 * _WIDE_LANES * g)
        return builder.lshr(word, one), builder.add(used, builder.add(builder.add(ones, z), fixed[g]))

    for count, words in ((3, triples), (1, singles)):
        with cgutils.for_range(builder, words):
            state = [load_words(g) for g in range(len(groups))]
            for _ in range(count):
                address = builder.load(target)
                for g, (word, used, begin) in enumerate(state):
                    state[g] = (*read_entry(g, word, used, address), begin)
                builder.store(builder.add(address, ir.Constant(_I64, 4 * TILES)), target)
            for g, (_, used, begin) in enumerate(state):
                bit = builder.load(position[g])
                builder.store(builder.add(bit, builder.sub(used, begin)), position[g])
                builder.store(larger(builder.load(longest[g]), used), longest[g])
                builder.store(builder.or_(builder.load(highest[g]), builder.load(where[g])), highest[g])
    mask = ir.Constant(_I64, 0)
    for g, first in enumerate(groups):
        for row, kept in ((3, position), (4, where)):
            _store(builder, builder.load(kept[g]), lanes, 8 * (TILES * row + first))
        wrong = builder.or_(
            builder.icmp_unsigned(">", builder.load(longest[g]), constant(64)),
            builder.icmp_unsigned(">", builder.load(highest[g]), constant(2 * N_MAX - 1)),
        )
        some = builder.zext(builder.bitcast(wrong, ir.IntType(_WIDE_LANES)), _I64)
        mask = builder.or_(mask, builder.shl(some, ir.Constant(_I64, first)))
    return mask


@make_intrinsic(types.void(*[types.int64] * 4))
def transpose(builder: IRBuilder, rows: Value, lists: Value, stride: Value, count: Value) -> None:
    """Copy rows of TILES uint32 to lists whose addresses are `stride` bytes apart; `count` is rounded up to eights."""
    step = ir.Constant(_I64, _WIDE_LANES)
    with cgutils.for_range_slice(builder, ir.Constant(_I64, 0), count, step, _I64) as (first, _):
        source = builder.add(rows, builder.mul(first, ir.Constant(_I64, 4 * TILES)))
        target = builder.add(lists, builder.mul(first, ir.Constant(_I64, 4)))
        for tile in range(0, TILES, _WIDE_LANES):
            square = [_load(builder, source, 4 * (TILES * i + tile), _HALVES) for i in range(_WIDE_LANES)]
            # Each stage exchanges one bit of the number of the row with the same bit of the number of the column.
            for bit in (1, 2, 4):
                for i in range(_WIDE_LANES):
                    if not i & bit:
                        a, b = square[i], square[i | bit]
                        for row, shift in ((i, 0), (i | bit, bit)):
                            lanes = [c + shift if not c & bit else 8 + c + shift - bit for c in range(_WIDE_LANES)]
                            square[row] = builder.shuffle_vector(a, b, ir.Constant(_HALVES, lanes))
            for column in square:
                _store(builder, column, target, 0)
                target = builder.add(target, stride)


@make_intrinsic(types.void(types.int64, types.uint32, types.float32))
def add_signed(builder: IRBuilder, address: Value, flags: Value, value: Value) -> None:
    """Add a float32 to the one at an address, with the opposite sign if bit 0 of `flags` is set. Nothing branches."""
    sign = builder.shl(flags, ir.Constant(_I32, 31))
    signed = builder.bitcast(builder.xor(builder.bitcast(value, _I32), sign), _F32)
    _store(builder, builder.fadd(_load(builder, address, 0, _F32), signed), address, 0)


def _move_line(builder: IRBuilder, source: Value, target: Value, bypass: bool = False, add: bool = False) -> None:
    loads = [builder.load(_pointer(builder, address, 0, _FLOATS)) for address in [source, target][: 1 + add]]
    stores = (
        builder.store(ir.Constant(_FLOATS, [0.0] * _LANES), _pointer(builder, source, 0, _FLOATS)),
        builder.store(builder.fadd(*reversed(loads)) if add else loads[0], _pointer(builder, target, 0, _FLOATS)),
    )
    for each in (*loads, *stores):
        each.align = _STRIDE
    if bypass:
        stores[1].set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_I32, 1)]))


@make_intrinsic(types.void(types.int64, types.int64))
def move_line(builder: IRBuilder, source: Value, target: Value) -> None:
    """Copy a line of 64 bytes, and set it to zero at `source`. The addresses are multiples of 64."""
    _move_line(builder, source, target)


@make_intrinsic(types.void(types.int64, types.int64))
def add_line(builder: IRBuilder, source: Value, target: Value) -> None:
    """Add a line to the one at `target`; otherwise do the work of `move_line`."""
    _move_line(builder, source, target, add=True)


@make_intrinsic(types.void(types.int64, types.int64))
def stream_line(builder: IRBuilder, source: Value, target: Value) -> None:
    """Do the work of `move_line`, past the caches. Another thread may read the target after a `fence` of this one."""
    _move_line(builder, source, target, bypass=True)


@make_intrinsic(types.void())
def fence(builder: IRBuilder) -> None:
    """Complete the stores of this thread."""
    builder.fence("seq_cst")
