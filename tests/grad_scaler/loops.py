"""Training loops with gradients made to order, for a scaler and for torch's next to each other."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "sgd-fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "adagrad-fused": lambda params: torch.optim.Adagrad(params, lr=0.1, fused=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
}


def make_params(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Parameters that are the same on every call."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes
    ]


def set_scaled_grads(scaler: Any, params: list[Tensor], bad: float | None, seed: int = 0) -> None:
    """Give parameters the gradients that a scaled loss would; `bad` goes into the first."""
    generator = torch.Generator().manual_seed(seed)
    scale = scaler.scale(torch.ones(()))
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * scale).to(param.dtype)
    if bad is not None:
        assert params[0].grad is not None
        params[0].grad.view(-1)[0] = bad


@contextlib.contextmanager
def nan_in_uninitialized_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def snapshot(scaler: Any, params: list[Tensor], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns every number that a step or an update may change."""
    tensors = [param.detach().clone() for param in params]
    tensors += [param.grad.clone() for param in params if param.grad is not None]
    for param in params:
        state = optimizer.state.get(param, {})
        tensors += [state[key].clone() for key in sorted(state) if isinstance(state[key], Tensor)]
    fields = scaler.state_dict()
    return [*tensors, torch.tensor([fields[key] for key in sorted(fields)], dtype=torch.float64)]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Bit for bit, NaN like NaN."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
