"""Some steps of the user's script on one worker, and what its record says about the training."""

import math
import os
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdx.cli.common.processes import child_environment, exit_reason, key_line, kill_group, last_of
from hvdx.costs.types import Layer
from hvdx.errors import ConfigError, LaunchError
from hvdx.report import records

#: Steps that each copy of the script takes.
STEPS = 24
# First steps, which trace, compile and fill caches.
_SKIPPED = 4
# Fewest steps after these for a median.
_FEWEST = 4
# Variables by which a launcher tells a process that it is one of several ranks.
_LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "PALS_", "HOROVOD_", "MV2_COMM_", "JSM_NAMESPACE_", "SLURM_STEP_")


@dataclass(frozen=True)
class Training:
    """Training of the script on one worker, from its record.

    Attributes:
        computing: seconds of a step: the median.
        spread: standard deviation of these seconds between steps, without outliers.
        steps: number of steps that were measured.
        tensors: number of elements of each trained variable.
        batch: samples in a step; 0 if unknown.
        slots: values that the optimiser keeps for each weight.
        layers: dense layers.
        tables: embeddings.
        name: name of the model and of its optimiser.
        memory: peak resident bytes of a worker; 0 if unknown.
        batches: number of batches in an epoch; 0 if unknown.
        backend: backend of Keras with its version; "" if unknown.
    """

    computing: float
    spread: float
    steps: int
    tensors: tuple[int, ...]
    batch: int = 0
    slots: float = 0.0
    layers: tuple[Layer, ...] = ()
    tables: tuple[Layer, ...] = ()
    name: str = ""
    memory: float = 0.0
    batches: int = 0
    backend: str = ""

    @property
    def elements(self) -> int:
        """Number of trained elements."""
        return sum(self.tensors)


def run_copies(command: Sequence[str], folder: Path, copies: int, timeout: float) -> list[Training]:
    """Run copies of a script at once, each alone for some steps, and read their records.

    Args:
        timeout: seconds for all of them.

    Raises:
        LaunchError: if the script cannot be started, fails, or does not reach its steps in time.
        ConfigError: if it wrote no record.
    """
    processes: list[subprocess.Popen[bytes]] = []
    logs = [folder / f"log-{i}.txt" for i in range(copies)]
    end = time.monotonic() + timeout
    try:
        for i, log in enumerate(logs):
            processes.append(_start(command, folder / f"copy-{i}", log, copies))
        for process, log in zip(processes, logs, strict=True):
            try:
                code = process.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                raise LaunchError(
                    f"advise: expected {STEPS} steps of the script within {timeout:.0f} s, and it still runs. Raise "
                    f"--timeout, or let the script load its data faster. Its last line: {_last(log)}"
                ) from None
            if code:
                raise LaunchError(f"advise: the script failed, {exit_reason(code)}: {_last(log)}")
    except OSError as error:
        raise LaunchError(f"advise: {command[0]}: {error.strerror}. Check the spelling of the command.") from None
    finally:
        for process in processes:
            # Also children that a script left behind.
            kill_group(process)
            process.wait()
    return [read_training(folder / f"copy-{i}") for i in range(copies)]


def _start(command: Sequence[str], record: Path, log: Path, copies: int) -> "subprocess.Popen[bytes]":
    with log.open("wb") as file:
        return subprocess.Popen(
            command, env=environment(record, copies), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip


def environment(record: Path, copies: int, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a copy: one worker, with its share of the cores, that records and ends after `STEPS`.

    Args:
        environ: the environment; by default that of this process.
    """
    variables = child_environment() if environ is None else dict(environ)
    kept = {k: v for k, v in variables.items() if not k.startswith(_LAUNCHERS) and k != "HVDX_STRATEGY"}
    if copies > 1:
        threads = str(max(1, len(os.sched_getaffinity(0)) // copies))
        for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
            kept.setdefault(name, threads)
    return kept | {"HVDX_RECORD": str(record), "HVDX_LIMIT": f"steps:{STEPS}"}


def _last(log: Path) -> str:
    return key_line(last_of(log)) or "no output"


def read_training(folder: Path) -> Training:
    """Read the record of one worker.

    Raises:
        ConfigError: if there is none, or it has too few steps.
    """
    try:
        run = records.read(folder)[-1]
    except ConfigError:
        raise ConfigError(
            "advise: the script wrote no record: expected a model.fit with the callback hvdx.keras.Distribute(), got "
            "none. Add the callback: model.fit(..., callbacks=[hvdx.keras.Distribute()])"
        ) from None
    if run.size > 1:
        raise ConfigError(
            f"advise: expected a script that runs as one worker, got a record of {run.size}. Leave out mpirun and "
            "hvdx run: hvdx advise -- python train.py"
        )
    seconds = _computing(run)
    if len(seconds) < _FEWEST:
        raise ConfigError(
            f"advise: expected {_SKIPPED + _FEWEST} steps of the script or more, got {len(seconds) + _SKIPPED}. Give "
            "the script more data, more epochs, or a lower steps_per_execution."
        )
    backend = str(run.header.get("backend") or "")
    version = str((run.header.get("versions") or {}).get(backend) or "")
    model, optimizer = run.header.get("model") or {}, run.header.get("optimizer") or {}
    # Half the distance between two quantiles is the standard deviation of a normal distribution.
    quantiles = statistics.quantiles(seconds, n=1000, method="inclusive")
    low, high = quantiles[158], quantiles[840]
    return Training(
        computing=statistics.median(seconds),
        spread=(high - low) / 2,
        steps=len(seconds),
        tensors=tuple(math.prod(shape) for shape in model.get("tensors", [])),
        batch=int(run.header.get("batch") or 0),
        slots=float(optimizer.get("slots") or 0.0),
        layers=tuple(_layers(model.get("layers", []), "Dense")),
        tables=tuple(_layers(model.get("layers", []), "Embedding")),
        name=" with ".join(filter(None, (str(model.get("name") or ""), str(optimizer.get("name") or "")))),
        memory=float((run.first.end or {}).get("memory") or 0.0),
        batches=int(run.header.get("steps") or 0),
        backend=f"{backend} {version}".strip(),
    )


def _computing(run: records.Run) -> list[float]:
    """Return the seconds of each measured step without its exchange, which is short on one worker."""
    columns = {name: column.tolist() for name, column in run.first.steps.items()}
    seconds, before = [], 0.0
    for row, step in enumerate(columns.get("step", [])):
        exchange = sum(columns[name][row] for name in records.PARTS if name != "computing")
        # With steps_per_execution, a call has several steps; at least the first call is skipped.
        if row and step > _SKIPPED:
            seconds.append((columns["seconds"][row] - exchange) / max(step - before, 1.0))
        before = step
    return seconds


def _layers(layers: Sequence[Mapping[str, Any]], kind: str) -> list[Layer]:
    """Return the layers of a class whose sizes are known."""
    return [
        Layer(str(layer["name"]), int(layer["inputs"]), int(layer["outputs"]), int(layer["parameters"]))
        for layer in layers
        if layer.get("class") == kind and layer.get("inputs") and layer.get("outputs")
    ]
