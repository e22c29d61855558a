"""Refuses a program with opaque regions in it: nothing may be left to native autocast.

Compiled graphs run islands under native autocast, between markers (``wrap_islands``). An exported
program has no place for these, and would run such a node in the dtypes that happen to come. Left
alone on purpose: islands without tensors or outside of any region, and operators that only call an
op which autocast knows nothing of (``auto_functionalized``, ``with_effects``).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from amp_fx.errors import UnsupportedError
from amp_fx.graphs.bodies import rewritten_bodies
from amp_fx.graphs.conditions import SITES_KNOWN, VALUES_KNOWN
from amp_fx.graphs.metadata import ISLAND, SITE
from amp_fx.graphs.places import lines_of
from amp_fx.passes.base import PassResult
from amp_fx.passes.wrap_islands import needs_autocast
from amp_fx.regions.autocast_kernels import has_autocast_kernel
from amp_fx.torch_private.ops import HigherOrderOperator, OpOverload

if TYPE_CHECKING:
    from torch import fx

    from amp_fx.graphs.conditions import Condition


@dataclasses.dataclass(frozen=True)
class RefuseIslands:
    """Raises at the first opaque region that autocast would change."""

    name: ClassVar[str] = "refuse_islands"
    requires: ClassVar[tuple[Condition, ...]] = (SITES_KNOWN, VALUES_KNOWN)
    is_needed: ClassVar[bool] = True

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Changes nothing."""
        for node in gm.graph.nodes:
            if needs_autocast(node) and not _calls_plain_op(node):
                raise UnsupportedError(
                    f"{node.format_node()} cannot be rewritten ({ISLAND.of(node)}), and an "
                    f"exported program cannot leave it to torch.autocast{place_of(node)}. "
                    "Turn autocast off around it (torch.autocast(..., enabled=False)), or give "
                    "the op a policy (amp_fx.register_op) if it is your own"
                )
        for body in rewritten_bodies(gm):
            self.call(body)
        return PassResult(Counter())


def _calls_plain_op(node: fx.Node) -> bool:
    """Returns True if a higher-order op calls one op, as it stands, that autocast does not know."""
    if not isinstance(node.target, HigherOrderOperator):
        return False
    ops = [arg for arg in node.args if isinstance(arg, OpOverload)]
    devices = SITE.of(node).state.enabled
    return len(ops) == 1 and not any(has_autocast_kernel(ops[0], device) for device in devices)


_HIDDEN = (str(Path(torch.__file__).parent), str(Path(__file__).resolve().parents[1] / "amp_fx"))
"""Folders whose code is not the program's."""


def place_of(node: fx.Node) -> str:
    """Describes the node's place in the program, for a person to read; empty if unknown."""
    lines = [line for line in lines_of(node) if not line.file.startswith(_HIDDEN)]
    return f"; it stands at {lines[-1].file}:{lines[-1].number}" if lines else ""
