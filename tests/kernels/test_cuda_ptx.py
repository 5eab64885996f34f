"""Tests of the CUDA kernels as PTX, without a GPU: types, shared memory, and rounding like NumPy's."""

import importlib.util
import re
import types

import pytest

if importlib.util.find_spec("numba_cuda") is None:
    pytest.skip("numba-cuda is not installed: pip install 'hvdx[cuda]'", allow_module_level=True)

from numba import cuda

from hvdx.kernels import cuda as kernels

pytestmark = pytest.mark.long

#: Bytes of shared memory that a block has by default.
SHARED = 48 * 1024


@pytest.fixture(scope="module", params=[(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
def ptx(request):
    """Compute capability, and PTX of each kernel by name."""
    with pytest.MonkeyPatch.context() as patch:
        # When Numba compiles the functions that a kernel calls, it asks the current device, even for another target.
        device = types.SimpleNamespace(compute_capability=request.param)
        patch.setattr("numba.cuda.dispatcher.get_current_device", lambda: device)
        return request.param, {
            name: cuda.compile_ptx(kernel.py_func, signature, cc=request.param)[0]
            for name, (kernel, signature) in kernels.signatures().items()
        }


def test_kernels_are_compiled_for_the_device(ptx):
    (major, minor), texts = ptx
    for name, text in texts.items():
        assert f".target sm_{major}{minor}" in text, name
        assert ".visible .entry" in text, name


def test_kernels_round_every_product_by_itself(ptx):
    for name, text in ptx[1].items():
        assert not re.search(r"\b(fma|mad)\.\S*f(32|64)", text), f"{name}: a contracted multiplication and addition"
        assert not re.search(r"\.(ftz|approx|full)\b", text), f"{name}: a flushed or approximate operation"
        assert not re.search(r"\bdiv\.\S*f64", text), f"{name}: a division in float64, which is slow on many GPUs"
    assert "mul.rn.f32" in ptx[1]["accumulate"]
    assert "mul.f64" in ptx[1]["write_tiles"] or "mul.rn.f64" in ptx[1]["write_tiles"]


def test_kernels_fit_the_shared_memory_of_a_block(ptx):
    for name, text in ptx[1].items():
        used = sum(int(size) for size in re.findall(r"\.shared \.align.*\[(\d+)\];", text))
        assert used <= SHARED, name
        assert used > 0 or name not in ("size_tiles", "accumulate")


def test_kernels_keep_nothing_in_local_memory(ptx):
    for name, text in ptx[1].items():
        assert ".local" not in text, f"{name}: an array that should be in registers is in memory"


def test_every_kernel_is_listed():
    modules = (kernels.cuda_encode, kernels.cuda_tiles, kernels.cuda_decode)
    launched = {
        name
        for module in modules
        for name, value in vars(module).items()
        if hasattr(value, "py_func") and not value.targetoptions.get("device")
    }
    assert launched == set(kernels.KERNELS)


def test_two_blocks_of_the_main_loop_run_at_once(ptx):
    """A multiprocessor has 65536 registers. Two blocks have enough loads in flight for the bandwidth of its memory."""
    linker = pytest.importorskip("cuda.bindings.nvjitlink")
    (major, minor), texts = ptx
    handle, code = linker.create(2, [f"-arch=sm_{major}{minor}", "-verbose"]), texts["accumulate"].encode()
    try:
        linker.add_data(handle, linker.InputType.PTX, code, len(code), "accumulate")
        linker.complete(handle)
        log = bytearray(linker.get_info_log_size(handle))
        linker.get_info_log(handle, log)
    finally:
        linker.destroy(handle)
    (registers,) = re.findall(rb"Used (\d+) registers", bytes(log))
    assert int(registers) * kernels.cuda_encode.THREADS * 2 <= 65536
    assert b"0 bytes spill stores, 0 bytes spill loads" in log
