"""Rejects programs with opaque regions, which an exported program cannot run under autocast.

Compiled graphs run opaque nodes under native autocast, between markers (``wrap_opaque_nodes``). An
exported program cannot contain markers, and would run an opaque node in the dtypes of its inputs.
Accepted are opaque nodes without tensors or outside of any region, and higher-order ops that call a
single op to which autocast does not apply (``auto_functionalized``, ``with_effects``).
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
from amp_fx.graphs.locations import lines_of
from amp_fx.graphs.metadata import OPAQUE, SITE
from amp_fx.passes.base import PassResult
from amp_fx.passes.wrap_opaque_nodes import needs_autocast
from amp_fx.regions.autocast_kernels import has_autocast_kernel
from amp_fx.torch_private.ops import HigherOrderOperator, OpOverload

if TYPE_CHECKING:
    from torch import fx

    from amp_fx.graphs.conditions import Condition


@dataclasses.dataclass(frozen=True)
class RejectOpaqueNodes:
    """Raises at the first opaque region that autocast would change."""

    name: ClassVar[str] = "reject_opaque_nodes"
    requires: ClassVar[tuple[Condition, ...]] = (SITES_KNOWN, VALUES_KNOWN)
    is_needed: ClassVar[bool] = True

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Changes nothing."""
        for node in gm.graph.nodes:
            if needs_autocast(node) and not _calls_plain_op(node):
                raise UnsupportedError(
                    f"{node.format_node()} cannot be rewritten ({OPAQUE.of(node)}), and an "
                    "exported program cannot run it under torch.autocast"
                    f"{describe_location(node)}. Disable autocast around it "
                    "(torch.autocast(..., enabled=False)), or register a cast policy "
                    "(amp_fx.register_op) if it is a custom op"
                )
        for body in rewritten_bodies(gm):
            self.call(body)
        return PassResult(Counter())


def _calls_plain_op(node: fx.Node) -> bool:
    """Returns True if a higher-order op calls one op, to which autocast does not apply."""
    if not isinstance(node.target, HigherOrderOperator):
        return False
    ops = [arg for arg in node.args if isinstance(arg, OpOverload)]
    devices = SITE.of(node).state.enabled
    return len(ops) == 1 and not any(has_autocast_kernel(ops[0], device) for device in devices)


_HIDDEN = (str(Path(torch.__file__).parent), str(Path(__file__).resolve().parents[1] / "amp_fx"))
"""Folders of torch and amp_fx, whose lines messages omit."""


def describe_location(node: fx.Node) -> str:
    """Returns the source line of a node as the end of a message; empty if unknown."""
    lines = [line for line in lines_of(node) if not line.file.startswith(_HIDDEN)]
    return f"; it is called at {lines[-1].file}:{lines[-1].number}" if lines else ""
