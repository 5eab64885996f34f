"""Trainings on JAX or PyTorch with a GPU, or in its simulator, on two ranks: `mpirun -n 2 python -m tests.gpu_battery`.

tests/keras/adapters/test_stepped_gpu.py runs them.
"""

import contextlib
import functools
import math

import keras
import pytest

import hvdx
from hvdx import comm as world
from hvdx.codec import devices
from hvdx.comm.local import virtual_world
from hvdx.keras import Distribute
from hvdx.keras.adapters import stepped_updates
from hvdx.keras.backends import stepped as functions
from hvdx.keras.fit import replicas
from hvdx.keras.variables import view_of
from hvdx.strategies import Strategy, TensorSpec, Threshold
from hvdx.strategies.threshold.encoder import ThresholdEncoder
from tests.backend_battery import cnn, compiled, data, mlp, transformer

#: Rows of a batch, and of all batches of both ranks.
BATCH, ROWS = 4, 32


def fitted(model: keras.Model, strategy: Strategy, epochs: int = 4) -> list[bytes]:
    """Train on this rank's share; return the weights, of which all ranks have the same."""
    words, classes, *_ = data(ROWS)
    mine = slice(hvdx.rank(), None, hvdx.size())
    callbacks = [Distribute(strategy)]
    logs = model.fit(words[mine], classes[mine], BATCH, epochs, shuffle=False, verbose=0, callbacks=callbacks).history
    assert replicas.differing(model.weights, world.start()) == {}, strategy
    assert epochs == 1 or logs["loss"][-1] < logs["loss"][0], (strategy, logs)
    return [view_of(v).tobytes() for v in model.weights]


def check_messages(patch: pytest.MonkeyPatch) -> list[int]:
    """Compare each message of a GPU with that of the CPU's encoder for the same updates; return the bytes of them."""
    encode, shadows, checked = ThresholdEncoder.encode, {}, []

    def both(self, step_input, step):
        if self.device is None:
            return encode(self, step_input, step)
        given = devices.gpu().fetch(step_input.tensors[0])
        if id(self) not in shadows:
            specs = [TensorSpec("all", given.shape, 4)]
            shadows[id(self)] = self, ThresholdEncoder(self.options, virtual_world(1)[0], specs)
        coded = encode(self, step_input, step)
        expected = encode(shadows[id(self)][1], step_input._replace(tensors=[given]), step)
        assert coded.message.tobytes() == expected.message.tobytes(), step
        checked.append(coded.message.size)
        return coded

    patch.setattr(ThresholdEncoder, "encode", both)
    return checked


def count_copies(patch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """Return the elements of each array that exchanges after the first copy to the host, and of those steps tell it."""
    copied: list[int] = []
    told: list[int] = []
    exchanging = [0, False]

    def watch(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def watching(array, *arguments, **options):
            if exchanging[1]:
                copied.append(math.prod(array.shape))
            return original(array, *arguments, **options)

        patch.setattr(owner, name, watching)

    if devices.simulated():
        from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray as Array
    else:
        from numba.cuda.cudadrv.devicearray import DeviceNDArray as Array
    watch(Array, "copy_to_host")
    watch(stepped_updates, "view_of")
    guard: object = contextlib.nullcontext
    if keras.backend.backend() == "torch":
        import torch

        for name in ("cpu", "numpy", "tolist", "item"):
            watch(torch.Tensor, name)
    else:
        import jax

        # On a GPU a copy to the host raises.
        guard = functools.partial(jax.transfer_guard_device_to_host, "disallow_explicit")
    tell, meet = functions().tell, stepped_updates.SteppedUpdates.meet

    def telling(work, tensors):
        told.extend(math.prod(t.shape) for t in tensors)
        tell(work, tensors)

    def meeting(self):
        exchanging[:] = exchanging[0] + 1, exchanging[0] > 0
        with guard() if exchanging[1] else contextlib.nullcontext():
            meet(self)
        exchanging[1] = False

    patch.setattr(functions(), "tell", telling)
    patch.setattr(stepped_updates.SteppedUpdates, "meet", meeting)
    return copied, told


def wide(units: int) -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Rescaling(0.1), *(keras.layers.Dense(units, "tanh") for _ in range(2))]
    return keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(3)])


def main() -> None:
    hvdx.init()
    small = devices.simulated()
    device = "cuda" if small else "auto"
    strategies: list[Strategy] = [Threshold(target_density=0.1, device=device, period=p) for p in (1, 2)]
    strategies += [hvdx.AllReduce(), hvdx.ParameterAveraging(period=3)]
    if small:
        # The processor's arithmetic is the same in each training.
        for period in (1, 2):
            here, there = (
                fitted(compiled(wide(4), "adamw"), Threshold(0.001, device=where, period=period), 2)
                for where in ("cpu", "cuda")
            )
            assert here == there, period
    with pytest.MonkeyPatch.context() as patch:
        checked = check_messages(patch)
        for make in (functools.partial(wide, 4),) if small else (mlp, cnn, transformer):
            for strategy in strategies[:1] if small else strategies:
                fitted(compiled(make()), strategy, 2 if small else 6)
        assert checked, "no exchange ran on the GPU"
    with pytest.MonkeyPatch.context() as patch:
        copied, told = count_copies(patch)
        model = compiled(wide(4 if small else 512), "adamw")
        fitted(model, Threshold(0.001, device=device, period=1) if small else strategies[0], 1)
        # Of each exchange: a sample, the size of the message, the message, and the outcome of the checks.
        assert len(copied) == 4 * (ROWS // hvdx.size() // BATCH - 1), copied
        assert small or max(*copied, *told) < model.count_params() / 4, (copied, told)
    print("DONE", flush=True)


if __name__ == "__main__":
    main()
