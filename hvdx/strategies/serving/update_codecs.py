"""Codecs of updates under `ParameterServer`: workers encode updates, and servers decode and add them."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from hvdx.errors import ConfigError, WireError
from hvdx.strategies.serving.messages import SessionConfig
from hvdx.strategies.serving.shard import Addend

if TYPE_CHECKING:
    from hvdx.codec import Codec, State

# Density of "threshold" without a number.
_DENSITY = 0.01


def make_codec(spelling: str, threads: int | None = None) -> "Codec[State] | None":
    """Return the codec of a spelling; None for "none", whose updates are sent uncompressed.

    Args:
        spelling: "none", "fp16", "bf16", "threshold", or "threshold:0.003" with a density.
        threads: threads of the codec's kernels.

    Raises:
        ConfigError: if the spelling is unknown.

    Example:
        >>> make_codec("threshold:0.003")
        Threshold(target_density=0.003)
    """
    if spelling == "none":
        return None
    # Imported here because it imports Numba, which is not needed without a codec.
    from hvdx import codec

    name, _, density = str(spelling).partition(":")
    try:
        if name == "threshold":
            return codec.make(name, target_density=float(density or _DENSITY), threads=threads)
        if not density and name in codec.names():
            return codec.make(name)
    except ValueError as error:
        raise ConfigError(f"ParameterServer: codec: {error}") from None
    raise ConfigError(
        f"ParameterServer: codec: expected 'none', 'fp16', 'bf16', 'threshold' or 'threshold:0.01' with the share of "
        f"elements to send, got {spelling!r}."
    )


def density_of(spelling: str) -> float:
    """Return the share of elements that a codec sends; 1 for a codec that sends all.

    Example:
        >>> density_of("threshold:0.003"), density_of("threshold"), density_of("fp16")
        (0.003, 0.01, 1.0)
    """
    name, _, density = spelling.partition(":")
    return float(density or _DENSITY) if name == "threshold" else 1.0


def decoder(config: SessionConfig, threads: int | None = None) -> Callable[[np.ndarray, int], Addend | None]:
    """Return the function that decodes the updates of a session.

    Returns:
        A function of a body (uint8[bytes]) and its worker. It returns an `Addend`, or None if the update holds NaN or
        infinity. It raises `WireError` if the bytes are not an update of this shard.
    """
    codec = make_codec(config.codec, threads)
    if codec is None:
        return lambda body, worker: _plain(config, body, worker)
    return lambda body, worker: _coded(config, codec, body, worker)


def _plain(config: SessionConfig, body: np.ndarray, worker: int) -> Addend | None:
    dtype = np.dtype(config.dtype)
    if body.size != config.elements * dtype.itemsize:
        raise WireError(
            f"expected {config.elements * dtype.itemsize} bytes, got {body.size}. Train the same model on every rank.",
            worker,
            "update",
        )
    update = body.view(dtype)
    if not is_finite(update):
        return None

    def add(out: np.ndarray, factor: float) -> None:
        if factor != 1.0:
            np.multiply(update, dtype.type(factor), out=update)
        np.add(out, update, out=out)

    return add


def _coded(config: SessionConfig, codec: "Codec[State]", body: np.ndarray, worker: int) -> Addend:
    # The body is decoded here and not in `add`, so that the sender of a damaged update gets the error.
    dense = np.zeros(config.elements, np.float32)
    try:
        codec.decode([body], [dense])
    except WireError as error:
        raise error.of(worker, "update") from None

    def add(out: np.ndarray, factor: float) -> None:
        np.add(out, np.multiply(dense, np.float32(factor), out=dense), out=out)

    return add


def joined_residual(arrays: Mapping[str, np.ndarray]) -> tuple[int, np.ndarray]:
    """Return the residual of an exchange, with its shards concatenated.

    Args:
        arrays: result of `ServerExchange.state_dict`.

    Returns:
        The number of shards that have a residual, and the concatenated residuals.

    Example:
        >>> joined_residual({"0.residual": np.ones(1), "1.residual": np.zeros(2), "1.tau": np.ones(())})
        (2, array([1., 0., 0.]))
    """
    shards = sum(name.endswith(".residual") for name in arrays)
    found = [arrays[f"{shard}.residual"] for shard in range(shards)]
    return shards, np.concatenate(found) if found else np.zeros(0)


def is_finite(values: np.ndarray) -> bool:
    """Return whether an array holds neither NaN nor infinity.

    It reads the array once: if an element is not finite, neither is the sum.

    Args:
        values: float32 or float64, whose sum is far below the largest value of the dtype.

    Example:
        >>> is_finite(np.array([1.0, np.inf, -np.inf]))
        False
    """
    with np.errstate(all="ignore"):
        return bool(np.isfinite(values.sum()))
