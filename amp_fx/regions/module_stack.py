"""Maps ops to the modules around them, from a graph's metadata or from the running program."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import traceback
from typing import TYPE_CHECKING, Any

from torch import nn

from amp_fx.regions.module_paths import ModulePaths, Program, original
from amp_fx.regions.names import join_path, module_path, plain_name
from amp_fx.torch_private.modules import code_of_module_calls, module_id
from amp_fx.torch_private.tracing import TracingContext

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import CodeType, FrameType

    import torch
    from torch import fx

    from amp_fx.policies.changes import ModuleEntry, ModuleStack
    from amp_fx.torch_private.dynamo import InstructionTranslator, Source


@dataclasses.dataclass(frozen=True)
class CompileFrame:
    """The modules around the frame that Dynamo compiles (``compile_frame``).

    Attributes:
        stack: The modules, outermost first.
        paths: The modules of the program.
        variables: Modules in variables of the frame, by ``plain_name`` of the variable.
        arguments: Names of the positional arguments of the frame.
        is_outermost: True if this is the frame of the compiled module or function itself, also if
            it resumes after a graph break.
        code: The code of the compiled function; None if a module is compiled.
        sources: Variables of the frame that hold modules inside of roots.
    """

    stack: ModuleStack = ()
    paths: ModulePaths = dataclasses.field(default_factory=ModulePaths, compare=False, repr=False)
    variables: Mapping[str, ModuleEntry] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )
    arguments: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)
    is_outermost: bool = dataclasses.field(default=False, compare=False)
    code: CodeType | None = dataclasses.field(default=None, compare=False)
    sources: tuple[Source, ...] = dataclasses.field(default=(), compare=False, repr=False)

    def modules(self) -> tuple[nn.Module, ...]:
        """Returns the root modules of the program."""
        return tuple(module for _, module in self.paths.roots())

    @property
    def root(self) -> nn.Module | None:
        """Returns the compiled module; None if a function is compiled."""
        return self.modules()[0] if self.paths.is_bound else None


NO_FRAME = CompileFrame()


def module_stack(node: fx.Node, frame: CompileFrame = NO_FRAME) -> ModuleStack:
    """Returns the modules around a node; for a backward node, those of its forward node."""
    captured = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    stack, first = frame.stack, ""
    for key, (name, cls) in captured.items():
        extended = frame.paths.inside(stack, module_id(key))
        if extended is None:
            extended = (*stack, _unknown_entry(plain_name(str(name)), cls, frame, first))
        stack, first = extended, first or plain_name(str(name))
    return stack


def _unknown_entry(name: str, cls: type | str, frame: CompileFrame, first: str) -> ModuleEntry:
    """Returns the entry of a module that no module of the program contains.

    Its path begins at the outermost unknown module around it.
    """
    inside = _inside_variable(name, frame)
    if inside is not None:
        return inside[0], cls, inside[1]
    path = module_path(name.removeprefix(first)) if first else ""
    return path, cls, module_path(name)


def _inside_variable(name: str, frame: CompileFrame) -> tuple[str, str] | None:
    """Returns the path and name of a value inside a module that a variable holds, or None."""
    outer = [v for v in frame.variables if name == v or name.startswith(f"{v}.")]
    if not outer:
        return None
    variable = max(outer, key=len)
    path, _, label = frame.variables[variable]
    rest = name.removeprefix(variable).removeprefix(".")
    return join_path(path, rest), join_path(label, rest)


def variable_path(name: str, frame: CompileFrame) -> str:
    """Returns the path of a variable, such as a parameter, from Dynamo's name of it."""
    found = _inside_variable(plain_name(name), frame)
    if found is None:
        return module_path(name)
    path, name = found
    return frame.paths.shown((path, "", name))


def linear_ends(modules: Iterable[nn.Module]) -> dict[str, torch.Tensor] | None:
    """Returns the weights of the first and last linear layers by path; None without layers."""
    named = [pair for module in modules for pair in module.named_modules()]
    linears = [(join_path(path, "weight"), m) for path, m in named if isinstance(m, nn.Linear)]
    return {path: m.weight for path, m in (linears[0], linears[-1])} if linears else None


def current_stack() -> ModuleStack:
    """Returns the modules that the calling thread is executing in eager code."""
    paths, modules = running_modules()
    return _stack_of(modules, paths)


def _stack_of(modules: Iterable[nn.Module], paths: ModulePaths) -> ModuleStack:
    stack: ModuleStack = ()
    for module in modules:
        stack = paths.inside(stack, id(module)) or stack
    return stack


def running_modules() -> tuple[ModulePaths, list[nn.Module]]:
    """Returns the modules of the program that runs, and those that it is calling, outermost first.

    Reads them from Python's stack, which contains a frame for every module call. Hooks would change
    what Dynamo captures.
    """
    paths, _, modules = _running()
    return paths, modules


def whole_model(frame: CompileFrame) -> tuple[nn.Module, ...]:
    """Returns the root modules of the program, or the model whose call runs the compiled module.

    The two differ if the blocks of a model are compiled one by one, as for FSDP2.
    """
    called = [each for each, _ in traceback.walk_stack(None) if each.f_code is _CALL]
    if frame.root is None or not called:
        return frame.modules()
    outermost = original(called[-1].f_locals["self"])
    return frame.modules() if outermost is frame.root else (outermost,)


def call_with_paths(
    paths: ModulePaths,  # noqa: ARG001 - read from the frame
    program: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls a program so that ``running_modules`` finds its paths on Python's stack."""
    return program(*args, **kwargs)


def _running(*, is_compiling: bool = False) -> tuple[ModulePaths, Program | None, list[nn.Module]]:
    """Returns the paths of the program that runs, the program, and the modules that it is calling.

    The program is that of ``call_with_paths``, because a tool shows the paths of the step that it
    examines. Without one, and while Dynamo compiles, it is the innermost compiled program, to which
    the policy of its graphs belongs.

    Returns:
        The paths; the program, or None if it is unknown; the modules, outermost first.
    """
    modules: list[nn.Module] = []
    given: tuple[ModulePaths, int] | None = None
    compiled: tuple[Program, int] | None = None
    find_call: Callable[[FrameType], tuple[Any, ...] | None] | None = None
    if "torch._dynamo" in sys.modules:
        from amp_fx.torch_private.dynamo import compiled_call

        find_call = compiled_call
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            module = original(frame.f_locals["self"])
            if not modules or modules[-1] is not module:
                modules.append(module)
        elif frame.f_code is call_with_paths.__code__:
            given = frame.f_locals["paths"], len(modules)
        elif compiled is None and find_call is not None and (call := find_call(frame)) is not None:
            compiled = Program(*call), len(modules)
        frame = frame.f_back
    program, num_inside = None, len(modules)
    if given is not None and not (is_compiling and compiled is not None):
        paths, num_inside = given
    elif compiled is not None:
        program, num_inside = compiled
        paths = ModulePaths(program)
    else:
        paths = ModulePaths()
    called = modules[:num_inside][::-1]
    # A variable of the program need not hold the outermost called module.
    if called:
        paths.add(type(called[0]).__name__, called[0])
    return paths, program, called


_CALL = code_of_module_calls()


def compile_frame(gm: fx.GraphModule) -> CompileFrame:
    """Returns the modules around the frame that Dynamo is compiling, given the frame's graph.

    After a graph break, Dynamo compiles methods of inner modules as separate frames. The outer
    modules are still on Python's stack.
    """
    paths, program, modules = _running(is_compiling=True)
    translator = _translator()
    if translator is None:
        return CompileFrame(_stack_of(modules, paths), paths)
    root_frame: Any = translator.output.root_tx
    sources = dict(_module_sources(gm, translator))
    for source, module in sources.items():
        paths.add(module_path(source.name), module)
    if modules:
        sources |= _local_source(root_frame, modules[-1])
    entries = {source: paths.entry(module) for source, module in sources.items()}
    root = paths.roots()[0][1] if paths.is_bound else None
    return CompileFrame(
        stack=_stack_of(modules or ([root] if root is not None else []), paths),
        paths=paths,
        variables={plain_name(s.name): entry for s, entry in entries.items() if entry is not None},
        arguments=_argument_names(modules, program, root_frame.f_locals),
        is_outermost=program is not None and _is_own_frame(root_frame.f_code, program, root),
        code=None if program is None or root is not None else _code_of(program.target),
        sources=tuple(
            source
            for source, entry in entries.items()
            if entry is not None and (entry[0] or paths.has_several_roots)
        ),
    )


def _module_sources(
    gm: fx.GraphModule, translator: InstructionTranslator
) -> Iterator[tuple[Source, nn.Module]]:
    """Yields the variables of the frame from whose modules the graph reads, and these modules."""
    from amp_fx.torch_private.dynamo import source_chain

    known: set[Source] = set()
    for node in gm.graph.find_nodes(op="placeholder"):
        chain = source_chain(getattr(node, "_dynamo_source", None))
        if not known.isdisjoint(chain):
            continue
        for source in chain:
            value = translator.output.resolve_source_value(source)
            if isinstance(value, nn.Module):
                known.add(source)
                yield source, value
                break


def _local_source(frame: Any, module: nn.Module) -> dict[Source, nn.Module]:
    """Returns the variable of a frame that holds a module, or whose items include it."""
    from amp_fx.torch_private.dynamo import local_source

    for name, value in frame.f_locals.items():
        if isinstance(value, nn.Module) and original(value) is module:
            return {local_source(frame.f_code, name): module}
        if isinstance(value, tuple):
            for index, item in enumerate(value):
                if item is module:
                    return {local_source(frame.f_code, name, index): module}
    return {}


def _argument_names(
    modules: list[nn.Module], program: Program | None, variables: Mapping[str, Any]
) -> tuple[str, ...]:
    """Returns the names of positional arguments, which a wrapper receives as ``*args``."""
    target = modules[-1].forward if modules else None if program is None else program.target
    try:
        parameters = inspect.signature(target).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(parameter.name for parameter in parameters if parameter.kind in kinds)
    args = variables.get("args")
    is_method = isinstance(args, tuple) and bool(args) and isinstance(args[0], nn.Module)
    return ("self", *names) if is_method and hasattr(target, "__self__") else names


def _code_of(function: Any) -> CodeType | None:
    return getattr(getattr(function, "__func__", function), "__code__", None)


def _is_own_frame(code: CodeType, program: Program, root: nn.Module | None) -> bool:
    """Returns True if a code is that of the program, or of a function that it wraps."""
    from amp_fx.torch_private.dynamo import is_resumed

    for function in (program.target, None if root is None else root.forward):
        wrapped: Any = function
        while wrapped is not None:
            own = _code_of(wrapped)
            if own is not None and (code is own or is_resumed(code, own)):
                return True
            wrapped = getattr(wrapped, "__wrapped__", None)
    return False


def guard_modules(frame: CompileFrame) -> None:
    """Guards a frame on the identity of the modules in its variables.

    Without the guards, Dynamo would reuse the code for equal modules at other paths. A root needs
    no guard, because paths begin at it. Relies on ``torch._guards.install_guard``, which accepts
    guards while the backend is called.
    """
    if not frame.sources:
        return
    from amp_fx.torch_private.dynamo import GuardBuilder, install_guard

    for source in frame.sources:
        install_guard(source.make_guard(GuardBuilder.ID_MATCH))


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


def _translator() -> InstructionTranslator | None:
    """Returns Dynamo's translator if Dynamo is tracing in this thread, else None.

    Relies on ``InstructionTranslator.current_tx``, and on ``output.current_tx``, whose
    ``nn_module_stack`` becomes that of the nodes.
    """
    if "torch._dynamo" not in sys.modules or TracingContext.try_get() is None:
        return None
    from amp_fx.torch_private.dynamo import current_translator

    return current_translator()
