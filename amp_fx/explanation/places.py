"""Where in the user's program a node stands: module path, class, source line, names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import torch

from amp_fx.fallback import _module_path

if TYPE_CHECKING:
    from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n?\s*([^\n]*)')


class Place(NamedTuple):
    """Where a node stands."""

    module: str
    module_type: str
    file: str
    line: int
    code: str


def place_of(node: fx.Node) -> Place:
    """The innermost module and source line that a node was captured in."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    entries = [entry for entry in stack.values() if str(entry[0])]
    module, module_type = "", ""
    if entries:
        path, kind = entries[-1]
        module = module_path(str(path))
        module_type = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
        module_type = module_type.rpartition(".")[2]
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    file, line, code = frames[-1] if frames else ("", "0", "")
    return Place(module, module_type, file, int(line), code.strip())


def module_path(name: str) -> str:
    """``layers.0`` for Dynamo's ``L['self']._modules['layers']._modules['0']``; else the name."""
    if name in ("L['self']", "L['fn']", "L['mod']", "L__self__"):
        return ""
    return _module_path(name)


_MEMBERS = re.compile(r"\._(?:parameters|buffers)\['([^']*)'\]|\['([^']*)'\]")


def input_path(node: fx.Node) -> str:
    """A parameter's or buffer's path (``layers.0.weight``), or an argument's name."""
    source = getattr(node, "_dynamo_source", None)
    text = source.name if source is not None else str(node.target)
    text = text() if callable(text) else text
    plain = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", text)
    plain = re.sub(r"^L\['(?:self|fn|mod)'\]\.?", "", plain)
    plain = re.sub(r"^L\['([^']*)'\]", r"\1", plain)
    return plain or node.name


def op_name(node: fx.Node) -> str:
    """What a node calls, as a person would write it."""
    if node.op == "call_method":
        return f".{node.target}"
    if node.op != "call_function":
        return str(node.target)
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    name = str(getattr(target, "__name__", target))
    module = str(getattr(target, "__module__", "") or "")
    return f"{_NAMESPACES.get(module, '')}{name}"


_NAMESPACES = {
    "torch.nn.functional": "F.",
    "torch._C._nn": "F.",
    "torch": "torch.",
    "_operator": "operator.",
}
