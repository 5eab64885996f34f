"""PyTorch: a training step runs operation by operation, and its tensors are NumPy's on a CPU without a copy."""

from collections.abc import Callable, Sequence

import keras
import numpy as np
import torch

from hvdx.keras.seams.replacing import Method


def on_host(
    work: Callable[[list[np.ndarray]], Sequence[np.ndarray]], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Call Python code with the arrays of some tensors within a training step.

    Args:
        work: function from arrays, which it may overwrite, to arrays of the same shapes and dtypes.
        tensors: tensors on any device; those on a CPU may be overwritten.

    Returns:
        The results, each on the device of its tensor.
    """
    with torch.no_grad():
        results = work([_array(t) for t in tensors])
        return [_tensor(np.asarray(r)).to(t.device) for r, t in zip(results, tensors, strict=True)]


def tell(work: Callable[[list[np.ndarray]], None], tensors: Sequence[torch.Tensor]) -> None:
    """Call Python code with the arrays of some tensors within a training step, without a result.

    Args:
        work: function of arrays, which it must not change.
        tensors: tensors on any device.
    """
    with torch.no_grad():
        work([_array(t) for t in tensors])


def _array(tensor: torch.Tensor) -> np.ndarray:
    here = tensor.detach().cpu().contiguous()
    # PyTorch gives NumPy no bfloat16.
    return here.view(torch.uint16).numpy().view("bfloat16") if here.dtype == torch.bfloat16 else here.numpy()


def _tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def around(function: Method, note: Callable[[object], None]) -> Method:
    """Return a training function that calls `note` with each batch before its step.

    Args:
        function: training function that Keras made.
        note: function of a batch.
    """

    def step(data: Sequence[object]) -> object:
        note(data[0])
        return function(data)

    return step


def sync(model: keras.Model) -> None:
    """Make the model's variables hold their values in the middle of an epoch; here they always do."""


def prepare(threads: int) -> None:
    """Give PyTorch this rank's share of the cores."""
    torch.set_num_threads(threads)
