"""Vector and bit instructions that Numba does not offer, as LLVM code for any processor that LLVM supports.

Addresses are int64. LLVM splits the 16-lane vectors into vectors of the processor, so one source serves AVX-512, AVX2,
SSE and NEON.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from hvdx.kernels.tiles import ESCAPE, SHARES

_LANES = 16
_STRIDE = 4 * _LANES
_I8, _I16, _I32, _I64, _F32 = (ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType())
_FLOATS, _INTS = ir.VectorType(_F32, _LANES), ir.VectorType(_I32, _LANES)
#: Prefetch distance in bytes: 1.5 pages of 4 KiB. Prefetching lets one core reach the bandwidth of memory.
AHEAD = 6144


def call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call an LLVM intrinsic by its name."""
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _splat(builder: Any, scalar: Any, kind: Any) -> Any:
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * _LANES))


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
