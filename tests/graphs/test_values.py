"""values: what a node produces, found by evaluating it alone."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from amp_fx.graphs.metadata import CAPTURED, VALUE
from amp_fx.graphs.values import (
    adopt_captured,
    analysis,
    detect_fake_mode,
    evaluate,
    remember_captured,
    set_value,
)
from tests.programs import capture_program, symbolic


def test_evaluation_is_under_the_fake_mode_with_autocast_off(rng: torch.Generator) -> None:
    x = torch.randn(4, 4, generator=rng).requires_grad_()
    captured = capture_program(lambda x: x @ x, x)
    graph = captured.gm.graph
    remember_captured(graph)
    mode = detect_fake_mode(graph)
    assert mode is not None
    for node in graph.find_nodes(op="placeholder"):
        set_value(node, CAPTURED.get(node))
    node = captured.node("matmul")
    with torch.autocast("cpu", torch.bfloat16), analysis(mode, is_grad_enabled=True):
        value = evaluate(node)
    assert value.fake_mode is mode
    assert value.dtype == torch.float32
    assert value.requires_grad
    with analysis(mode, is_grad_enabled=False):
        assert not evaluate(node).requires_grad


def test_in_place_ops_raise_the_version_of_what_they_write() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_method("mul_", (x, 2))
    set_value(x, torch.ones(2))
    before = VALUE.of(x)._version
    with analysis(None, is_grad_enabled=True):
        assert evaluate(node) is VALUE.get(x)
    assert VALUE.of(x)._version == before + 1


def test_sizes_that_depend_on_data_stay_the_captured_ones() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with mode:
        x = torch.ones(4)
        captured, fresh = x.nonzero(), x.nonzero()
        assert captured.shape[0] is not fresh.shape[0]
        adopted = adopt_captured(captured, fresh.half())
    assert str(adopted.shape) == str(captured.shape)
    assert adopted.dtype == torch.float16


def node_of(target: object, *args: object, value: torch.Tensor, **kwargs: object) -> fx.Node:
    """Returns a call of a function on one tensor and constants."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    set_value(x, value)
    return graph.call_function(target, (x, *args), kwargs)  # type: ignore[arg-type]


def test_kernels_that_take_no_symbolic_sizes_are_evaluated() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        size = (x.shape[2] * 2, x.shape[3] * 2)
        return torch.nn.functional.interpolate(x, size, mode="bilinear")

    value = symbolic(1, 3, 8, 9)
    with analysis(value.fake_mode, is_grad_enabled=True):  # type: ignore[attr-defined]
        result = evaluate(node_of(double, value=value))
    assert result.shape[2:] == (value.shape[2] * 2, value.shape[3] * 2)


def test_what_an_op_gives_is_what_eager_code_gives() -> None:
    """The Python dispatcher's ``dropout`` returns a copy."""
    value = symbolic(4, 4)
    node = node_of(torch.nn.functional.dropout, 0.5, training=False, value=value)
    with analysis(value.fake_mode, is_grad_enabled=True):  # type: ignore[attr-defined]
        assert evaluate(node) is value


def test_the_error_of_an_op_is_the_first_one() -> None:
    def fail(_: torch.Tensor) -> None:
        errors.append(RuntimeError(f"call {len(errors)}"))
        raise errors[-1]

    errors: list[RuntimeError] = []
    value = symbolic(4)
    with analysis(value.fake_mode, is_grad_enabled=True), pytest.raises(RuntimeError, match="0"):  # type: ignore[attr-defined]
        evaluate(node_of(fail, value=value))
    assert len(errors) == 2
