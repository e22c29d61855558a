"""Maps nodes to the user's program: module path, class, source line, names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from amp_fx.regions.module_stack import NO_FRAME, module_stack, variable_path
from amp_fx.torch_private.ops import OpOverload

if TYPE_CHECKING:
    from torch import fx

    from amp_fx.regions.module_stack import CompileFrame

# Dynamo records the stack as text, in the format of ``traceback``.
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ([^\n]*)\n?\s*([^\n]*)')


class Line(NamedTuple):
    """Line of the user's program."""

    file: str
    number: int
    function: str
    code: str


_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def is_library(file: str) -> bool:
    """Returns True if a source file is one of torch or of amp_fx."""
    return file.startswith(_LIBRARIES)


def lines_of(node: fx.Node) -> list[Line]:
    """Returns the stack of lines that created a node, outermost first."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return [Line(file, int(number), name, code.strip()) for file, number, name, code in frames]


class NodeLocation(NamedTuple):
    """Location of an op in the user's program.

    Attributes:
        module: The path of the innermost module around it; empty in the outermost one.
        module_type: That module's class.
        file: The source file of the line that calls it, or empty.
        line: The line's number, or 0.
        code: The line's text.
        op: The name that a policy has for it; empty where no policy reaches it.
    """

    module: str = ""
    module_type: str = ""
    file: str = ""
    line: int = 0
    code: str = ""
    op: str = ""

    @property
    def source(self) -> str:
        """The line with a short path: ``"model.py:12: y = x @ w"``; empty if it is unknown."""
        return f"{short_path(self.file)}:{self.line}: {self.code}" if self.file else ""


def location_of(node: fx.Node, frame: CompileFrame = NO_FRAME) -> NodeLocation:
    """Returns the innermost module and source line of a node."""
    module, module_type = next(reversed(_modules_around(node, frame).items()), ("", ""))
    file, line, _, code = [Line("", 0, "", ""), *lines_of(node)][-1]
    return NodeLocation(module, module_type, file, line, code)


def _modules_around(node: fx.Node, frame: CompileFrame) -> dict[str, str]:
    """Returns the classes of the called modules around a node by path, outermost first."""
    # The program never calls a ``ModuleList``, so it is no part of the path that a user knows.
    entries = [entry for entry in module_stack(node, frame) if not _is_container(entry[1])]
    return {frame.paths.shown(entry): _class_name(entry[1]) for entry in entries}


def _is_container(kind: type | str) -> bool:
    """Returns True for classes such as ``ModuleList``, which have no ``forward``."""
    return getattr(kind, "forward", None) is nn.Module.forward


def _class_name(kind: Any) -> str:
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    return str(name).rpartition(".")[2]


def module_types(gm: fx.GraphModule, frame: CompileFrame) -> dict[str, str]:
    """Returns the classes of all modules around nodes of a graph by path."""
    types: dict[str, str] = {}
    for node in gm.graph.nodes:
        types |= _modules_around(node, frame)
    return dict(sorted(types.items()))


def input_path(node: fx.Node, frame: CompileFrame = NO_FRAME) -> str:
    """Returns the path of a parameter or buffer (``layers.0.weight``), or an argument's name."""
    source = getattr(node, "_dynamo_source", None)
    path = variable_path(str(node.target) if source is None else source.name, frame)
    return _named_argument(path, frame) or node.name


def _named_argument(path: str, frame: CompileFrame) -> str:
    """Returns the parameter name of an argument of a wrapped function.

    For example, ``"args.0"`` and ``"kwargs.input_ids"`` become ``"input_ids"``.
    """
    first, _, rest = path.partition(".")
    # Dynamo sees the arguments of the wrapper: ``args`` and ``kwargs``.
    name, _, suffix = rest.partition(".")
    if first in frame.arguments or not name:
        return path
    if first == "args" and name.isdigit() and int(name) < len(frame.arguments):
        name = frame.arguments[int(name)]
    elif first != "kwargs" or not frame.arguments:
        return path
    return f"{name}.{suffix}" if suffix else name


def short_path(file: str) -> str:
    """Returns a file relative to the working directory, or its last two path components."""
    path = Path(file)
    # IPython compiles each cell as a temporary file with a number as its name.
    if "ipykernel" in file:
        return "notebook cell"
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return "/".join(path.parts[-2:])


def target_name(node: fx.Node) -> str:
    """Returns the target of a node as it is written in code, such as ``F.linear``."""
    if node.op == "call_method":
        return f".{node.target}"
    if node.op != "call_function":
        return str(node.target)
    target = node.target
    if isinstance(target, OpOverload):
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
