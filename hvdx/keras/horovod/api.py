"""Who this process is, and the arguments of `horovod.tensorflow.keras`; what travels is in `collectives`."""

from typing import Any

from hvdx import comm as world
from hvdx.errors import ConfigError
from hvdx.keras.horovod.process_sets import add_process_set, allow
from hvdx.keras.joining import join
from hvdx.strategies import Strategy, leave
from hvdx.strategies.registry import set_default

#: Reductions. Horovod's own constants are understood as well.
Average = "average"
Sum = "sum"
Adasum = "adasum"
Min = "min"
Max = "max"
Product = "product"


class Compression:
    """What a gradient becomes on the network. Horovod's own classes are understood as well."""

    none = "none"
    fp16 = "fp16"
    bf16 = "bf16"


def init(comm: Any = None, process_sets: Any = None, strategy: Strategy | str | None = None) -> None:
    """Join the world, and share the cores and GPUs of a host among its ranks: see `hvdx.keras.placement`.

    Call it before TensorFlow does anything, so that the number of threads and the GPU can still be chosen: as many
    threads as the batch system gives a task, or a share of the cores, unless `TF_NUM_INTRAOP_THREADS`,
    `OMP_NUM_THREADS` or `tf.config.threading` says otherwise; and one GPU, unless `tf.config.set_visible_devices` has
    chosen some.

    Args:
        comm: not supported; the world is all processes that were started.
        process_sets: a list of `ProcessSet`, which are added, or "dynamic" for `add_process_set` to work at any time;
            by default it works before anything else that travels inside a graph.
        strategy: what callbacks and optimisers use that are told nothing else; by default what `HVDX_STRATEGY` says.
            Under a `ParameterServer` whose servers are ranks of their own, those serve here, and never return.

    Raises:
        ConfigError: an argument that is not supported.
        LaunchError, HorovodError: see `hvdx.comm.start`.
    """
    unsupported("init", comm=comm)
    if process_sets is not None:
        allow()
    if strategy is not None:
        set_default(strategy)
    join(strategy)
    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise ConfigError(
            f"init: process_sets: expected a list or 'dynamic', got {process_sets!r}. Do: give one of them."
        )
    for process_set in () if isinstance(process_sets, str) else process_sets or ():
        add_process_set(process_set)


def shutdown() -> None:
    """Leave the world."""
    leave()


def is_initialized() -> bool:
    """True after `init`, or after anything else that asked about ranks."""
    return world.current() is not None


def rank() -> int:
    """This process among all, from 0."""
    return join().rank


def size() -> int:
    """Number of processes."""
    return join().size


def local_rank() -> int:
    """This process among those on its host, from 0."""
    return join().local_rank


def local_size() -> int:
    """Number of processes on this host."""
    return join().local_size


def cross_rank() -> int:
    """This host among the hosts that have a process of this local rank."""
    return join().cross_rank


def cross_size() -> int:
    """Number of hosts that have a process of this local rank."""
    return join().cross_size


def operation(op: Any) -> str:
    """ "average" or "sum", of whatever spelling Horovod or hvdx has for it; None means average."""
    if op is None or op == Average:
        return Average
    if op == Sum:
        return Sum
    # Horovod's constants are small integers that only its library knows.
    named = _horovod_constants()
    known = {named.get("Average"): Average, named.get("Sum"): Sum}
    if not isinstance(op, str) and op in known:
        return known[op]
    raise ConfigError(f"op: expected Average or Sum, got {op!r}. Other reductions are not supported.")


def wire(compression: Any) -> Any:
    """ "none", "fp16" or "bf16", of whatever spelling Horovod or hvdx has for it."""
    if isinstance(compression, str) and compression in ("none", "fp16", "bf16"):
        return compression
    known = {"NoneCompressor": "none", "FP16Compressor": "fp16"}
    if getattr(compression, "__module__", "").startswith("horovod.") and compression.__name__ in known:
        return known[compression.__name__]
    raise ConfigError(
        f"compression: expected Compression.none, .fp16 or .bf16, got {compression!r}. Compressors of your own are "
        "not supported."
    )


def _horovod_constants() -> dict[str, Any]:
    import sys

    module = sys.modules.get("horovod.tensorflow")
    return {} if module is None else {k: getattr(module, k) for k in ("Average", "Sum")}


def unsupported(function: str, **arguments: Any) -> None:
    """Raise for arguments that are neither None nor False."""
    given = [k for k, v in arguments.items() if v is not None and v is not False]
    if given:
        raise ConfigError(f"{function}: {', '.join(given)}: not supported by hvdx. Leave it out.")
