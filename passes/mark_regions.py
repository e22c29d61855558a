"""Annotates every node with its autocast region and removes the region markers.

Before:
    %enter = _enter_autocast("cpu", torch.float16, True, None)
    %y     = linear(%x, %w)
    %exit  = _exit_autocast(%enter)
    %z     = linear(%y, %w)
After:
    %y     = linear(%x, %w)      # site: cpu float16
    %z     = linear(%y, %w)      # site: as at the start

Left unchanged: switches of grad mode, which act at run time; the bodies of higher-order ops, which
get the site of their call when ``insert_casts`` rewrites them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from amp_fx.graphs.conditions import SITES_KNOWN
from amp_fx.graphs.markers import region_arguments
from amp_fx.graphs.metadata import OPAQUE, SITE
from amp_fx.graphs.opaque import TRANSFORM, is_bare_function
from amp_fx.graphs.policy_mode import annotated_policy
from amp_fx.passes.base import PassResult
from amp_fx.torch_private.autocast import enter_autocast, exit_autocast
from amp_fx.torch_private.autograd import set_grad_enabled
from amp_fx.torch_private.ops import HigherOrderOperator

if TYPE_CHECKING:
    from torch import fx

    from amp_fx.graphs.conditions import Condition
    from amp_fx.graphs.records import AutocastSite
    from amp_fx.regions.state import AutocastState

# Level changes of torch.func transforms and of forward-mode AD. Between two of them, tensors are
# wrapped or dual, and their fake values do not describe the wrapped tensors. All nodes between are
# opaque nodes.
_TRANSFORMS = ("vmap", "grad", "jvp", "func")
_LEVEL_UP = (*(f"_{name}_increment_nesting" for name in _TRANSFORMS), "_enter_dual_level")
_LEVEL_DOWN = (*(f"_{name}_decrement_nesting" for name in _TRANSFORMS), "_exit_dual_level")

# Namespaces whose functions act on hidden state, not on their arguments.
_STATEFUL_MODULES = (
    "torch._functorch",
    "torch._C._functorch",
    "torch.autograd",
    "torch._C._autograd",
)


@dataclasses.dataclass(frozen=True)
class MarkRegions:
    """Follows autocast regions and grad mode through a graph.

    Attributes:
        site: The state at the start of the graph.
    """

    name: ClassVar[str] = "mark_regions"
    ensures: ClassVar[tuple[Condition, ...]] = (SITES_KNOWN,)
    is_needed: ClassVar[bool] = True
    site: AutocastSite

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Sets ``SITE``, and sets ``OPAQUE`` of opaque regions to the reason; counts ``regions``.

        A custom ``torch.autograd.Function`` that the program calls outside of any region gets a
        site without autocast: its bodies were captured without, and its backward may reject other
        dtypes.
        """
        counts: Counter[str] = Counter()
        states = [(self.site.state, self.site.is_bare)]
        is_grad_enabled = self.site.is_grad_enabled
        level = 0
        for node in list(gm.graph.nodes):
            if node.target is enter_autocast:
                states.append(_entered(*states[-1], node))
                continue
            if node.target is exit_autocast:
                states.pop()
                enter = node.args[0]
                gm.graph.erase_node(node)
                gm.graph.erase_node(enter)
                counts["regions"] += 1
                continue
            if node.target is set_grad_enabled:
                is_grad_enabled = node.args[0]
            name = getattr(node.target, "__name__", "")
            level += name in _LEVEL_UP
            # A second run keeps the sites of the first, as the markers are gone.
            if not SITE.is_on(node):
                state, is_bare = states[-1]
                policy = annotated_policy(gm, node)
                state = state if policy is None else state.with_policy(policy)
                site = dataclasses.replace(
                    self.site, state=state, is_grad_enabled=is_grad_enabled, is_bare=is_bare
                )
                is_off = bool(level) and is_bare and not site.casts_transforms
                SITE.put(node, site.without_autocast() if is_off else site)
            reason = TRANSFORM if level else opaque_reason(node)
            if reason is not None:
                OPAQUE.put(node, reason)
            if is_bare_function(node):
                SITE.put(node, SITE.of(node).without_autocast())
            level -= name in _LEVEL_DOWN
        return PassResult(counts)


def _entered(state: AutocastState, is_bare: bool, marker: fx.Node) -> tuple[AutocastState, bool]:
    """Returns the state inside a region; the flag is True if the program enables no region."""
    arguments = region_arguments(marker)
    return state.enter(*arguments), is_bare and not arguments[2]


def opaque_reason(node: fx.Node) -> str | None:
    """Returns the reason why a node is opaque, or None if it can be rewritten."""
    if node.op not in ("call_function", "call_method"):
        return None
    if isinstance(node.target, HigherOrderOperator):
        return "higher-order op"
    module = getattr(node.target, "__module__", None) or ""
    if node.op == "call_function" and module.startswith(_STATEFUL_MODULES):
        return "acts on hidden state"
    return None
