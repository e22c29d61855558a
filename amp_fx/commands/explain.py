"""``python -m amp_fx explain``: what amp_fx does to a model, as a table, JSON or a picture."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.drawing.draw import check_path, draw
from amp_fx.dtypes import as_dtype
from amp_fx.errors import OptionError, UnsupportedError
from amp_fx.explanation.entry import REMOVED, explain

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable


def load_with_inputs(
    args: argparse.Namespace, *, is_meta: bool = False
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The model that a command was given, and its inputs."""
    model, inputs = load(args.target, is_meta=is_meta)
    if args.input_shape:
        inputs = tuple(parse_input(text, is_meta=is_meta) for text in args.input_shape)
    if inputs is None:
        raise OptionError(f"{args.target} takes inputs: give their shapes, like --input-shape 8,64")
    return model, inputs


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns 0."""
    paths = [path for path in (args.html, args.draw) if path is not None]
    for path in paths:
        check_path(path)
    if args.html is not None and not args.html.endswith(".html"):
        raise OptionError(f"--html {args.html}: the name of the page must end in .html")
    model, inputs = load_with_inputs(args, is_meta=args.meta)
    explainer = explain(
        model,
        dtype=args.dtype,
        policy=args.policy,
        device_type=args.device,
        backward=args.backward,
        all=args.all,
        **{name: value for name in REMOVED if (value := getattr(args, name)) is not None},
    )
    try:
        explanation = explainer(*inputs)
    except UnsupportedError as error:
        if _WANTS_INTEGERS.search(str(error)) and not any(":" in t for t in args.input_shape):
            raise UnsupportedError(
                f"{error} Inputs are float32 unless you say otherwise: for ids of tokens write "
                f"--input-shape {args.input_shape[0] if args.input_shape else '2,32'}:int64"
            ) from error
        raise
    sys.stdout.write(f"{explanation.to_json() if args.json else explanation}\n")
    for path in paths:
        draw(explanation, path, level=args.level, focus=args.focus, dpi=args.dpi)
        sys.stderr.write(f"wrote {path}\n")
    return 0


def make_optimizer(text: str, model: Callable[..., Any]) -> torch.optim.Optimizer:
    """An optimizer of a model's parameters: ``"AdamW"``, or ``"AdamW:fused"``."""
    name, _, kernels = text.partition(":")
    classes = {key.lower(): kind for key, kind in vars(torch.optim).items() if _is_optimizer(kind)}
    if name.lower() not in classes:
        near = difflib.get_close_matches(name.lower(), classes, n=3)
        meant = f"; similar names: {', '.join(classes[n].__name__ for n in near)}" if near else ""
        raise OptionError(f"--optimizer {text}: torch.optim has no optimizer of this name{meant}")
    if kernels not in ("", "fused", "foreach"):
        raise OptionError(f"--optimizer {text}: write fused or foreach behind the colon")
    parameters = [p for p in getattr(model, "parameters", tuple)() if p.requires_grad]
    if not parameters:
        raise OptionError(f"--optimizer {text}: the model has no parameters to update")
    try:
        made = classes[name.lower()](parameters, **({kernels: True} if kernels else {}))
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(f"--optimizer {text}: {error}") from error
    assert isinstance(made, torch.optim.Optimizer)
    return made


def _is_optimizer(kind: Any) -> bool:
    is_class = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    return is_class and kind is not torch.optim.Optimizer


_WANTS_INTEGERS = re.compile(r"scalar types?:? Long|IntTensor|LongTensor|indices")
"""What torch says of a float32 tensor where it looks something up."""


def load(target: str, *, is_meta: bool = False) -> tuple[Callable[..., Any], Any]:
    """The model that a target names, and its inputs if the target gives them."""
    found = _named(target)
    if isinstance(found, torch.nn.Module) or not _makes_model(found):
        return found, None
    with torch.device("meta" if is_meta else "cpu"):
        made = _call_factory(found, target)
    if isinstance(made, tuple) and len(made) == 2 and callable(made[0]):
        inputs = made[1]
        return made[0], inputs if isinstance(inputs, tuple) else (inputs,)
    if not callable(made):
        raise UnsupportedError(
            f"{target} was called without arguments, as a factory, and returned a "
            f"{type(made).__name__}: return a model, or a pair of a model and its inputs"
        )
    return made, None


def _call_factory(factory: Callable[[], Any], target: str) -> Any:
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise UnsupportedError(
            f"{target} was called without arguments, as a factory, and raised "
            f"{type(error).__name__}: {' '.join(str(error).split())}; --traceback shows where"
        ) from error


def _named(target: str) -> Any:
    module_name, colon, name = target.partition(":")
    if not colon or not name or not module_name:
        raise UnsupportedError(f"{target!r} is not of the form package.module:name")
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        raise UnsupportedError(f"{module_name!r} cannot be imported: {kind}{error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=3)
            meant = f"; similar names: {', '.join(near)}" if near else ""
            raise UnsupportedError(f"{module_name!r} has no {name!r}{meant}")
        found = getattr(found, part)
    if not callable(found):
        raise UnsupportedError(f"{target} is a {type(found).__name__}, not a model or a function")
    return found


def _makes_model(found: Any) -> bool:
    """Returns True if something is called to make the model: it takes no arguments."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return isinstance(found, type)
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (2, 4)]
    if needed and isinstance(found, type):
        names = ", ".join(p.name for p in needed)
        raise UnsupportedError(
            f"{found.__name__} cannot be made without arguments ({names}): name a function "
            "that makes it"
        )
    return not needed


_SHAPE = re.compile(r"(?P<sizes>\d+(?:[,x]\d+)*|)(?::(?P<dtype>\w+))?")


def parse_input(text: str, *, is_meta: bool = False) -> torch.Tensor:
    """An input of zeros: ``"8,64"`` is float32, ``"8,64:int64"`` names its dtype."""
    match = _SHAPE.fullmatch(text.replace(" ", "").strip("()[]"))
    if match is None:
        raise OptionError(f"--input-shape {text}: write sizes like 8,64 or 8,64:int64")
    dtype = as_dtype(match["dtype"] or "float32")
    if dtype is None:
        raise OptionError(f"--input-shape {text}: {match['dtype']!r} is not a dtype of torch")
    sizes = [int(size) for size in re.split("[,x]", match["sizes"]) if size]
    return torch.zeros(sizes, dtype=dtype, device="meta" if is_meta else "cpu")
