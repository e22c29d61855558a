"""Maps ops to their modules, from a graph's metadata or from the running program."""

from __future__ import annotations

import dataclasses
import difflib
import sys
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_fx.errors import PolicyWarning
from amp_fx.policies.changes import join_path, module_path, name_of, path_of
from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.torch_private.tracing import TracingContext

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import CodeType, FrameType

    from torch import fx

    from amp_fx.policies.changes import ModuleEntry, ModuleOverride, ModuleStack
    from amp_fx.policies.policy import Policy
    from amp_fx.torch_private.dynamo import InstructionTranslator


@dataclasses.dataclass(frozen=True)
class CompileFrame:
    """The modules around the frame that Dynamo compiles (``compile_frame``).

    Attributes:
        stack: The modules, outermost first.
        own: Dynamo's name of the innermost module, such as ``L['self']``; empty if the frame is not
            a method of a module.
        root: The outermost module, or None.
        function: The code of the function that was passed to ``torch.compile``, if it is compiled
            in this frame.
        held: Modules in variables of that function, by name.
    """

    stack: ModuleStack = ()
    own: str = ""
    root: nn.Module | None = dataclasses.field(default=None, compare=False, repr=False)
    function: CodeType | None = dataclasses.field(default=None, compare=False)
    held: Mapping[str, nn.Module] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )

    def modules(self) -> tuple[nn.Module, ...]:
        """Returns the root, or else the modules in variables of the function."""
        held = tuple(self.held.values())
        return held if self.root is None else (self.root, *held)


NO_FRAME = CompileFrame()


def module_stack(node: fx.Node, frame: CompileFrame = NO_FRAME) -> ModuleStack:
    """Returns the modules around a node; for a backward node, those of its forward node."""
    entries = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return _inside(frame, entries.values())


def _inside(frame: CompileFrame, captured: Iterable[tuple[str, Any]]) -> ModuleStack:
    entries = [(str(name), cls) for name, cls in captured]
    if not entries:
        return frame.stack
    is_own = bool(frame.own) and entries[0][0].startswith(frame.own)
    root = frame.own if is_own else entries[0][0]
    stack = frame.stack
    for name, cls in entries:
        path = module_path(name.removeprefix(root))
        shown = join_path(name_of(frame.stack), path) if is_own else module_path(name)
        path = join_path(path_of(frame.stack), path) if is_own else path
        if not stack or stack[-1][:2] != (path, cls):
            stack += ((path, cls, shown),)
    return stack


def variable_path(name: str, frame: CompileFrame) -> str:
    """Returns the path of a variable, such as a parameter, from Dynamo's name of it."""
    if frame.own and name.startswith(frame.own):
        return join_path(name_of(frame.stack), module_path(name.removeprefix(frame.own)))
    return module_path(name)


def linear_ends(modules: Iterable[nn.Module]) -> dict[str, torch.Tensor] | None:
    """Returns the weights of the first and last linear layers by path; None without layers."""
    named = [pair for module in modules for pair in module.named_modules()]
    linears = [(join_path(path, "weight"), m) for path, m in named if isinstance(m, nn.Linear)]
    return {path: m.weight for path, m in (linears[0], linears[-1])} if linears else None


def is_linear_end(weight: torch.Tensor) -> bool:
    """Returns True if a weight belongs to the first or last linear layer of the running model."""
    root = _running_modules(sys._getframe(1)).root
    ends = None if root is None else linear_ends((root,))
    return ends is not None and any(weight is end for end in ends.values())


def current_stack() -> ModuleStack:
    """Returns the modules that the calling thread is executing in eager code.

    Reads them from Python's stack, which contains a frame for every module call. Hooks would change
    what Dynamo captures.
    """
    return _running_modules(sys._getframe(1)).stack()


def compile_frame() -> CompileFrame:
    """Returns the modules around the frame that Dynamo is compiling.

    After a graph break, Dynamo compiles methods of inner modules as separate frames. The outer
    modules are still on Python's stack.
    """
    running = _running_modules(sys._getframe(1))
    translator = _translator()
    if translator is None:
        return CompileFrame(running.stack())
    return _frame_of(running, translator)


def ends_at_graph_break() -> bool:
    """Returns True if the graph that is being compiled ends at a graph break.

    The outputs of such a graph are passed to Python code, which is not rewritten.
    """
    return _reason_of_break() is not None


def ends_at_backward() -> bool:
    """Returns True if the graph that is being compiled ends before a backward call.

    Relies on the name of the called function in the reason of the graph break.
    """
    return any(name in (_reason_of_break() or "") for name in _TAKING_GRADIENTS)


_TAKING_GRADIENTS = ("Tensor.backward()", "function `backward`", "torch.autograd.grad")


def _reason_of_break() -> str | None:
    """Returns the reason of the graph break that ends the current graph; None without a break.

    Relies on ``OutputGraph.compile_subgraph_reason``.
    """
    translator = _translator()
    reason = None if translator is None else translator.output.compile_subgraph_reason
    return reason.reason if reason is not None and reason.graph_break else None


def _frame_of(running: _Running, translator: InstructionTranslator) -> CompileFrame:
    code = translator.f_code
    first = code.co_varnames[0] if code.co_argcount else ""
    # Functions that resume a method after a graph break have the live variables in any order.
    name = first if isinstance(translator.f_locals.get(first), nn.Module) else "self"
    module = translator.f_locals.get(name)
    if not isinstance(module, nn.Module):
        if running.modules or not _is_outermost(code):
            return CompileFrame(running.stack(), "", running.root)
        held = _modules_in(code, translator.f_globals, translator.f_locals)
        return CompileFrame(function=code, held=held)
    positions = [i for i, running_module in enumerate(running.modules) if running_module is module]
    modules = running.modules[: positions[-1] + 1] if positions else [*running.modules, module]
    inside = _Running(modules, running.name)
    return CompileFrame(inside.stack(), f"L['{name}']", inside.root)


def guard_module(frame: CompileFrame) -> None:
    """Guards the compiled method of an inner module on the identity of the module.

    Without the guard, Dynamo would reuse the code for equal modules at other paths. Relies on
    ``torch._guards.install_guard``, which accepts guards while the backend is called.
    """
    if not frame.own or len(frame.stack) < 2:
        return
    from amp_fx.torch_private.dynamo import GuardBuilder, LocalSource, install_guard

    source = LocalSource(frame.own.removeprefix("L['").removesuffix("']"))
    install_guard(source.make_guard(GuardBuilder.ID_MATCH))


def _translator() -> InstructionTranslator | None:
    """Returns Dynamo's translator if Dynamo is tracing in this thread, else None.

    Relies on ``InstructionTranslator.current_tx``, on its ``f_locals``, and on
    ``output.current_tx``, whose ``nn_module_stack`` becomes that of the nodes.
    """
    if "torch._dynamo" not in sys.modules or TracingContext.try_get() is None:
        return None
    from amp_fx.torch_private.dynamo import current_translator

    return current_translator()


@dataclasses.dataclass(frozen=True)
class _Running:
    """The modules that are being called.

    Attributes:
        modules: The modules, outermost first. If a module is compiled, the first one is compiled.
        name: The caller's variable for the first module; empty if that module is compiled.
    """

    modules: list[nn.Module]
    name: str = ""

    @property
    def root(self) -> nn.Module | None:
        """The outermost module, or None."""
        return self.modules[0] if self.modules else None

    def stack(self) -> ModuleStack:
        """Returns the modules as a stack of paths and classes."""
        stack: ModuleStack = ()
        for module in self.modules:
            name = _name_in(self.modules[0], module)
            path = path_of(stack) if name is None else name
            stack += ((path, type(module), join_path(self.name, path)),)
        return stack


def _running_modules(frame: FrameType | None) -> _Running:
    modules: list[nn.Module] = []
    caller: FrameType | None = None
    while frame is not None:
        if frame.f_code is _CALL:
            module = frame.f_locals["self"]
            compiled = getattr(module, "_orig_mod", None)
            if isinstance(compiled, nn.Module):
                modules.append(compiled)
                caller = None
                break
            modules.append(module)
            caller = frame.f_back
        frame = frame.f_back
    modules.reverse()
    if len(modules) > 1 and modules[1] is modules[0]:
        del modules[0]  # the compiled module calls the original module
    return _Running(modules, _variable_in(caller, modules[0]) if caller is not None else "")


def _variable_in(frame: FrameType | None, module: nn.Module) -> str:
    """Returns Dynamo's name of a caller's variable that holds a module; ``""`` if there is none."""
    while frame is not None and frame.f_code is _WRAPPED_CALL:
        frame = frame.f_back
    if frame is None:
        return ""
    names = _variables.setdefault(module, {})
    if frame.f_code not in names:
        names[frame.f_code] = _find_variable(frame, module)
    return names[frame.f_code]


def _find_variable(frame: FrameType, module: nn.Module) -> str:
    for name, held in _modules_in(frame.f_code, frame.f_globals, frame.f_locals).items():
        path = _name_in(held, module)
        if path is not None:
            return module_path(join_path(name, path))
    return ""


def _modules_in(
    code: CodeType, module_globals: Mapping[str, Any], variables: Mapping[str, Any]
) -> dict[str, nn.Module]:
    """Returns the modules in a function's variables and in the globals that it uses."""
    used = {name: module_globals[name] for name in code.co_names if name in module_globals}
    values = {**used, **variables}
    return {name: value for name, value in values.items() if isinstance(value, nn.Module)}


def _is_outermost(code: CodeType) -> bool:
    """Returns True if the code is that of the function that was passed to ``torch.compile``.

    Relies on ``compile_wrapper`` in ``torch._dynamo.eval_frame``, which calls the function as
    ``fn``.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        frame = frame.f_back
    return frame is not None and getattr(frame.f_locals.get("fn"), "__code__", None) is code


_variables: weakref.WeakKeyDictionary[nn.Module, dict[CodeType, str]] = weakref.WeakKeyDictionary()
_CALL = nn.Module._call_impl.__code__
_WRAPPED_CALL = nn.Module._wrapped_call_impl.__code__
_paths: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
"""Paths of submodules by ``id``, by outermost module."""


def _name_in(root: nn.Module, module: nn.Module) -> str | None:
    """Returns the path of a submodule; None if the module is not registered in ``root``."""
    name = _paths.get(root, {}).get(id(module))
    if name is None or not _is_at(root, name, module):
        _paths[root] = {id(m): path for path, m in root.named_modules()}
        name = _paths[root].get(id(module))
    return name


def _is_at(root: nn.Module, name: str, module: nn.Module) -> bool:
    try:
        return root.get_submodule(name) is module
    except AttributeError:
        return False


def warn_unused(policy: Policy, frame: CompileFrame, gm: fx.GraphModule) -> None:
    """Warns about patterns that match no module, once per pattern and model or function.

    The modules of a function are those in its variables and those that its graph calls. Functions
    with graph breaks are not checked, because other graphs may call further modules.
    """
    program: Any = frame.root if frame.root is not None else frame.function
    reason = getattr(gm, "compile_subgraph_reason", None)
    if program is None or (frame.root is None and getattr(reason, "graph_break", False)):
        return
    checked = _checked.setdefault(program, set())
    patterns = [m for m in policy.modules if m.pattern not in checked]
    if not patterns:
        return
    checked.update(override.pattern for override in patterns)
    modules = _modules_of(frame, gm)
    for override in patterns:
        if not any(override.matches((module,)) for module in modules):
            _warn(override, frame, [name for *_, name in modules])
        elif override.policy is CastPolicy.FLOAT8 and _has_no_matrix(override, frame):
            warnings.warn(
                f"the modules that match {override.text!r} of the policy have no weight with two "
                "or three dimensions, so the pattern has no effect: no product runs in float8",
                PolicyWarning,
                stacklevel=2,
            )


def _has_no_matrix(override: ModuleOverride, frame: CompileFrame) -> bool:
    if frame.root is None:
        return False
    matching = (m for p, m in _reachable(frame.root) if override.matches_module(p, type(m)))
    return not any(weight.dim() in (2, 3) for module in matching for weight in module.parameters())


_checked: weakref.WeakKeyDictionary[Any, set[object]] = weakref.WeakKeyDictionary()
"""Patterns that were checked, by outermost module or by the code of a function."""


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
    """Yields all modules of a model, including those in plain lists and dictionaries."""
    visited: set[int] = set()
    pending = [("", root)]
    while pending:
        start, outer = pending.pop()
        for path, module in outer.named_modules(prefix=start):
            if id(module) not in visited:
                visited.add(id(module))
                yield path, module
                pending += _in_containers(path, module)


def _in_containers(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, value in vars(module).items():
        if name == "_modules" or not isinstance(value, (list, tuple, dict)):
            continue
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, nn.Module):
                yield join_path(path, name, str(key)), item


def _warn(override: ModuleOverride, frame: CompileFrame, names: Iterable[str]) -> None:
    names = list(names)
    similar = difflib.get_close_matches(override.text, names, n=3)
    examples = ", ".join(map(repr, similar or names[1:6] or names)) or "none"
    if frame.root is not None:
        program, start = type(frame.root).__name__, "the compiled module"
    else:
        assert frame.function is not None
        program, start = frame.function.co_name, "a variable of the function, or its module"
    warnings.warn(
        f"no module of {program} matches {override.text!r} of the policy. Paths start at "
        f"{start}, for example: {examples}",
        PolicyWarning,
        stacklevel=2,
    )
