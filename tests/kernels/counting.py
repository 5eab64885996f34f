"""Counts of launches and copies in Numba's simulator."""

import collections

import pytest


def count_work(monkeypatch: pytest.MonkeyPatch) -> "collections.Counter[str]":
    """Return the numbers of launches and of copies "to host" and "to device" from now on.

    Each copy to the host waits for the GPU.
    """
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray
    from numba.cuda.simulator.kernel import FakeCUDAKernel

    counts: collections.Counter[str] = collections.Counter()

    def count(owner, name, what):
        original = getattr(owner, name)

        def counting(self, *arguments, **options):
            if not getattr(self, "_device", False):  # functions of the device are called like kernels
                counts[what] += 1
            return original(self, *arguments, **options)

        monkeypatch.setattr(owner, name, counting)

    count(FakeCUDAKernel, "__call__", "launches")
    count(FakeCUDAArray, "copy_to_host", "to host")
    count(FakeCUDAArray, "copy_to_device", "to device")
    return counts
