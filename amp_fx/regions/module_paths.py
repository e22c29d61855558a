"""Paths of the modules of a program: each begins at a root, the module that a user would compile.

A compiled module is the root of its program. The roots of a function are the modules in its
variables and arguments that have weights and are not part of one another. Modules are found by
identity. Names of variables do not identify them, because decorators rename arguments.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from amp_fx.regions.names import join_path
from amp_fx.regions.variables import items_of, variables_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from amp_fx.policies.changes import ModuleEntry, ModuleStack


class Program(NamedTuple):
    """A call of a module, a method or a function.

    Attributes:
        target: The module, method or function.
        args: The arguments of the call.
        kwargs: The named arguments of the call.
    """

    target: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}

    def bound_module(self) -> nn.Module | None:
        """Returns the module that is called or to which the method is bound; else None."""
        target = self.target
        while target is not None:
            for module in (target, getattr(target, "__self__", None)):
                if isinstance(module, nn.Module):
                    return original(module)
            target = getattr(target, "__wrapped__", None)
        return None

    def held_modules(self) -> dict[str, nn.Module]:
        """Returns the modules in the variables and arguments of a function, by name.

        Modules that are part of another one are omitted.
        """
        code = getattr(inspect.unwrap(self.target), "__code__", None)
        names = code.co_varnames[: code.co_argcount] if code is not None else ()
        names += tuple(f"args.{index}" for index in range(len(names), len(self.args)))
        given = [*zip(names, self.args, strict=False), *self.kwargs.items()]
        given += [item for name, value in given for item in items_of(name, value)]
        held: dict[int, tuple[str, nn.Module]] = {}
        for name, value in (*variables_of(self.target), *given):
            if isinstance(value, nn.Module):
                held.setdefault(id(original(value)), (name, original(value)))
        parts = {
            id(part) for _, m in held.values() for _, part in named_modules(m) if part is not m
        }
        return {name: module for key, (name, module) in held.items() if key not in parts}


def original(module: nn.Module) -> nn.Module:
    """Returns the module from which ``torch.compile`` made a module, or the module itself."""
    compiled = getattr(module, "_orig_mod", None)
    return compiled if isinstance(compiled, nn.Module) else module


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields all modules of a model with their paths.

    Includes modules in plain lists and dictionaries, unlike ``nn.Module.named_modules``. Compiled
    modules inside have the paths of their originals.
    """
    visited: set[int] = set()
    pending = [("", root)]
    while pending:
        start, outer = pending.pop()
        for name, module in outer.named_modules():
            if id(module) not in visited:
                visited.add(id(module))
                path = _original_path(start, name)
                yield path, module
                pending += _in_containers(path, module)


def _in_containers(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, value in vars(module).items():
        if name != "_modules" and isinstance(value, (list, tuple, dict)):
            for item_name, item in items_of(name, value):
                if isinstance(item, nn.Module):
                    yield join_path(path, item_name), item


class ModulePaths:
    """The modules of a program with their paths. Refers to the modules weakly.

    Attributes:
        is_bound: True if the program is a module or a method of one, which is then the first root.
    """

    def __init__(self, program: Program | None = None) -> None:
        self._roots: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._entries: dict[int, ModuleEntry] = {}
        self._named: dict[str, ModuleEntry] = {}
        root = None if program is None else program.bound_module()
        self.is_bound = root is not None
        if root is not None:
            self.add("", root)
        elif program is not None:
            held = program.held_modules().items()
            for name, module in sorted(held, key=lambda item: not _has_weights(item[1])):
                self.add(name, module)

    def add(self, label: str, module: nn.Module) -> None:
        """Adds a module by the name of a variable, unless it is known.

        A module without weights, such as a loss, is a root only if no root is known.
        """
        if self.entry(module) is not None:
            return
        is_root = not self._roots or _has_weights(module)
        if is_root:
            self._roots.append((label, weakref.ref(module)))
        for path, inner in named_modules(module):
            name = join_path(label, path)
            entry = (path if is_root else name, type(original(inner)), name)
            if self.entry(inner) is None:
                self._entries[id(inner)] = entry
            self._named.setdefault(name, entry)

    @property
    def has_several_roots(self) -> bool:
        """True if printed paths need the label of their root."""
        return len(self._roots) > 1

    def roots(self) -> list[tuple[str, nn.Module]]:
        """Returns the root modules with their labels."""
        return [(label, module) for label, ref in self._roots if (module := ref()) is not None]

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the parameters of the roots with their paths as they are printed."""
        for prefix, root in self._prefixed_roots():
            for name, parameter in root.named_parameters():
                yield _original_path(prefix, name), parameter

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the buffers of the roots with their paths as they are printed."""
        for prefix, root in self._prefixed_roots():
            for name, buffer in root.named_buffers():
                yield _original_path(prefix, name), buffer

    def _prefixed_roots(self) -> Iterator[tuple[str, nn.Module]]:
        for label, root in self.roots():
            yield (label if self.has_several_roots else ""), root

    def root_classes(self) -> tuple[tuple[str, str], ...]:
        """Returns the labels of the roots with the names of their classes."""
        return tuple((label, type(module).__name__) for label, module in self.roots())

    def modules(self) -> Iterable[ModuleEntry]:
        """Returns the entries of all modules."""
        return self._named.values()

    def entry(self, module: nn.Module) -> ModuleEntry | None:
        """Returns the entry of a module; None if the program has no such module."""
        entry = self._entries.get(id(module))
        return entry if entry is not None and entry[1] is type(original(module)) else None

    def shown(self, entry: ModuleEntry) -> str:
        """Returns the path of a module as it is printed: with a label if there are several roots.

        Without roots, as in exported programs, names are printed.
        """
        return entry[0] if len(self._roots) == 1 else entry[2]

    def inside(self, stack: ModuleStack, module_id: int) -> ModuleStack | None:
        """Returns a stack with a module added; None if the module is unknown.

        The modules that contain the module are added, too, although a ``ModuleList`` is never
        called: a pattern that matches one applies to the ops in it.
        """
        entry = self._entries.get(module_id)
        if entry is None:
            return None
        path, _, name = entry
        label = name.removesuffix(path).removesuffix(".")
        parts = path.split(".") if path else []
        names = [join_path(label, *parts[:length]) for length in range(len(parts))]
        outer = [self._named[name] for name in names if name in self._named]
        stack += tuple(each for each in outer if each not in stack)
        return stack if stack and stack[-1] == entry else (*stack, entry)


def _original_path(prefix: str, name: str) -> str:
    """Returns a path without the parts that ``torch.compile`` adds."""
    return join_path(prefix, *(part for part in name.split(".") if part != "_orig_mod"))


def _has_weights(module: nn.Module) -> bool:
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next(tensors, None) is not None
