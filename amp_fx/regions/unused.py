"""Warns of patterns for modules that no module of a compiled program fits."""

from __future__ import annotations

import difflib
import warnings
import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from amp_fx.errors import PolicyWarning
from amp_fx.policies.module_path import join_path
from amp_fx.regions.module_stack import module_stack
from amp_fx.tables.cast_policy import CastPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import fx

    from amp_fx.policies.changes import ModuleOverride
    from amp_fx.policies.module_path import ModuleEntry
    from amp_fx.policies.policy import Policy
    from amp_fx.regions.module_stack import CompileFrame


def warn_unused(policy: Policy, frame: CompileFrame, gm: fx.GraphModule) -> None:
    """Warns of patterns that no module fits, once for each pattern and model or function.

    A function's modules are those that its variables hold and those that its graph has calls of.
    It is asked about where it is compiled whole: another graph may have the rest of them.

    Args:
        policy: The policy.
        frame: The modules around the compiled frame.
        gm: The captured graph.
    """
    program: Any = frame.root if frame.root is not None else frame.function
    reason = getattr(gm, "compile_subgraph_reason", None)
    if program is None or (frame.root is None and getattr(reason, "graph_break", False)):
        return
    done = _checked.setdefault(program, set())
    patterns = [m for m in policy.modules if m.pattern not in done]
    if not patterns:
        return
    done.update(override.pattern for override in patterns)
    modules = _modules_of(frame, gm)
    for override in patterns:
        if not any(_fits(override, module) for module in modules):
            _warn(override, frame, [name for *_, name in modules])
        elif override.policy is CastPolicy.FLOAT8 and _holds_no_matrix(override, frame):
            warnings.warn(
                f"the modules that match {override.text!r} of the policy hold no weight with two "
                "dimensions: no product runs in float8 there",
                PolicyWarning,
                stacklevel=2,
            )


def _holds_no_matrix(override: ModuleOverride, frame: CompileFrame) -> bool:
    if frame.root is None:
        return False
    fitting = (m for p, m in _reachable(frame.root) if override.fits_module(p, type(m)))
    return not any(weight.dim() == 2 for module in fitting for weight in module.parameters())


_checked: weakref.WeakKeyDictionary[Any, set[object]] = weakref.WeakKeyDictionary()
"""Patterns that were looked for, by outermost module or by the code of a function."""


def _modules_of(frame: CompileFrame, gm: fx.GraphModule) -> list[ModuleEntry]:
    roots: Mapping[str, nn.Module] = {"": frame.root} if frame.root is not None else frame.held
    held = [
        (path, type(module), join_path(name, path))
        for name, root in roots.items()
        for path, module in _reachable(root)
    ]
    called = [entry for node in gm.graph.nodes for entry in module_stack(node, frame)]
    return list(dict.fromkeys([*held, *called]))


def _reachable(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model, and those that plain lists and dictionaries of its modules hold."""
    seen: set[int] = set()
    pending = [("", root)]
    while pending:
        start, outer = pending.pop()
        for path, module in outer.named_modules(prefix=start):
            if id(module) not in seen:
                seen.add(id(module))
                yield path, module
                pending += _held_plainly(path, module)


def _held_plainly(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, value in vars(module).items():
        if name == "_modules" or not isinstance(value, (list, tuple, dict)):
            continue
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, nn.Module):
                yield join_path(path, name, str(key)), item


def _fits(override: ModuleOverride, module: ModuleEntry) -> bool:
    return override.fits((module,))


def _warn(override: ModuleOverride, frame: CompileFrame, names: Iterable[str]) -> None:
    names = list(names)
    near = difflib.get_close_matches(override.text, names, n=3)
    some = ", ".join(map(repr, near or names[1:6] or names)) or "none"
    if frame.root is not None:
        where, begin = type(frame.root).__name__, "the compiled module"
    else:
        assert frame.function is not None
        where, begin = frame.function.co_name, "a variable of the function, or the module it holds"
    warnings.warn(
        f"no module of {where} matches {override.text!r} of the policy; paths begin at "
        f"{begin}: {some}",
        PolicyWarning,
        stacklevel=2,
    )
