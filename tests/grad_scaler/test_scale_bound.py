"""The bound of the scale is never above it, and follows it by copies that arrive late."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_fx.grad_scaler import scale_bound
from amp_fx.grad_scaler.scale_bound import ScaleBound
from tests.grad_scaler.on_device import OnDevice


def test_on_the_cpu_it_is_the_scale() -> None:
    bound = ScaleBound(8.0)
    bound.follow(torch.tensor(3.0), 0.5, 1.0)
    assert bound.value == 3.0


class LateCopy:
    """A copy of which the test says when it arrives."""

    arrives = False

    def __init__(self) -> None:
        self._value: Tensor | None = None

    @property
    def is_under_way(self) -> bool:
        return self._value is not None

    def start(self, source: Tensor) -> None:
        assert self._value is None
        self._value = source.clone()

    def take(self) -> Tensor | None:
        if not self.arrives:
            return None
        found, self._value = self._value, None
        return found


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> type[LateCopy]:
    monkeypatch.setattr(scale_bound, "HostCopy", LateCopy)
    monkeypatch.setattr(scale_bound, "_can_copy", lambda _: True)
    return LateCopy


def test_copies_arrive_late(late: type[LateCopy], monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays each copy by two updates."""
    bound = ScaleBound(64.0)
    scale, bounds = torch.tensor(64.0), []
    for step in range(6):
        monkeypatch.setattr(late, "arrives", step % 3 == 2)
        bound.follow(scale.as_subclass(OnDevice), 0.5, 0.0)
        bounds.append(bound.value)
        scale.fill_(48.0)
    # A copy says what the scale was when it was started, and each update since may have halved it.
    assert bounds == [32.0, 16.0, 16.0, 8.0, 4.0, 6.0]


@hypothesis.settings(
    deadline=None,
    max_examples=50,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
    plan=st.lists(
        st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.booleans()), min_size=1, max_size=40
    ),
    min_scale=st.sampled_from([0.0, 1.0, 2.0**-5]),
)
def test_it_is_never_above_the_scale(
    late: type[LateCopy], plan: list[tuple[float, bool]], min_scale: float
) -> None:
    """Covers all sequences of updates, and all arrival times of copies."""
    bound, scale = ScaleBound(4.0), torch.tensor(4.0)
    for factor, arrives in plan:
        scale = torch.maximum(scale * factor, scale.clamp(max=min_scale))
        late.arrives = arrives
        bound.follow(scale.as_subclass(OnDevice), 0.5, min_scale)
        assert bound.value <= scale.item()


def test_which_devices_copy_to_the_host_without_waiting() -> None:
    with FakeTensorMode():
        scales = {device: torch.empty((), device=device) for device in ("cpu", "xpu", "mps")}
    found = {device: scale_bound._can_copy(scale) for device, scale in scales.items()}
    assert found == {"cpu": False, "xpu": True, "mps": False}
