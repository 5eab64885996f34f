"""The GPU and the number of threads of a rank, tested without a GPU."""

import socket
from types import SimpleNamespace

import pytest
import tensorflow as tf

from hvdx.keras import joining
from hvdx.keras.joining import Gpu, choose_gpu, place
from tests.launch import run


def lists(*each):
    return [{"CUDA_VISIBLE_DEVICES": text} for text in each]


@pytest.mark.parametrize(
    ("visible", "local_rank", "local_size", "environs", "gpu"),
    [
        (0, 1, 4, [{}] * 4, Gpu()),
        (4, 3, 4, [{}] * 4, Gpu(3)),
        (8, 3, 4, [{}] * 4, Gpu(3)),
        (4, 3, 4, lists(*["0,1,2,3"] * 4), Gpu(3)),
        # Each rank sees its own GPUs.
        (1, 3, 4, lists("0", "1", "2", "3"), Gpu(0)),
        (2, 1, 2, lists("0,1", "2,3"), Gpu(0)),
        (1, 3, 4, [{"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0"}] * 4, Gpu(0)),
        (1, 1, 2, [{"JSM_NAMESPACE_RANK": "0", "CUDA_VISIBLE_DEVICES": "0"}] * 2, Gpu(0)),
        (1, 1, 2, lists("GPU-5a", "GPU-77"), Gpu(0)),
        # Fewer GPUs than ranks.
        (1, 3, 4, [{}] * 4, Gpu(0, shared=True)),
        (1, 1, 2, lists("0", "0"), Gpu(0, shared=True)),
        (2, 3, 4, [{}] * 4, Gpu(1, shared=True)),
        (1, 1, 2, [{"SLURM_GPUS_PER_TASK": "1"}, {}], Gpu(0, shared=True)),
        # Slurm gave each rank its own GPUs, but all ranks see all: --gpu-bind=none, or mpirun in the job.
        (4, 3, 4, [{"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}] * 4, Gpu(3)),
        (4, 1, 2, [{"SLURM_GPUS_PER_TASK": "a100:2", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}] * 2, Gpu(1)),
        (2, 1, 2, [{"SLURM_GPUS_PER_TASK": "a100:2", "CUDA_VISIBLE_DEVICES": "0,1"}] * 2, Gpu(0)),
        (2, 1, 2, [{"SLURM_GPUS_PER_TASK": "a100:1,v100:1"}] * 2, Gpu(0)),
        (2, 1, 2, [{"SLURM_GPUS_PER_TASK": "a100"}] * 2, Gpu(1)),
        # One rank on its host.
        (4, 0, 1, [{}], Gpu(0)),
    ],
)
def test_choose_gpu(visible, local_rank, local_size, environs, gpu):
    assert choose_gpu(visible, local_rank, local_size, environs) == gpu


class Config:
    """The used part of `tf.config`, with a given number of GPUs."""

    def __init__(self, gpus, started=False):
        self.gpus = self.visible = [f"GPU:{i}" for i in range(gpus)]
        self.started, self.grows, self.threads = started, [], {"intra": 0, "inter": 0}
        self.experimental = SimpleNamespace(set_memory_growth=lambda gpu, on: self.grows.append(gpu))
        self.threading = SimpleNamespace(
            get_intra_op_parallelism_threads=lambda: self.threads["intra"],
            get_inter_op_parallelism_threads=lambda: self.threads["inter"],
            set_intra_op_parallelism_threads=lambda n: self.choose("intra", n),
            set_inter_op_parallelism_threads=lambda n: self.choose("inter", n),
        )

    def choose(self, which, number):
        if self.started:
            raise RuntimeError("cannot be modified after initialization")
        self.threads[which] = number

    def list_physical_devices(self, kind):
        return self.gpus

    def get_visible_devices(self, kind):
        return self.visible

    def set_visible_devices(self, gpu, kind):
        if self.started:
            raise RuntimeError("cannot be modified after initialization")
        self.visible = [gpu]


def ranks(size, rank=0, host=None):
    """Return a communicator whose ranks all gather the value of this one."""
    host = host or socket.gethostname()
    gather = lambda value, what: [value] * size  # noqa: E731
    return SimpleNamespace(
        size=size, rank=rank, local_rank=rank, local_size=size, cross_rank=0, cross_size=1, all_gather_object=gather
    )


@pytest.fixture
def environment(monkeypatch):
    variables = ("HVDX_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "PBS_JOBID", "LSB_MCPU_HOSTS")
    for name in (*joining.TENSORFLOW_THREADS, *joining._GPU_VARIABLES, *variables):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("hvdx.comm.launcher._fair", 3)

    def use(config):
        monkeypatch.setattr(tf, "config", config)
        return config

    return use


def test_a_worker_gets_one_gpu_and_its_share_of_threads(environment, capsys):
    config = environment(Config(4))
    place(ranks(4, rank=2))
    assert (config.visible, config.grows, config.threads) == (["GPU:2"], ["GPU:2"], {"intra": 3, "inter": 3})
    assert capsys.readouterr().err == "", "only rank 0 prints"
    environment(Config(4))
    place(ranks(4))
    assert capsys.readouterr().err == "hvdx: 4 workers on one host; 3 threads and one GPU a worker.\n"


@pytest.mark.parametrize(("share", "said"), [(0.5, "4 workers on 2 cores of "), (1.0, ""), (0.2, "on 1 core of ")])
def test_more_workers_than_cores_print_a_warning(environment, capsys, monkeypatch, share, said):
    environment(Config(0))
    monkeypatch.setattr("hvdx.comm.launcher._fair", share)
    place(ranks(4))
    text = capsys.readouterr().err
    assert said in text
    assert text.count("Start at most one a core (hvdx run -n") == bool(said)


def test_workers_that_share_a_gpu_print_a_warning(environment, capsys):
    config = environment(Config(1))
    place(ranks(2))
    assert config.visible == config.grows == ["GPU:0"]
    assert "hvdx: warning: 2 workers on this host share 1 GPU. Start one worker per GPU." in capsys.readouterr().err


def test_choices_of_the_script_are_kept(environment, monkeypatch, capsys):
    config = environment(Config(4))
    config.visible, config.threads = ["GPU:3"], {"intra": 7, "inter": 2}
    place(ranks(2))
    assert (config.visible, config.grows, config.threads) == (["GPU:3"], [], {"intra": 7, "inter": 2})
    assert "7 threads (set by the script) and the GPU that the script chose a worker." in capsys.readouterr().err


def test_threads_of_the_environment_are_kept(environment, monkeypatch, capsys):
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "5")
    config = environment(Config(0))
    place(ranks(2))
    assert config.threads == {"intra": 0, "inter": 0}
    assert "5 threads (TF_NUM_INTRAOP_THREADS) and no GPU a worker." in capsys.readouterr().err


def test_threads_of_the_job_are_used_and_printed(environment, monkeypatch, capsys):
    monkeypatch.setenv("HVDX_CPUS_PER_TASK", "2")
    config = environment(Config(0))
    place(ranks(2))
    assert config.threads == {"intra": 2, "inter": 2}
    assert "2 threads (HVDX_CPUS_PER_TASK) and no GPU a worker." in capsys.readouterr().err


def test_workers_that_all_see_all_gpus_use_one_each(environment, monkeypatch):
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    config = environment(Config(4))
    place(ranks(4, rank=2))
    assert config.visible == ["GPU:2"]


def test_started_tensorflow_is_left_unchanged(environment, capsys):
    config = environment(Config(2, started=True))
    place(ranks(2))
    assert (config.visible, config.grows) == (config.gpus, [])
    assert capsys.readouterr().err.count("it started before hvdx") == 1


def test_single_process_is_left_unchanged(environment, capsys):
    config = environment(Config(2))
    place(ranks(1))
    assert (config.visible, config.threads, capsys.readouterr().err) == (config.gpus, {"intra": 0, "inter": 0}, "")


def test_init_after_tensorflow_has_started_still_works():
    code = """
import tensorflow as tf
tf.constant(1.0) + 1
import hvdx
hvdx.init()
print("threads", tf.config.threading.get_intra_op_parallelism_threads())
"""
    unset = {"TF_NUM_INTRAOP_THREADS": "", "TF_NUM_INTEROP_THREADS": "", "OMP_NUM_THREADS": ""}
    done = run(2, ["-c", code], 120, unset)
    assert done.code == 0, done
    assert done.out.count("hvdx: 2 workers on one host, started by Open MPI; ") == 1, done
    assert "it started before hvdx" in done.out, done
    early = run(2, ["-c", code.replace("tf.constant(1.0) + 1", "")], 120, unset | {"SLURM_CPUS_PER_TASK": "1"})
    assert early.code == 0, early
    assert early.out.count("threads 1\n") == 2, early
    assert "started before hvdx" not in early.out, early
