"""Floating-point mode of a kernel: denormal numbers are kept, in whichever thread it runs.

TensorFlow's threads flush numbers below 2**-126 to zero, and other threads do not. Without this module a residual would
depend on the number of threads that share the work. The mode is in a register of each thread. A kernel sets it to IEEE
754 behaviour when it begins, and restores it when it ends.
"""

from llvmlite import ir
from llvmlite.ir import IRBuilder, Value
from numba.core import cgutils, types

from hvdx.kernels.simd import call, make_intrinsic

_I32, _I64, _POINTER = ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()
#: Bits of x86's MXCSR: flush denormal results to zero (FTZ), and treat denormal arguments as zero (DAZ).
_MXCSR = 1 << 15 | 1 << 6
#: Bits of Arm's FPCR: flush results and arguments (FZ), and arguments alone (FIZ).
_FPCR = 1 << 24 | 1 << 0


def _is_x86(builder: IRBuilder) -> bool:
    return str(builder.module.triple).startswith(("x86_64", "i686"))


def _is_arm(builder: IRBuilder) -> bool:
    return str(builder.module.triple).startswith(("aarch64", "arm64"))


def _read(builder: IRBuilder) -> Value:
    """Return the mode, an i64; 0 on a processor of another kind."""
    if _is_x86(builder):
        slot = cgutils.alloca_once(builder, _I32)
        call(builder, "llvm.x86.sse.stmxcsr", ir.VoidType(), builder.bitcast(slot, _POINTER))
        return builder.zext(builder.load(slot), _I64)
    if _is_arm(builder):
        return call(builder, "llvm.aarch64.get.fpcr", _I64)
    return ir.Constant(_I64, 0)


def _write(builder: IRBuilder, mode: Value) -> None:
    # The compiler moves no load or store across a fence, so the arithmetic between them stays there too. A fence of one
    # thread emits no instruction.
    builder.fence("seq_cst", "singlethread")
    if _is_x86(builder):
        slot = cgutils.alloca_once(builder, _I32)
        builder.store(builder.trunc(mode, _I32), slot)
        call(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), builder.bitcast(slot, _POINTER))
    elif _is_arm(builder):
        call(builder, "llvm.aarch64.set.fpcr", ir.VoidType(), mode)
    builder.fence("seq_cst", "singlethread")


@make_intrinsic(types.int64())
def keep_denormals(builder: IRBuilder) -> Value:
    """Let this thread keep denormal numbers; return its mode before, for `restore_mode`."""
    before = _read(builder)
    flags = _MXCSR if _is_x86(builder) else _FPCR
    _write(builder, builder.and_(before, ir.Constant(_I64, ~flags)))
    return before


@make_intrinsic(types.void(types.int64))
def restore_mode(builder: IRBuilder, mode: Value) -> None:
    """Set the mode of this thread to the one that `keep_denormals` returned."""
    _write(builder, mode)
