"""Tests of Threshold(device="cuda") on one virtual rank, against device="cpu" to the bit.

They run on the GPU of this machine, if it has one. If not, they run in Numba's simulator, which must be chosen before
numba.cuda is imported: in a separate process.
"""

# Tests: hvdx/codec/devices.py

import shutil
from dataclasses import replace

import numpy as np
import pytest

from hvdx.codec import Threshold as Codec
from hvdx.codec import devices
from hvdx.comm.local import virtual_world
from hvdx.errors import ConfigError
from hvdx.strategies import StepInput, TensorSpec, Threshold
from tests.kernels.counting import count_work
from tests.kernels.simulator import check_in_simulator

#: Time limit in seconds; the tests take about a fifth of it on one core.
TIME_LIMIT = 200
SPECS = [TensorSpec(f"variable {i}", shape, 4) for i, shape in enumerate(((9, 8), (), (0, 3), (7,)))]
OPTIONS = {
    "density": {"target_density": 0.1},
    "plain": {"tau": 0.01, "index_coding": "none", "lookahead": 0},
    "falling": {"target_density": 0.1, "warmup": "density:2"},
}


#: True if these tests have a GPU, real or simulated.
THERE = devices.simulated() or shutil.which("nvidia-smi") is not None


@pytest.mark.long
def test_exchange_on_a_gpu_in_the_simulator():
    """Run TestOnGpu in a process with the simulator."""
    check_in_simulator(__file__, TIME_LIMIT)


# The started process must not start another one.
test_exchange_on_a_gpu_in_the_simulator.__test__ = not THERE


@pytest.mark.skipif(THERE, reason="there is a GPU")
class TestWithoutGpu:
    @pytest.fixture(autouse=True)
    def _no_gpu(self, monkeypatch):
        def none(index=None):
            raise ConfigError("threshold: device='cuda': no GPU.")

        monkeypatch.setattr(devices, "gpu", none)

    def test_cuda_is_refused(self):
        remedies = r"tensorflow\[and-cuda\], jax\[cuda13\] or jax\[cuda12\] .*, a PyTorch .* with CUDA"
        with pytest.raises(ConfigError, match="expected all variables on one GPU, got .*" + remedies):
            Threshold(device="cuda").open(virtual_world(1)[0], SPECS)

    def test_auto_takes_the_host_and_says_why(self, capsys):
        there = [replace(s, device="GPU:0") for s in SPECS]
        assert Threshold(tau=0.1).device_for(there) == "cpu"
        assert Threshold(tau=0.1).open(virtual_world(1)[0], there).encoder.read_residual().size == 80
        assert (
            "every update crosses from the GPU to the host. threshold: device='cuda': no GPU" in capsys.readouterr().err
        )
        for strategy, specs in ((Threshold(tau=0.1), SPECS), (Threshold(tau=0.1, device="cpu"), there)):
            strategy.open(virtual_world(1)[0], specs)
        assert capsys.readouterr().err == ""


def update(step):
    """Return this rank's update, and the same as one array."""
    random = np.random.default_rng(step)
    arrays = [np.asarray(random.normal(size=s.shape) * 0.01, np.float32) for s in SPECS]
    return arrays, np.concatenate([np.ravel(a) for a in arrays])


class Pair:
    """Exchanges of the same steps on the host and on the GPU."""

    def __init__(self, **options):
        there = [replace(s, device="GPU:0") for s in SPECS]
        self.host, self.gpu = (
            Threshold(**options, device=device).open(virtual_world(1)[0], specs)
            for device, specs in (("cpu", SPECS), ("cuda", there))
        )

    def step(self, step, finite=True):
        """Take a step on both, and compare the results."""
        arrays, flat = update(step)
        expected = np.concatenate([np.ravel(a) for a in self.host.step(arrays, finite)])
        on_gpu = devices.gpu().place(flat)
        (got,) = self.gpu.step([on_gpu], finite)
        devices.gpu().assign(np.full_like(flat, np.nan), on_gpu)  # TensorFlow uses the memory again
        assert got.copy_to_host().tobytes() == expected.tobytes(), step
        return expected

    def compare(self):
        """Compare the states."""
        mine, theirs = (exchange.state_dict() for exchange in (self.host, self.gpu))
        assert {k: v.tobytes() for k, v in mine.items()} == {k: v.tobytes() for k, v in theirs.items()}
        assert self.host.telemetry.messages == self.gpu.telemetry.messages > 0
        return mine


@pytest.mark.skipif(not THERE, reason="no GPU, see test_exchange_on_a_gpu_in_the_simulator")
class TestOnGpu:
    """Tests on a GPU, or in the process that `test_exchange_on_a_gpu_in_the_simulator` starts."""

    __test__ = THERE

    @pytest.mark.parametrize("name", OPTIONS)
    def test_steps_are_those_of_the_host(self, name):
        pair = Pair(**OPTIONS[name])
        results = [pair.step(step, finite=step != 2) for step in range(5)]
        assert sum(map(np.any, results)) >= 3
        saved = pair.compare()
        resumed = Pair(**OPTIONS[name])
        resumed.gpu.load_state_dict(saved)
        resumed.host.load_state_dict(saved)
        for step in range(5, 7):
            resumed.step(step)

    def test_the_codec_sets_an_output_to_a_sum(self):
        host, gpu = Codec(tau=0.5, threads=1), Codec(tau=0.5, device="cuda")
        message, _ = host.encode([np.linspace(-2, 2, 200, dtype=np.float32)], host.init([200]))
        want, out = np.zeros(200, np.float32), devices.gpu().place(np.full(200, 7, np.float32))
        host.decode_sum([message, message], [want], 1 / 3)
        gpu.decode_sum([message, message], [out], 1 / 3)
        assert devices.gpu().fetch(out).tobytes() == want.tobytes()

    def test_residuals_can_be_read_and_changed(self):
        pair = Pair(tau=0.1)
        pair.step(0)
        more, _ = update(9)
        for exchange in (pair.host, pair.gpu):
            exchange.add_to_residual(more)
        for mine, theirs in zip(pair.host.residuals, pair.gpu.residuals, strict=True):
            assert mine.shape == theirs.shape
            assert mine.tobytes() == theirs.tobytes()
        assert pair.host.encoder.residual_rms() == pair.gpu.encoder.residual_rms() > 0
        pair.compare()

    def test_nan_names_the_variable(self, capsys):
        pair = Pair(tau=0.1)
        _, flat = update(0)
        flat[75] = np.nan
        pair.gpu.step([devices.gpu().place(flat)])
        assert "variable 3: element 2 is nan" in capsys.readouterr().err
        assert not pair.gpu.residuals[0].any()

    @pytest.mark.skipif(not devices.simulated(), reason="only the simulator's launches can be counted")
    def test_only_messages_cross(self, monkeypatch):
        pair = Pair(tau=0.01)
        flat = devices.gpu().place(update(0)[1])
        pair.gpu.step([flat])
        counted = count_work(monkeypatch)
        pair.gpu.step([flat])
        # To the host: sample, size of the message, message, and outcome of the checks. A launch clears the result.
        assert counted == {"launches": 1 + 8 + 3 + 1, "to host": 4, "to device": 2 + 3}

    def test_result_goes_to_the_array_of_the_caller(self):
        pair, on_gpu = Pair(tau=0.01), []

        def allocate(n):
            on_gpu.append(devices.gpu().zeros(n))
            return on_gpu[-1]

        updates = [devices.gpu().place(update(step)[1]) for step in range(2)]
        (first,), (second,) = ([*pair.gpu.take(StepInput([u], allocate=allocate))] for u in updates)
        assert (first is on_gpu[0], second is on_gpu[1]) == (True, True)
        assert first.copy_to_host().any()
