"""Names of Horovod that hvdx does not have, each with a remedy."""

from hvdx.errors import ConfigError

_INTERNAL = "It is a part of Horovod that scripts do not need. Do: leave it out, or import it from horovod.tensorflow."

#: Remedies by name.
REMEDIES = {
    "run": "Do: call the function in the script, and start the script with `hvdx run -n N python SCRIPT`.",
    "elastic": (
        "The number of ranks is fixed while a job runs. Do: save with hvdx.keras.Checkpoint and start with `hvdx job`. "
        "It puts a job that lost a rank back into the queue, and the job resumes with the number of ranks that it gets."
    ),
    "start_timeline": "Do: set HOROVOD_TIMELINE=FILE in the environment of the job.",
    "stop_timeline": "Do: set HOROVOD_TIMELINE=FILE in the environment of the job; the file ends with it.",
    "LocalGradientAggregationHelper": "Do: give DistributedOptimizer backward_passes_per_step.",
    "keras": "Do: import hvdx.keras as hvd; it has the names directly.",
    "compression": "Do: take Compression.none, .fp16 or .bf16 from hvdx.keras.",
    "functions": "Do: take broadcast_object, allgather_object and broadcast_variables from hvdx.keras.",
    "mpi_ops": "Do: take the functions from hvdx.keras.",
    "sync_batch_norm": "Do: take SyncBatchNormalization from hvdx.keras.",
    **dict.fromkeys(
        (
            "check_extension",
            "check_num_rank_power_of_2",
            "gpu_available",
            "gradient_aggregation",
            "gradient_aggregation_eager",
            "handle_average_backwards_compatibility",
            "is_version_greater_equal_than",
            "refs_to_vars",
            "split_list",
            "util",
            "vars_to_refs",
        ),
        _INTERNAL,
    ),
    "join": (
        "It shuts Horovod down under grouped collectives, which hvdx uses for gradients. Do: give every rank the same "
        "number of steps with hvdx.shard(data, batch_size), or train with the callback Distribute, which ends an epoch "
        "of uneven data on all ranks together."
    ),
}


def error_for(name: str) -> Exception:
    """Return the error for a name that `hvdx.keras` does not have, with a remedy if Horovod has it.

    Args:
        name: name of the missing attribute.

    Example:
        >>> type(error_for("elastic")).__name__, type(error_for("nonsense")).__name__
        ('ConfigError', 'AttributeError')
    """
    if name in REMEDIES:
        return ConfigError(f"hvdx.keras.{name}: expected a name of hvdx.keras, got one of Horovod's. {REMEDIES[name]}")
    return AttributeError(f"module 'hvdx.keras' has no attribute {name!r}")
