"""Small models with kept weights, and what eager autocast makes of their twins."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Program = Callable[..., torch.Tensor]


SIZE = 4


class Net(nn.Module):
    """Two square layers: a transposed weight still fits."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(SIZE, SIZE)
        self.b = nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))  # type: ignore[no-any-return]


class Weight(nn.Module):
    """One weight alone."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=weight.requires_grad)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers that are the same in every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def square(seed: int = 0) -> torch.Tensor:
    """Returns a weight of ``Weight``."""
    return random(SIZE, SIZE, seed=seed).requires_grad_()


def make_net(seed: int = 0) -> Net:
    """Returns a ``Net`` with weights that are the same in every run."""
    net = Net()
    for i, parameter in enumerate(net.parameters()):
        parameter.data.copy_(random(*parameter.shape, seed=100 * seed + i))
    return net


def inputs(*, requires_grad: bool = False) -> torch.Tensor:
    """Returns a batch."""
    return random(3, SIZE, seed=99).requires_grad_(requires_grad)


def compile_amp_fx(program: Any, *, compiler: str = "aot_eager", **options: Any) -> Program:
    """Compiles a model or function that caches values of weights, in training as well."""
    chosen = {"compiler": compiler, "weight_cache": "training", **options}
    compiled: Program = torch.compile(program, backend="amp_fx", options=chosen, dynamic=False)
    return compiled


def autocast(program: Program, *args: Any, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The oracle: a fresh eager autocast region, and the output dtype of a compiled program."""
    with torch.autocast("cpu", dtype):
        return program(*args).to(torch.float32)


@dataclasses.dataclass(frozen=True)
class Graph:
    """One graph over a model, and how its calls compare with the oracle's."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    is_trained: bool = False

    def compile(self, model: nn.Module, **options: Any) -> Program:
        return compile_amp_fx(model, dtype=self.dtype, **options)

    def check(self, compiled: Program, model: nn.Module, twin: nn.Module) -> None:
        """Calls once, and compares output and gradients with eager autocast on the twin."""
        x = inputs().to(next(model.parameters()).dtype)
        with torch.set_grad_enabled(self.is_trained):
            out = compiled(x)
            with torch.autocast("cpu", self.dtype):
                expected = twin(x)
            assert_same(out, expected.to(out.dtype))
            if self.is_trained:
                assert_same_gradients(out, expected.to(out.dtype), model, twin)


@dataclasses.dataclass(frozen=True)
class FrozenGraph(Graph):
    """A graph whose weights inductor packs."""

    def compile(self, model: nn.Module, **options: Any) -> Program:
        return compile_amp_fx(model, dtype=self.dtype, compiler="inductor", **options)


TRAIN = Graph("train", is_trained=True)
EVAL = Graph("eval")
HALF = Graph("float16", torch.float16)
FROZEN = FrozenGraph("frozen")


def assert_same(actual: Any, expected: Any) -> None:
    """Equal dtypes and bits."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_same_gradients(
    out: torch.Tensor, expected: torch.Tensor, model: nn.Module, twin: nn.Module
) -> None:
    """Equal gradients of all parameters, in the parameters' own dtypes."""
    assert_same(gradients(out, model), gradients(expected, twin))


def gradients(out: torch.Tensor, model: nn.Module) -> list[torch.Tensor | None]:
    """Returns the gradients of a weighted sum of an output."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    seed = random(*out.shape, seed=7).to(out.dtype)
    return list(torch.autograd.grad(out, wanted, seed, allow_unused=True))


def twin_of(model: nn.Module) -> Any:
    """Returns a copy for the oracle, made before the model is compiled."""
    return copy.deepcopy(model)


@contextlib.contextmanager
def counted_refreshes() -> Iterator[Callable[[], int]]:
    """Counts the copies that were made or made again since the start."""
    from amp_fx import weight_cache

    start = weight_cache.stats().refreshes
    yield lambda: weight_cache.stats().refreshes - start
