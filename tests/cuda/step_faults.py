"""Faults that are planted into ``compile_step``, one at a time, by editing its source."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from typing import TYPE_CHECKING, Any

from amp_fx.grad_scaler import compiled_step, two_pass
from amp_fx.weights import step_copies

if TYPE_CHECKING:
    import pytest


@dataclasses.dataclass(frozen=True)
class StepFault:
    """An edit of one function.

    Attributes:
        about: What is wrong then, in words.
        owner: The module or class that calls the function.
        name: Of its function.
        edits: Pieces of the source, and what stands there instead.
    """

    about: str
    owner: Any
    name: str
    edits: dict[str, str]

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """Makes the edit."""
        function = getattr(self.owner, self.name)
        source = textwrap.dedent(inspect.getsource(function))
        for old, new in self.edits.items():
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        found: dict[str, Any] = {}
        exec(compile(source, f"<{self.about}>", "exec"), vars(inspect.getmodule(function)), found)
        patch.setattr(self.owner, self.name, found[self.name])


def _update(about: str, edits: dict[str, str]) -> StepFault:
    return StepFault(about, compiled_step, "update_of", edits)


CHECK = "new = _unless(found_inf, weight, new)"
SECOND = "unchecked, new = new, _unless(found_inf, weight, new)"

STEP_FAULTS = {
    "copy before the check": _update(
        "an overflow reaches the copies", {CHECK: SECOND, "low.copy_(new)": "low.copy_(unchecked)"}
    ),
    "weight before the check": _update(
        "it reaches the weights", {CHECK: SECOND, "weight.copy_(new)": "weight.copy_(unchecked)"}
    ),
    "state before the check": _update(
        "it reaches the moments",
        {"state.copy_(_unless(found_inf, state, value))": "state.copy_(value)"},
    ),
    "copy of the old weight": _update("a step late", {"low.copy_(new)": "low.copy_(weight)"}),
    "copy not written": _update("it passes for fresh", {"low.copy_(new)": "pass"}),
    "only some copies written": _update(
        "the first weight's", {"low.copy_(new)": "low.copy_(new) if i == 0 else None"}
    ),
    "not unscaled": _update(
        "gradients stay scaled", {"grad if inv_scale is None else grad * inv_scale": "grad"}
    ),
    "not clipped": _update(
        "the norm is not used", {"unscaled if factor is None else unscaled * factor": "unscaled"}
    ),
    "skipped step counted": StepFault(
        "Adam corrects for one step more",
        compiled_step,
        "count_step",
        {"(1 - found_inf)": "(0 * found_inf + 1)"},
    ),
    "overflow unseen": StepFault(
        "one tensor's is not asked for",
        two_pass,
        "overflow_flag",
        {"for grad in grads": "for grad in grads[1:]"},
    ),
    "norm of some": StepFault(
        "one tensor is left out",
        two_pass,
        "total_norm",
        {"for g in grads if": "for g in grads[1:] if"},
    ),
    "copies in another's place": StepFault(
        "one weight's new value goes to the other's copy",
        step_copies,
        "_targets",
        {"in weights], computed": "in reversed(weights)], computed"},
    ),
}
