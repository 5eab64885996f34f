"""PyTorch: a training step runs operation by operation, and its tensors are NumPy's on a CPU without a copy."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import cast

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


def watch_gradients(
    variables: Sequence[keras.Variable],
    gradients: Sequence[torch.Tensor],
    note: Callable[[int, torch.Tensor, np.ndarray], None],
) -> Callable[[], None] | None:
    """Call Python code with each variable's gradient when a backward pass has computed it, before it computes others.

    Args:
        variables: variables that are trained.
        gradients: what the optimiser was given for them in the last step.
        note: function of a variable's number, its gradient, and that as an array, which it may overwrite.

    Returns:
        Function that ends it. None if the optimiser was given others than the pass has computed, or on a GPU, where
        `note` would wait for the operations that have been queued.
    """
    parameters = [v.value for v in variables]
    if any(p.grad is not g or p.is_cuda for p, g in zip(parameters, gradients, strict=True)):
        return None

    def noted(number: int, parameter: torch.Tensor) -> None:
        gradient = cast(torch.Tensor, parameter.grad)
        with torch.no_grad():
            note(number, gradient, _array(gradient))

    hooks = [p.register_post_accumulate_grad_hook(functools.partial(noted, i)) for i, p in enumerate(parameters)]

    def end() -> None:
        for hook in hooks:
            hook.remove()

    return end


def around(function: Method, note: Callable[[object], None], model: keras.Model) -> Method:
    """Return a training function that calls `note` with each batch before its step.

    Args:
        function: training function that Keras made.
        note: function of a batch, or of None where this rank has none: the optimiser then takes a step with zeros.
        model: the model.
    """
    logs: object = None

    def step(data: Sequence[object]) -> object:
        nonlocal logs
        note(data[0])
        if data[0] is None:
            with torch.no_grad():
                variables = model.trainable_variables
                model.optimizer.apply([torch.zeros_like(v.value) for v in variables], variables)
        else:
            logs = function(data)
        return logs

    return step


def sync(model: keras.Model) -> None:
    """Wait until the model's variables, which always hold their values, have those of the last step on a GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


def prepare(threads: int) -> None:
    """Give PyTorch this rank's share of the cores."""
    torch.set_num_threads(threads)


def memory() -> tuple[int, int] | None:
    """Return the most bytes that this process has held on its GPU, and those that it may hold; None on a CPU."""
    peak = torch.cuda.max_memory_reserved() if torch.cuda.is_initialized() else 0
    return (peak, torch.cuda.memory_reserved() + torch.cuda.mem_get_info()[0]) if peak else None


def device_of(tensor: torch.Tensor) -> str:
    """Return the value of `TensorSpec.device` for a tensor."""
    return f"GPU:{tensor.device.index}" if tensor.device.type == "cuda" else "CPU"


def copies(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield copies in float32, each on the device of its tensor."""
    return (t.detach().to(torch.float32, copy=True) for t in tensors)


def flat_update(tensors: Sequence[torch.Tensor], begun: Sequence[torch.Tensor], weight: float) -> torch.Tensor:
    """Return (tensors - begun) * weight on their GPU, float32[elements of all], which is filled.

    Args:
        tensors: values of variables.
        begun: float32 tensors of the same shapes.
        weight: factor.
    """
    flat = torch.empty(sum(b.numel() for b in begun), dtype=torch.float32, device=begun[0].device)
    with torch.no_grad():
        for part, tensor, base in zip(_parts(flat, begun), tensors, begun, strict=True):
            torch.sub(tensor, base, out=part)
        return _filled(flat if weight == 1.0 else flat.mul_(weight))


def zeros(n: int, like: torch.Tensor) -> torch.Tensor:
    """Return float32[n] of zeros on a tensor's GPU, filled, in memory that belongs to nobody else."""
    return _filled(torch.zeros(n, dtype=torch.float32, device=like.device))


def add(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """Add a vector of all elements to float32 tensors, whose memory the sums take; return them."""
    return [t.add_(part) for t, part in zip(tensors, _parts(flat, tensors), strict=True)]


def sums(tensors: Sequence[torch.Tensor], flat: torch.Tensor, factor: float) -> list[torch.Tensor]:
    """Return the sums of float32 tensors and a vector of all elements times a factor; the vector is overwritten."""
    return [t + part for t, part in zip(tensors, _parts(flat.mul_(factor), tensors), strict=True)]


def _parts(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts of a vector as views of the shapes of tensors."""
    return [p.view(t.shape) for p, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)]


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    """Wait until a tensor is filled: kernels of others may run on another stream of its GPU."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return tensor


def has_gpu() -> bool:
    """Return whether PyTorch has GPUs."""
    return torch.cuda.is_available()
