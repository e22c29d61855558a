"""CachedCall: what compiled code gets, and what is computed before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from amp_fx import weight_cache
from amp_fx.errors import StaleWeightError
from amp_fx.weights.call import CachedCall, verify_level
from tests import needs
from tests.weights.specs import cast_spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = needs.HOOK


class Code:
    """Compiled code that records its inputs."""

    def __init__(self) -> None:
        self.inputs: list[list[torch.Tensor]] = []

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        self.inputs.append([x.clone() for x in inputs])
        return tuple(inputs[:1])


@pytest.fixture(autouse=True)
def _empty_store() -> Iterator[None]:
    weight_cache.clear()
    yield
    weight_cache.clear()


def call_of(code: Any, weight: torch.Tensor, **kwargs: Any) -> CachedCall:
    """Returns a graph of a weight and an input, which gets the input and the cast of the weight."""
    settings = {"owner": "a model", "verify": "sample", **kwargs}
    return CachedCall([cast_spec(weight)], [1], compiled=code, **settings)


def test_code_gets_the_passed_inputs_and_fresh_values() -> None:
    code, weight, x = Code(), torch.randn(4, 4), torch.randn(4)
    call = call_of(code, weight)
    for _ in range(3):
        assert call([weight, x]) == (x,)
        weight.mul_(2)
    for i, inputs in enumerate(code.inputs):
        assert torch.equal(inputs[0], x)
        assert torch.equal(inputs[1], (weight / 2 ** (3 - i)).bfloat16())


def test_values_are_computed_once_per_update() -> None:
    code, weight, x = Code(), torch.randn(4, 4), torch.randn(4)
    call = call_of(code, weight)
    made = []
    for is_written in (False, False, True, False):
        if is_written:
            weight.add_(1)
        call([weight, x])
        made.append(weight_cache.stats().refreshes)
    assert made == [1, 1, 2, 2]


def test_each_set_of_weights_has_values() -> None:
    """One graph may serve several layers."""
    code, weights, x = Code(), [torch.randn(4, 4) for _ in range(3)], torch.randn(4)
    call = call_of(code, weights[0])
    for weight in weights * 2:
        call([weight, x])
    assert weight_cache.stats().refreshes == 3
    for inputs, weight in zip(code.inputs, weights * 2, strict=True):
        assert torch.equal(inputs[1], weight.bfloat16())


def test_code_is_bound_to_its_constants_again_after_a_write() -> None:
    weight, x = torch.randn(4, 4), torch.randn(4)
    bound: list[torch.Tensor] = []

    def bind(constants: Sequence[torch.Tensor]) -> Any:
        bound.append(constants[0].clone())
        return tuple

    spec = cast_spec(weight)
    call = CachedCall(
        [], [1], owner="a model", verify="sample", compiled=Code(), constants=[spec], bind=bind
    )
    for _ in range(2):
        call([weight, x])
    assert len(bound) == 1
    weight.add_(1)
    assert call([weight, x]) == (x,)
    assert torch.equal(bound[-1], weight.bfloat16())


def test_an_error_of_the_code_leaves_the_call() -> None:
    weight, x = torch.randn(4, 4), torch.randn(4)
    state = {"fails": True}

    def code(inputs: list[Any]) -> tuple[Any, ...]:
        if state["fails"]:
            raise ValueError("of the code")
        return tuple(inputs)

    call = call_of(code, weight)
    with pytest.raises(ValueError, match="of the code"):
        call([weight, x])
    state["fails"] = False
    weight.add_(1)
    assert torch.equal(call([weight, x])[1], weight.bfloat16())


def test_full_verification_finds_a_write_without_a_signal() -> None:
    weight, x = torch.randn(4, 4), torch.randn(4)
    pointer = weight.numpy()
    call = call_of(Code(), weight, verify="full")
    call([weight, x])
    pointer[2, 2] += 1  # taken before the value was computed
    with pytest.raises(StaleWeightError, match="a weight of a model"):
        call([weight, x])


def test_the_environment_overrides_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verify_level("off") == "off"
    monkeypatch.setenv("AMP_FX_VERIFY", "1")
    assert verify_level("off") == "full"
    monkeypatch.setenv("AMP_FX_VERIFY", "no such level")
    assert verify_level("sample") == "sample"
