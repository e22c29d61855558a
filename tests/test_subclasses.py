"""Graphs that construct tensor subclasses: the dtypes and bits of eager autocast."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.testing._internal.common_subclass import SubclassWithTensorFactory
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

import amp_fx
from tests.programs import compiled

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Kind:
    """Shape and dtype that were passed to a wrapper."""

    shape: torch.Size
    dtype: torch.dtype


class Wrapper(torch.Tensor):
    """A tensor around another; it has the shape and dtype that its constructor was given."""

    payload: torch.Tensor
    kind: Kind

    @staticmethod
    def __new__(cls, inner: torch.Tensor, kind: Kind) -> Wrapper:
        wrapper: Wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            kind.shape,
            dtype=kind.dtype,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )
        return wrapper

    def __init__(self, inner: torch.Tensor, kind: Kind) -> None:
        self.payload, self.kind = inner, kind

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Wrapper({self.kind})"  # the inherited one reads numbers

    def __tensor_flatten__(self) -> tuple[list[str], Kind]:
        return ["payload"], self.kind

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], kind: Kind, *_: Any) -> Wrapper:
        return Wrapper(inner["payload"], kind)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(Wrapper, unwrapped, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, wrapped, func(*args, **kwargs))


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.payload if isinstance(tensor, Wrapper) else tensor


def wrapped(tensor: torch.Tensor) -> Wrapper:
    return Wrapper(tensor, Kind(tensor.shape, tensor.dtype))


def in_the_graph(x: torch.Tensor, w: torch.Tensor) -> Any:
    wrapper = wrapped(x @ w)
    return wrapper, wrapper @ w, wrapper.sum()


def taken_out(x: torch.Tensor, w: torch.Tensor) -> Any:
    return unwrapped(wrapped(x) @ w), unwrapped(wrapped(x @ w).relu())


def of_two(x: torch.Tensor, w: torch.Tensor) -> Any:
    pair: Any = TwoTensor(x @ w, w @ x)  # type: ignore[no-untyped-call]
    return (pair @ w).a, (pair + 1).b


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("is_bare", [False, True])
@pytest.mark.parametrize("program", [in_the_graph, taken_out, of_two])
def test_wrappers(
    program: Callable[..., Any], is_bare: bool, compiler: str, rng: torch.Generator
) -> None:
    x, w = (torch.randn(4, 4, generator=rng) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        expected = program(x, w)
    region = torch.autocast("cpu", torch.bfloat16)
    with contextlib.nullcontext() if is_bare else region:
        found = compiled(program, compiler=compiler)(x, w)
    for ours, eager in zip(found, expected, strict=True):
        inner = unwrapped(ours)
        assert inner.dtype == ours.dtype == (torch.float32 if is_bare else eager.dtype)
        assert torch.equal(inner.to(eager.dtype), unwrapped(eager))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_nested_tensor_that_the_graph_makes(compiler: str, rng: torch.Generator) -> None:
    """Its ragged size belongs to no input, so there can be no guard on it."""
    values, weight = torch.randn(10, 8, generator=rng), torch.randn(4, 8, generator=rng)
    offsets = torch.tensor([0, 3, 7, 10])

    def program(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        nested = torch.nested.nested_tensor_from_jagged(values, offsets)
        return torch.nn.functional.linear(nested, weight).values()

    with torch.autocast("cpu", torch.bfloat16):
        expected = program(values, offsets)
        found = compiled(program, compiler=compiler)(values, offsets)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(found, expected)


JAGGED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "linear": lambda _, y: y,
    "where": lambda n, y: torch.where(y > 0, y, n),
    "where, number": lambda _, y: torch.where(y > 0, y, 0.0),
    "norm and sum": lambda n, y: torch.nn.functional.layer_norm(y.relu(), (8,)) + n,
}


@pytest.mark.parametrize("is_bare", [False, True])
@pytest.mark.parametrize("function", JAGGED.values(), ids=JAGGED)
def test_ops_of_a_nested_input(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    is_bare: bool,
    rng: torch.Generator,
) -> None:
    """Rewrites and explains ops of an input whose ragged size is not a number."""
    weight = torch.randn(8, 8, generator=rng)
    parts = [torch.randn(length, 8, generator=rng) for length in (2, 3)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)

    def program(nested: torch.Tensor) -> torch.Tensor:
        return function(nested, torch.nn.functional.linear(nested, weight)).values()

    region = torch.autocast("cpu", torch.bfloat16)
    with region:
        expected = program(nested)
    for compiler in ("eager", "aot_eager"):
        torch.compiler.reset()
        with contextlib.nullcontext() if is_bare else region:
            found = compiled(program, compiler=compiler)(nested)
        assert found.dtype == (torch.float32 if is_bare else expected.dtype)
        assert torch.equal(found.to(expected.dtype), expected)
    assert "linear" in str(amp_fx.explain(program)(nested))


def test_a_subclass_that_creates_tensors_is_the_only_input() -> None:
    x: Any = SubclassWithTensorFactory(torch.ones(3, 5))  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {"compiler": "aot_eager"}
    result: Any = torch.compile(lambda x: 2 * x, backend="amp_fx", options=options)(x)
    assert torch.equal(result.src, torch.full((3, 5), 2.0))
