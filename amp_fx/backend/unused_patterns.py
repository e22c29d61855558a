"""Warns about patterns of a policy that have no effect on a program."""

from __future__ import annotations

import dataclasses
import difflib
import operator
import warnings
import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from amp_fx.errors import PolicyWarning
from amp_fx.graphs.bodies import graphs_in
from amp_fx.graphs.metadata import DECISIONS, OPAQUE
from amp_fx.regions.module_paths import named_modules
from amp_fx.regions.module_stack import ends_at_graph_break, module_stack
from amp_fx.tables.cast_policy import CastPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import fx

    from amp_fx.policies.changes import ModuleEntry, ModuleOverride, ModuleStack
    from amp_fx.policies.policy import Policy
    from amp_fx.regions.module_stack import CompileFrame


@dataclasses.dataclass
class _Uses:
    """The overrides of policies that match ops of one program, and the warnings about others."""

    matched: set[ModuleOverride] = dataclasses.field(default_factory=set)
    messages: set[str] = dataclasses.field(default_factory=set)


_uses: weakref.WeakKeyDictionary[Any, _Uses] = weakref.WeakKeyDictionary()
"""Uses by compiled module, or by the code of a compiled function."""


def warn_unused(policy: Policy, frame: CompileFrame, gm: fx.GraphModule) -> None:
    """Warns about overrides for modules that match no module or no op, once per program.

    Whether an override matches an op is known after the last graph of a program. The same holds for
    the modules of a function, because its graphs may call others than those in its variables.

    Args:
        policy: The policy of the program.
        frame: The modules around the graph.
        gm: The graph with its casts.
    """
    program: Any = frame.code if frame.root is None else frame.root
    if program is None:
        return
    uses = _uses.setdefault(program, _Uses())
    nodes: defaultdict[ModuleStack, list[fx.Node]] = defaultdict(list)
    for node in _op_nodes(gm):
        nodes[module_stack(node, frame)].append(node)
    uses.matched |= {
        override
        for override in policy.modules
        for stack in nodes
        if override.matches(stack) and any(_may_apply(override, node) for node in nodes[stack])
    }
    called = (entry for stack in nodes for entry in stack)
    modules = list(dict.fromkeys([*frame.paths.modules(), *called]))
    is_last = frame.is_outermost and not ends_at_graph_break()
    for override in policy.modules:
        if any(override.matches((module,)) for module in modules):
            message = _without_op(override, frame, uses) if is_last else ""
        elif is_last or frame.root is not None:
            message = _without_module(override, frame, modules)
        else:
            continue
        if message and message not in uses.messages:
            uses.messages.add(message)
            warnings.warn(message, PolicyWarning, stacklevel=2)


def _op_nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    for graph in graphs_in(gm):
        for node in graph.nodes:
            is_call = node.op in ("call_function", "call_method")
            if is_call and node.target is not operator.getitem:
                yield node


def _may_apply(override: ModuleOverride, node: fx.Node) -> bool:
    """Returns False if an override is for another op. The ops in an opaque node are unknown."""
    ops = [decision.op for decision in DECISIONS.get(node) or ()]
    return OPAQUE.is_on(node) or not override.op or any(map(override.applies_to, ops))


def _without_op(override: ModuleOverride, frame: CompileFrame, uses: _Uses) -> str:
    """Returns a warning about an override that matches modules; empty if it has an effect."""
    modules = f"the modules that match {override.text!r} of the policy"
    if override.policy is CastPolicy.FLOAT8 and _has_no_matrix(override, frame):
        return (
            f"{modules} have no weight with two or three dimensions, so the pattern has no effect: "
            "no product runs in float8"
        )
    if override in uses.matched:
        return ""
    op = f"no {override.op!r}" if override.op else "no op"
    return (
        f"{modules} have {op} in the graphs of {_program_name(frame)}, so the pattern has no "
        "effect. amp_fx.explain prints the module of each op"
    )


def _has_no_matrix(override: ModuleOverride, frame: CompileFrame) -> bool:
    modules = [module for root in frame.modules() for _, module in named_modules(root)]
    entries = [(module, frame.paths.entry(module)) for module in modules]
    matching = [m for m, entry in entries if entry is not None and override.matches((entry,))]
    weights = (weight for module in matching for weight in module.parameters())
    return bool(matching) and not any(weight.dim() in (2, 3) for weight in weights)


def _without_module(
    override: ModuleOverride, frame: CompileFrame, modules: Iterable[ModuleEntry]
) -> str:
    names = [name for _, _, name in modules if name]
    similar = difflib.get_close_matches(override.text, names, n=3)
    examples = ", ".join(map(repr, similar or names[:5])) or "none"
    start = "the compiled module"
    if frame.root is None:
        start = "a variable of the function, or its module"
    return (
        f"no module of {_program_name(frame)} matches {override.text!r} of the policy. Paths start "
        f"at {start}, for example: {examples}"
    )


def _program_name(frame: CompileFrame) -> str:
    if frame.root is not None:
        return type(frame.root).__name__
    return frame.code.co_name if frame.code is not None else ""
