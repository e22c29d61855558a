"""regions: the state of autocast as a value follows torch.autocast."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_fx.passes.insert_casts import InsertCasts
from amp_fx.regions.state import (
    AutocastState,
    autocast_device_types,
    in_disabled_region,
    no_autocast,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

REGIONS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([None, torch.bfloat16, torch.float16]),
        "enabled": st.booleans(),
        "cache_enabled": st.sampled_from([None, True, False]),
    }
)


def follow(regions: Sequence[dict[str, Any]]) -> tuple[AutocastState, AutocastState]:
    """Returns the state inside of nested regions: torch's own, and as followed by ``enter``."""
    followed = AutocastState.ambient()
    with contextlib.ExitStack() as stack:
        for region in regions:
            followed = followed.enter("cpu", **region)
            stack.enter_context(torch.autocast("cpu", **region))
        return AutocastState.ambient(), followed


@given(regions=st.lists(REGIONS, max_size=4))
@settings(max_examples=100, deadline=None)
def test_nested_regions_are_followed(regions: list[dict[str, Any]]) -> None:
    """Also where a region says nothing of the cache, which stays as outside."""
    before = AutocastState.ambient()
    torchs, ours = follow(regions)
    assert ours == torchs
    assert AutocastState.ambient() == before


def test_unsupported_dtype_warns_and_disables() -> None:
    state = AutocastState.ambient().turned("cpu", enabled=True)
    with pytest.warns(UserWarning, match="autocast, but the target dtype is not supported"):
        inside = state.enter("cpu", torch.float32)
    assert "cpu" not in inside.enabled


def test_state_is_restored_after_exceptions() -> None:
    before = AutocastState.ambient()
    state = before.turned("cpu", enabled=True, dtype=torch.float16, cache_enabled=False)
    with contextlib.suppress(ZeroDivisionError), state.applied():
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16
        raise ZeroDivisionError
    assert AutocastState.ambient() == before


def test_applied_works_for_a_device_that_is_not_there() -> None:
    state = AutocastState.ambient().turned("cuda", enabled=True, dtype=torch.bfloat16)
    with FakeTensorMode(), state.applied():
        x = torch.ones(2, 2, device="cuda")
        assert (x @ x).dtype == torch.bfloat16
        assert torch.nn.functional.softmax((x @ x), -1).dtype == torch.float32


def test_applied_leaves_nothing_in_the_cast_cache() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        with AutocastState.ambient().turned("cpu", enabled=True, dtype=torch.float16).applied():
            assert (weight @ weight).dtype == torch.float16
        assert (weight @ weight).dtype == torch.bfloat16


def test_devices_stand_in_the_order_of_dispatch() -> None:
    state = AutocastState.ambient().turned("cpu", enabled=True).turned("cuda", enabled=True)
    assert state.enabled == ("cuda", "cpu")
    assert state.turned("cuda", enabled=False).enabled == ("cpu",)


def test_switching_one_device_keeps_the_others() -> None:
    state = AutocastState.ambient()
    turned = state.turned("cuda", enabled=True, dtype=torch.bfloat16)
    assert turned.low_dtype("cpu") == state.low_dtype("cpu")
    assert turned.turned("cuda", enabled=True).low_dtype("cuda") == torch.bfloat16


def test_every_device_that_torch_can_autocast_is_known() -> None:
    """Relies on ``torch.amp.is_autocast_available`` and on the names of dispatch keys."""
    keys = {name.removeprefix("Autocast") for name in dir(torch._C.DispatchKey)}
    candidates = {key.lower() for key in keys} | {torch._C._get_privateuse1_backend_name()}
    available = set()
    for name in candidates:
        with contextlib.suppress(RuntimeError):
            if torch.amp.is_autocast_available(name):
                available.add(name)
    assert {*autocast_device_types(), "ipu"} == available


@pytest.mark.parametrize("device_type", autocast_device_types())
def test_no_region_is_taken_for_a_disabled_one_because_of_its_device(device_type: str) -> None:
    """``torch._C._is_any_autocast_enabled`` alone would take MPS for off."""
    with AutocastState.ambient().turned(device_type, enabled=False).applied():
        torch.autocast_increment_nesting()
        try:
            assert in_disabled_region()
            torch.set_autocast_enabled(device_type, True)
            assert not in_disabled_region()
        finally:
            torch.autocast_decrement_nesting()


def test_no_autocast_turns_all_off_and_regions_inside_on_again() -> None:
    """Relies on ``torch._C._DisableAutocast``."""
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        with no_autocast():
            assert (x @ x).dtype == torch.float32
            with torch.autocast("cpu", torch.bfloat16):
                assert (x @ x).dtype == torch.bfloat16
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16


@pytest.mark.falls_back
def test_an_exception_inside_of_markers_leaves_no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread would stay inside of one, and weights that it has cast would stay as they were.

    A graph that cannot be rewritten runs between the markers of a native region.
    """

    def fail(*_: object) -> None:
        raise ValueError

    monkeypatch.setattr(InsertCasts, "call", fail)

    def nesting() -> int:
        torch.autocast_increment_nesting()
        return torch.autocast_decrement_nesting()

    def picky(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert a.dtype == b.dtype, "on purpose"
        return a + b

    op = torch.library.custom_op("amp_fx_test::picky_in_markers", picky, mutates_args=())
    op.register_fake(lambda a, b: torch.empty_like(a + b))

    def program(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = op(x @ x, x)
        return result

    depth, state = nesting(), AutocastState.ambient()
    for compiler in ("eager", "aot_eager"):
        torch._dynamo.reset()
        call = torch.compile(program, backend="amp_fx", options={"compiler": compiler})
        with pytest.raises(AssertionError, match="on purpose"):
            call(torch.ones(2, 2))
        assert nesting() == depth
        assert AutocastState.ambient() == state
