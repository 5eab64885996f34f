"""Milliseconds of a training step that averages dense gradients, through each engine, beside the limit of the link.

    python jobs/benchmarks/dense.py                                  two and four hosts at 100mbit, five minutes
    python jobs/benchmarks/dense.py --hosts 1 --per-host 2,4         one host, without a network
    python jobs/benchmarks/dense.py --hosts 1 --per-host 2 --hidden 1024,14976 --ways copy,sum
    python jobs/benchmarks/dense.py --hosts 2,4 --bandwidth 100mbit,1gbit --wires none,bf16 --json dense.json

Workers on the hosts of `hvdx lab` train a dense network of 1.86 million parameters (--hidden 1024; 4096 makes 20
million), 64 images a step on each, SGD with momentum; each figure is a median over the steps of rank 0, in processes of
its own:

    limit    2 (N-1)/N of the gradients' bytes at the rate of a link, N hosts; headers of packets come on top
    MPI      MPI's own Allreduce of a float32 vector of this size, without training
    copy, sum        a copy of the gradients by each worker at the same time, and the sum of them that hvdx makes,
             without training
    alone    the training without communication
    mpi, horovod     the training under `AllReduce` with this engine
    DDP      a training of the same network in PyTorch, by DistributedDataParallel over gloo, in float32
    DDP alone        the same without communication

Engines and frameworks that are not installed have empty cells.
"""

import argparse
import functools
import importlib.util
import os
import socket
import sys
import time
from statistics import median
from typing import Any

from hvdx.jobs.benchmarks import harness

_WAYS = ("copy", "sum", "MPI", "alone", "mpi", "horovod", "DDP alone", "DDP")
# Packages without which a way has no figure.
_NEEDS = {"horovod": "horovod", "DDP": "torch", "DDP alone": "torch"}
_BATCH, _INPUTS, _CLASSES = 64, harness.INPUTS, harness.CLASSES
# Uncounted first steps: they trace, compile and open connections.
_SETTLING = 5


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, or one of its workers."""
    parser = harness.parser(__doc__)
    add, numbers, words = parser.add_argument, harness.several(int), harness.several(str)
    add("--hosts", type=numbers, default="2,4", metavar="N,N,...", help="numbers of emulated hosts; 1: no emulation")
    add("--per-host", type=numbers, default="1", metavar="N,N,...", help="numbers of workers on a host")
    add("--bandwidth", type=words, default="100mbit", metavar="RATE,...", help="bandwidths of the links")
    add("--wires", type=words, default="none", metavar="WIRE,...", help="compressions: none, fp16, bf16")
    add("--ways", type=words, default=",".join(_WAYS), metavar="WAY,...", help="columns to measure")
    add("--steps", type=int, default=20, metavar="N", help="number of timed steps")
    add("--hidden", type=numbers, default="1024", metavar="N,N,...", help="units in each of two hidden layers")
    return harness.run(parser, compare, work, argv)


def compare(options: argparse.Namespace) -> int:
    """Measure each case, and print the table."""
    cases = [
        {"hidden": hidden, "hosts": hosts, "per_host": per_host, "bandwidth": bandwidth, "wire": wire}
        for hidden in options.hidden
        for hosts in options.hosts
        for per_host in options.per_host
        for bandwidth in (options.bandwidth if hosts > 1 else ["none"])
        for wire in options.wires
        if hosts * per_host > 1
    ]
    columns = [
        ("hosts x workers", lambda row: f"{row['hosts']} x {row['per_host']}"),
        ("MB", lambda row: f"{4e-6 * harness.parameters(row['hidden']):.3g}"),
        harness.figure("limit", "limit", ".0f"),
        ("link", lambda row: row["bandwidth"]),
        ("wire", lambda row: {"none": "float32"}.get(row["wire"], row["wire"])),
        *(harness.figure(way, way, ".1f") for way in _WAYS),
        ("mpi / (limit + alone)", ratio),
    ]
    measure = functools.partial(measured, options=options)
    harness.run_cases(options.json, cases, measure, columns, resumes=True)
    return 0


def measured(case: harness.Row, options: argparse.Namespace) -> harness.Row:
    """Return the limit and the milliseconds of each way in one case; None for those that are not measured."""
    hosts, bandwidth = case["hosts"], case["bandwidth"]
    payload = harness.parameters(case["hidden"]) * (4 if case["wire"] == "none" else 2)
    limit = 2 * (hosts - 1) / hosts * 8e3 * payload / harness.bits(bandwidth)
    row: harness.Row = {"limit": limit if hosts > 1 else None} | dict.fromkeys(_WAYS)
    for way in options.ways:
        if way in _NEEDS and importlib.util.find_spec(_NEEDS[way]) is None:
            continue
        setting = {"way": way, "wire": case["wire"], "steps": options.steps, "hidden": case["hidden"], "seed": 0}
        if hosts == 1:
            # Without emulation, all ranks are on this machine.
            ended = harness.launch(__file__, setting, case["per_host"])
        else:
            ended = harness.launch(__file__, setting, hosts, bandwidth, per_host=case["per_host"])
        row[way] = ended.ranks[0]["milliseconds"]
    return row


def ratio(row: harness.Row) -> str:
    """Return the step over MPI, divided by the limit and the computing."""
    if None in (row["mpi"], row["alone"], row["limit"]):
        return ""
    return f"{row['mpi'] / (row['limit'] + row['alone']):.3f}"


# -- one rank ---------------------------------------------------------------------------------------------------------


def work(setting: argparse.Namespace) -> harness.Row:
    """Return the median milliseconds of one way on this rank."""
    if setting.way == "MPI":
        from hvdx.comm import mpi

        return {"milliseconds": 1e3 * mpi.all_reduce_seconds(harness.parameters(setting.hidden), times=5)}
    if setting.way in ("copy", "sum"):
        return {"milliseconds": 1e3 * median(without_training(setting)[_SETTLING:])}
    seconds = in_pytorch(setting) if setting.way.startswith("DDP") else in_keras(setting)
    return {"milliseconds": 1e3 * median(seconds[_SETTLING:])}


def without_training(setting: argparse.Namespace) -> list[float]:
    """Return the seconds of each copy of the gradients, or of each sum of them."""
    import numpy as np

    from hvdx.comm import world
    from hvdx.comm.sums import DenseSums

    hidden, comm = setting.hidden, world.start()
    sums, seconds = DenseSums(comm), []
    # Not zeros, which have no memory before they are written.
    vectors = [np.ones(size, np.float32) for size in (_INPUTS * hidden, hidden**2, _CLASSES * hidden)]
    copies = [np.ones_like(vector) for vector in vectors] if setting.way == "copy" else []
    for _ in range(setting.steps + _SETTLING):
        comm.any_true(False)
        begin = time.perf_counter()
        if copies:
            for copy, vector in zip(copies, vectors, strict=True):
                copy[:] = vector
        else:
            sums.add_up(vectors, 1 / comm.size, np.ndarray.astype)
        seconds.append(time.perf_counter() - begin)
    sums.close()
    return seconds


def in_keras(setting: argparse.Namespace) -> list[float]:
    """Return the seconds of each step of the training under hvdx."""
    import hvdx
    from hvdx.comm import world

    def meet(batch: int, logs: object) -> None:
        # Without an exchange, ranks that share cores would not all be timed while the others compute.
        if batch == _SETTLING - 1:
            world.start().any_true(False)

    hvdx.init()
    model, data, _, _ = harness.mlp(setting)
    watch = harness.StepWatch(_SETTLING, dict)
    callbacks: list[Any] = [harness.callback(argparse.Namespace(on_train_batch_end=meet)), harness.callback(watch)]
    if setting.way != "alone":
        strategy = f"all_reduce:engine={setting.way},compression={setting.wire}"
        callbacks.insert(0, hvdx.keras.Distribute(strategy))
    steps = setting.steps + _SETTLING
    model.fit(data.repeat(), steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=callbacks)
    return watch.seconds


def in_pytorch(setting: argparse.Namespace) -> list[float]:
    """Return the seconds of each step of the training in PyTorch."""
    import torch
    from mpi4py import MPI

    world, hidden = MPI.COMM_WORLD, setting.hidden
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    torch.manual_seed(0)
    layers = [torch.nn.Linear(_INPUTS, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, hidden), torch.nn.ReLU()]
    model: Any = torch.nn.Sequential(*layers, torch.nn.Linear(hidden, _CLASSES))
    if setting.way == "DDP":
        address = socket.gethostbyname(socket.gethostname())
        if world.Get_size() > 1 and os.path.exists("/sys/class/net/eth0"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
        with socket.create_server((address, 0)) as free:
            port = free.getsockname()[1]
        address, port = world.bcast((address, port))
        where = f"tcp://{address}:{port}"
        torch.distributed.init_process_group("gloo", where, rank=world.Get_rank(), world_size=world.Get_size())
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer, seconds = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), []
    x, y = torch.rand(_BATCH, _INPUTS), torch.randint(_CLASSES, (_BATCH,))
    for step in range(setting.steps + _SETTLING):
        if step == _SETTLING:
            world.Barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    if setting.way == "DDP":
        torch.distributed.destroy_process_group()
    return seconds


if __name__ == "__main__":
    sys.exit(main())
