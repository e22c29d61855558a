"""The recorder and its sinks, against a mode of torch that only lists ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from amp_fx.observe.recorder import Event, Recorder, Sink
from amp_fx.observe.state import guard_of, undisturbed
from amp_fx.regions.module_paths import ModulePaths, Program
from amp_fx.regions.module_stack import call_with_paths

if TYPE_CHECKING:
    from collections.abc import Callable


class Listed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The oracle: the names of all ops."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


COPIES = ("aten.detach.default", "aten.new_empty_strided.default", "aten.copy_.default")
"""Whether autograd copies a gradient depends on references to it."""


class Kept(Sink):
    def __init__(self, see: Callable[[Event], Any]) -> None:
        self.see, self.rows = see, list[Any]()

    def after(self, event: Event, before: Any) -> None:
        del before
        self.rows.append(self.see(event))


def observed(step: Callable[..., Any], *sinks: Sink) -> None:
    guard, paths = guard_of(step), ModulePaths(Program(step))
    with undisturbed(guard), Recorder(guard, paths, *sinks).observing():
        call_with_paths(paths, step)


def training_step(reentrant: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    x = torch.randn(4, 8, requires_grad=True)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu"):
            hidden = checkpoint(net, x, use_reentrant=reentrant)
        assert isinstance(hidden, torch.Tensor)
        hidden.float().square().mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


@pytest.mark.parametrize("reentrant", [False, True])
def test_sinks_see_the_ops_that_a_mode_sees(reentrant: bool) -> None:
    kept = Kept(lambda event: str(event.op))
    observed(training_step(reentrant), kept)
    listed = Listed()
    step = training_step(reentrant)
    with listed:
        step()
    rows, ops = ([op for op in ops if op not in COPIES] for ops in (kept.rows, listed.ops))
    assert rows == ops
    assert len(rows) > 50


@pytest.mark.parametrize("reentrant", [False, True])
def test_places_of_a_step_with_a_checkpoint(reentrant: bool) -> None:
    """Reports a backward with the module of its forward, and marks recomputed ops."""
    kept = Kept(lambda event: (event.stage, event.location.module, event.name))
    observed(training_step(reentrant), kept)
    products = [row for row in kept.rows if row[2] == "addmm"]
    forward = [("forward", module, "addmm") for module in ("0", "3")]
    # The last product saves nothing that its backward needs, which only one kind notices.
    again = [("again", module, "addmm") for module in (("0", "3") if reentrant else ("0",))]
    assert products == [*forward, *again]
    backward = [module for stage, module, name in kept.rows if stage == "backward" and name == "mm"]
    assert backward == ["3", "3", "0", "0"]


def test_inputs_are_not_overwritten_before_an_op() -> None:
    class Copies(Sink):
        def __init__(self) -> None:
            self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

        def before(self, event: Event) -> torch.Tensor | None:
            return event.written[0].clone() if event.written else None

        def after(self, event: Event, before: torch.Tensor | None) -> None:
            if before is not None:
                self.pairs.append((before, event.results[0].clone()))

    x, copies = torch.zeros(3), Copies()

    def step() -> None:
        x.add_(1)
        x[0].mul_(5)

    observed(step, copies)
    found = [(before.tolist(), after.tolist()) for before, after in copies.pairs]
    assert found == [([0.0] * 3, [1.0] * 3), (1.0, 5.0)]
    assert x.tolist() == [0.0] * 3, "the state is put back"


class Computes(Sink):
    """Computes a product of its own whenever it is called."""

    def __init__(self) -> None:
        self.weight = torch.randn(4, 4, requires_grad=True)
        self.made: dict[str, list[torch.Tensor]] = {}

    def compute(self, when: str) -> None:
        self.made.setdefault(when, []).append(self.weight @ self.weight)

    def before(self, event: Event) -> None:
        self.compute(f"before an op of the {event.stage}")

    def after(self, event: Event, before: Any) -> None:
        del before
        self.compute(f"after an op of the {event.stage}")

    def root(self, root: torch.Tensor) -> None:
        del root
        self.compute("root")

    def update(self, optimizer: torch.optim.Optimizer, *, is_over: bool) -> None:
        del optimizer, is_over
        self.compute("update")


@pytest.mark.parametrize("reentrant", [False, True])
def test_ops_of_sinks_are_not_observed_cast_or_differentiated(reentrant: bool) -> None:
    """Compares the step with one of the same seed whose sinks compute nothing."""
    kept, expected = (
        Kept(lambda event: (event.stage, event.location.module, str(event.op))) for _ in range(2)
    )
    computes = Computes()
    with torch.autocast("cpu"):
        observed(training_step(reentrant), computes, kept)
        observed(training_step(reentrant), expected)
    rows, others = ([row for row in k.rows if row[2] not in COPIES] for k in (kept, expected))
    assert rows == others
    stages = ("forward", "backward", "update", "again")
    ops = {f"{when} an op of the {stage}" for when in ("before", "after") for stage in stages}
    assert set(computes.made) == {"root", "update", *ops}
    products = [each for several in computes.made.values() for each in several]
    assert {(t.dtype, t.requires_grad) for t in products} == {(torch.float32, False)}
    assert computes.weight.grad is None


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_steps_of_optimizers_are_told_and_closures_are_none(kind: Any) -> None:
    weight = torch.ones(4, requires_grad=True)
    optimizer = kind([weight], lr=0.1)
    told: list[tuple[str, Any]] = []

    class Told(Sink):
        def update(self, optimizer: torch.optim.Optimizer, *, is_over: bool) -> None:
            told.append(("after" if is_over else "before", optimizer))

    kept = Kept(lambda event: (event.stage, event.name))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.exp().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def step() -> None:
        closure()
        optimizer.step(closure)

    observed(step, kept, Told())
    assert told == [("before", optimizer), ("after", optimizer)]
    assert {stage for stage, name in kept.rows if name == "exp"} == {"forward"}
    assert {stage for stage, name in kept.rows if name in ("add", "_foreach_add")} == {"update"}
    assert weight.tolist() == [1.0] * 4
    assert not optimizer.state
