"""capture: one node becomes the ops that autocast would see, or says why it cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import fx

from amp_fx.graphs.decompose import Decomposer, NotPlainError
from amp_fx.graphs.values import remember_captured, set_value
from amp_fx.regions.autocast_kernels import has_autocast_kernel
from amp_fx.tables.cast_policy import CastPolicy
from tests.programs import POLICY, site, symbolic

if TYPE_CHECKING:
    from collections.abc import Callable


linear = torch.nn.functional.linear


def node_of(target: Callable[..., object], *values: object, **kwargs: object) -> fx.Node:
    """Returns a node that calls a function on real tensors and constants."""
    graph = fx.Graph()
    args = []
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            node = graph.placeholder(f"x{i}")
            set_value(node, value)
            args.append(node)
        else:
            args.append(value)  # type: ignore[arg-type]
    node = graph.call_function(target, tuple(args), kwargs)  # type: ignore[arg-type]
    remember_captured(graph)
    return node


@pytest.fixture
def decomposer() -> Decomposer:
    return Decomposer(POLICY, None)


def ones(*sizes: int) -> torch.Tensor:
    return torch.ones(*sizes)


def test_decisions_are_known_where_no_cast_is_needed(decomposer: Decomposer) -> None:
    low = ones(2, 2).bfloat16()
    decomposed, _ = decomposer.decompose(node_of(linear, low, low), site())
    assert decomposed.graph is None
    assert [d.op for d in decomposed.decisions] == ["aten::linear"]


def test_repeated_input_is_one_placeholder(decomposer: Decomposer) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    set_value(x, ones(2, 2))
    node = graph.call_function(torch.mm, (x, x))
    decomposed, inputs = decomposer.decompose(node, site())
    assert inputs == [x]
    assert decomposed.graph is not None
    assert len(decomposed.graph.find_nodes(op="placeholder")) == 1


def test_equal_calls_are_traced_once(decomposer: Decomposer) -> None:
    first = node_of(linear, ones(2, 2), ones(2, 2))
    again = node_of(linear, ones(2, 2), ones(2, 2))
    assert decomposer.decompose(first, site())[0] is decomposer.decompose(again, site())[0]
    assert decomposer.num_traced == 1


DIFFERENT = {
    "dtype": lambda: (node_of(torch.mm, ones(2, 2).half(), ones(2, 2)), site()),
    "size": lambda: (node_of(torch.mm, ones(3, 2), ones(2, 2)), site()),
    "gradient": lambda: (node_of(torch.mm, ones(2, 2).requires_grad_(), ones(2, 2)), site()),
    "function": lambda: (node_of(torch.matmul, ones(2, 2), ones(2, 2)), site()),
    "low dtype": lambda: (node_of(torch.mm, ones(2, 2), ones(2, 2)), site(torch.float16)),
    "grad mode": lambda: (node_of(torch.mm, ones(2, 2), ones(2, 2)), site(is_grad_enabled=False)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_calls_are_traced_apart(decomposer: Decomposer, name: str) -> None:
    decomposer.decompose(node_of(torch.mm, ones(2, 2), ones(2, 2)), site())
    node, where = DIFFERENT[name]()
    decomposer.decompose(node, where)
    assert decomposer.num_traced == 2


def test_constants_are_part_of_the_call(decomposer: Decomposer) -> None:
    for dim in (0, 1):
        decomposer.decompose(node_of(torch.cumsum, ones(2, 2), dim), site())
    assert decomposer.num_traced == 2


def test_what_cannot_be_traced_is_not_plain_and_remembered(decomposer: Decomposer) -> None:
    for _ in range(2):
        node = node_of(refuse, ones(1, 1))
        with pytest.raises(NotPlainError, match="RuntimeError: refused"):
            decomposer.decompose(node, site())
    assert decomposer.num_traced == 1


def refuse(_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("refused")


def test_baked_tensor_is_not_plain(decomposer: Decomposer) -> None:
    """Rejects a trace that would contain a tensor of this run as a constant."""
    constant = ones(2, 2)
    node = node_of(lambda x: torch.mm(x, constant), ones(2, 2))
    with pytest.raises(NotPlainError, match="would contain a constant tensor"):
        decomposer.decompose(node, site())


def test_kernels_on_autocast_keys_are_seen() -> None:
    """Relies on dispatch keys being named ``Autocast`` plus the device's name."""
    op = torch.ops.aten.mm.default
    assert has_autocast_kernel(op, "cpu")
    assert has_autocast_kernel(op, "cuda")
    assert not has_autocast_kernel(torch.ops.aten.relu.default, "cpu")


def test_library_with_its_own_kernel_is_left_whole(decomposer: Decomposer) -> None:
    with torch.library._scoped_library("amp_fx_tests", "FRAGMENT") as library:
        library.define("own(Tensor x) -> Tensor")
        library.impl("own", lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl("own", lambda x: x.bfloat16(), "AutocastCPU")
        node = node_of(torch.ops.amp_fx_tests.own.default, ones(2))
        with pytest.raises(NotPlainError, match="has an autocast kernel"):
            decomposer.decompose(node, site())


def interpolate(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.interpolate(x, size=(x.shape[2] * 2, 5), mode="bilinear")


@pytest.mark.parametrize("is_listed", [False, True])
def test_composite_op_whose_kernel_takes_no_symbolic_sizes(is_listed: bool) -> None:
    """Leaves the op unchanged if nothing in it has a policy, and treats it as opaque otherwise."""
    x = symbolic(1, 3, 8, 9)
    node = node_of(interpolate, x)
    low = {"aten::upsample_bilinear2d": CastPolicy.LOWER_PRECISION_FP}
    chosen = POLICY.with_device("cpu", low) if is_listed else POLICY
    decomposer = Decomposer(chosen, x.fake_mode)  # type: ignore[attr-defined]
    if is_listed:
        with pytest.raises(NotPlainError, match="concrete integers"):
            decomposer.decompose(node, site())
    else:
        assert decomposer.decompose(node, site())[0].graph is None
