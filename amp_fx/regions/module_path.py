"""Which module an op runs in: read from a graph's metadata, or from the running program."""

from __future__ import annotations

import dataclasses
import re
import sys
import weakref
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

    from torch import fx
    from torch._dynamo.symbolic_convert import InstructionTranslator

Place: TypeAlias = tuple[tuple[str, "type | str"], ...]
"""The modules around an op, outermost first: each one's path and its class.

Paths begin at the compiled module, or else at the outermost one: its own is ``""``. A class
is a name where a graph was exported and its classes are not at hand.
"""


def path_of(place: Place) -> str:
    """The path of the innermost module; empty in the outermost one, and outside of any."""
    return place[-1][0] if place else ""


@dataclasses.dataclass(frozen=True)
class Around:
    """The modules around the frame that Dynamo compiles (``surroundings``).

    Attributes:
        place: They, outermost first.
        own: What Dynamo calls the last one, the first argument of a method: ``L['self']``;
            empty if the frame is of no method of a module.
        root: The outermost one; None if there is none.
    """

    place: Place = ()
    own: str = ""
    root: nn.Module | None = dataclasses.field(default=None, compare=False, repr=False)


NOWHERE = Around()


def place_of(node: fx.Node, around: Around = NOWHERE) -> Place:
    """Where a node of a captured graph stands.

    Args:
        node: Its ``meta["nn_module_stack"]`` counts.
        around: The modules around the compiled frame.
    """
    return _inside(around, (node.meta.get("nn_module_stack") or {}).values())


def _inside(around: Around, stack: Iterable[tuple[str, Any]]) -> Place:
    entries = [(str(name), cls) for name, cls in stack]
    if not entries:
        return around.place
    own = around.own if around.own and entries[0][0].startswith(around.own) else ""
    root, prefix = (own, path_of(around.place)) if own else (entries[0][0], "")
    place = around.place
    for name, cls in entries:
        path = module_path(name.removeprefix(root))
        path = ".".join(part for part in (prefix, path) if part)
        if not place or place[-1] != (path, cls):
            place += ((path, cls),)
    return place


def module_path(name: str) -> str:
    """``model.layers.0`` for ``L['model']._modules['layers']._modules['0']``, Dynamo's name.

    The ``self`` of a compiled method is left out.
    """
    plain = re.sub(r"\._modules\['([^']*)'\]|\['([^']*)'\]|\[(\d+)\]", r".\1\2\3", name)
    return re.sub(r"^([LG]\.)?((self|fn|mod)(\.|$))?", "", plain).lstrip(".")


def current_place() -> Place:
    """Where the calling thread is, in eager code and while Dynamo captures.

    It is read off Python's stack, which every call of a module leaves its frame on: hooks
    would change what Dynamo captures, and would not be there for a module called directly.
    """
    running = _running_modules(sys._getframe(1))
    translator = _translator()
    if translator is None:
        return _place_of_modules(running)
    stack = translator.output.current_tx.nn_module_stack
    return _inside(_around_frame(running, translator), stack.values())


def surroundings() -> Around:
    """The modules around the frame that Dynamo is compiling, asked while it does.

    After a graph break Dynamo compiles the methods of inner modules by themselves; those
    around them are still on Python's stack.
    """
    running = _running_modules(sys._getframe(1))
    translator = _translator()
    if translator is None:
        return Around(_place_of_modules(running))
    return _around_frame(running, translator)


def _around_frame(running: list[nn.Module], translator: InstructionTranslator) -> Around:
    code = translator.f_code
    first = code.co_varnames[0] if code.co_argcount else ""
    # What Dynamo resumes a method with after a graph break has its live variables in any order.
    name = first if isinstance(translator.f_locals.get(first), nn.Module) else "self"
    own = translator.f_locals.get(name)
    if not isinstance(own, nn.Module):
        return Around(_place_of_modules(running), "", running[0] if running else None)
    positions = [i for i, module in enumerate(running) if module is own]
    modules = running[: positions[-1] + 1] if positions else [*running, own]
    return Around(_place_of_modules(modules), f"L['{name}']", modules[0])


def guard_place(around: Around) -> None:
    """Makes Dynamo compile a method of an inner module anew for each module that has it.

    What it compiles for one of several equal modules it would run for all of them, and each
    has a path of its own. Relies on ``torch._guards.install_guard`` taking effect as long as
    the backend is being called.
    """
    if not around.own or len(around.place) < 2:
        return
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import LocalSource

    source = LocalSource(around.own.removeprefix("L['").removesuffix("']"))
    install_guard(source.make_guard(GuardBuilder.ID_MATCH))


def _translator() -> InstructionTranslator | None:
    """Dynamo's, if it is tracing in this thread.

    Relies on ``InstructionTranslator.current_tx``, on its ``f_locals``, and on
    ``output.current_tx``, whose ``nn_module_stack`` becomes that of the nodes.
    """
    if "torch._dynamo" not in sys.modules or torch._guards.TracingContext.try_get() is None:
        return None
    from torch._dynamo import symbolic_convert

    return getattr(symbolic_convert.tls, "current_tx", None)


def _running_modules(frame: FrameType | None) -> list[nn.Module]:
    """The modules that are being called, outermost first: from a compiled one on, if any is."""
    modules: list[nn.Module] = []
    while frame is not None:
        if frame.f_code is _CALL:
            module = frame.f_locals["self"]
            compiled = getattr(module, "_orig_mod", None)
            if isinstance(compiled, nn.Module):
                modules.append(compiled)
                break
            modules.append(module)
        frame = frame.f_back
    modules.reverse()
    if len(modules) > 1 and modules[1] is modules[0]:
        del modules[0]  # what torch.compile made of a module calls the module itself
    return modules


def _place_of_modules(modules: list[nn.Module]) -> Place:
    place: Place = ()
    for module in modules:
        name = _name_in(modules[0], module)
        place += ((path_of(place) if name is None else name, type(module)),)
    return place


_CALL = nn.Module._call_impl.__code__
_known: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
"""The path of each submodule by ``id``, by outermost module."""


def _name_in(root: nn.Module, module: nn.Module) -> str | None:
    """The path of a module in another one; None if it is not registered there."""
    name = _known.get(root, {}).get(id(module))
    if name is None or not _is_at(root, name, module):
        _known[root] = {id(m): path for path, m in root.named_modules()}
        name = _known[root].get(id(module))
    return name


def _is_at(root: nn.Module, name: str, module: nn.Module) -> bool:
    try:
        return root.get_submodule(name) is module
    except AttributeError:
        return False
