"""``python -m amp_fx explain``: explains a model as a table, JSON or a picture."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.drawing.draw import check_path, draw
from amp_fx.dtypes import as_dtype
from amp_fx.errors import OptionError, UnsupportedError, did_you_mean
from amp_fx.explanation.entry import explain

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable


def load_with_inputs(
    args: argparse.Namespace, *, is_meta: bool = False
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Loads the model of a command line, and its inputs."""
    model, inputs = load(args.target, is_meta=is_meta)
    if args.input_shape:
        inputs = tuple(parse_input(text, is_meta=is_meta) for text in args.input_shape)
    if inputs is None:
        raise OptionError(
            f"{args.target} needs inputs: pass their shapes, such as --input-shape 8,64"
        )
    return model, inputs


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns 0."""
    paths = [path for path in (args.html, args.draw) if path is not None]
    for path in paths:
        check_path(path)
    if args.html is not None and not args.html.endswith(".html"):
        raise OptionError(f"--html {args.html}: the path of the page must end in .html")
    model, inputs = load_with_inputs(args, is_meta=args.meta)
    explainer = explain(
        model,
        dtype=args.dtype,
        policy=args.policy,
        device_type=args.device,
        backward=args.backward,
        all=args.all,
    )
    try:
        explanation = explainer(*inputs)
    except UnsupportedError as error:
        if _NEEDS_INTEGERS.search(str(error)) and not any(":" in t for t in args.input_shape):
            raise UnsupportedError(
                f"{error}. Inputs are float32 by default: for token ids write "
                f"--input-shape {args.input_shape[0] if args.input_shape else '2,32'}:int64"
            ) from error
        raise
    sys.stdout.write(f"{explanation.to_json() if args.json else explanation}\n")
    for path in paths:
        draw(explanation, path, depth=args.depth, focus=args.focus, dpi=args.dpi)
        sys.stderr.write(f"wrote {path}\n")
    return 0


def make_optimizer(text: str, model: Callable[..., Any]) -> torch.optim.Optimizer:
    """Creates an optimizer of a model's parameters from ``"AdamW"`` or ``"AdamW:fused"``."""
    name, _, kernels = text.partition(":")
    kind = getattr(torch.optim, name, None)
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        hint = did_you_mean(name, dir(torch.optim))
        raise OptionError(f"--optimizer {text}: torch.optim has no class {name!r}{hint}")
    if kernels not in ("", "fused", "foreach"):
        raise OptionError(f"--optimizer {text}: write fused or foreach after the colon")
    parameters = [p for p in getattr(model, "parameters", tuple)() if p.requires_grad]
    settings: dict[str, Any] = {kernels: True} if kernels else {}
    try:
        return kind(parameters, **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(f"--optimizer {text}: {error}") from error


_NEEDS_INTEGERS = re.compile(r"scalar types?:? Long|IntTensor|LongTensor|indices")
"""Errors of torch for float32 tensors as indices."""


def load(target: str, *, is_meta: bool = False) -> tuple[Callable[..., Any], Any]:
    """Loads the model of a target, and its inputs if the target returns them."""
    value = _import(target)
    if isinstance(value, torch.nn.Module) or not _is_factory(value):
        return value, None
    with torch.device("meta" if is_meta else "cpu"):
        result = _call_factory(value, target)
    if isinstance(result, tuple) and len(result) == 2 and callable(result[0]):
        model, inputs = result
        return model, inputs if isinstance(inputs, tuple) else (inputs,)
    if not callable(result):
        raise UnsupportedError(
            f"{target} was called without arguments, as a factory, and returned a "
            f"{type(result).__name__}: return a model, or a pair of a model and its inputs"
        )
    return result, None


def _call_factory(factory: Callable[[], Any], target: str) -> Any:
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise UnsupportedError(
            f"{target} was called without arguments, as a factory, and raised "
            f"{type(error).__name__}: {' '.join(str(error).split())}; pass --traceback for details"
        ) from error


def _import(target: str) -> Any:
    module_name, colon, name = target.partition(":")
    if not colon or not name or not module_name:
        raise UnsupportedError(f"{target!r} is not of the form package.module:name")
    try:
        value: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        raise UnsupportedError(f"{module_name!r} cannot be imported: {kind}{error}") from error
    for part in name.split("."):
        if not hasattr(value, part):
            hint = did_you_mean(part, dir(value))
            raise UnsupportedError(f"{module_name!r} has no {name!r}{hint}")
        value = getattr(value, part)
    if not callable(value):
        raise UnsupportedError(f"{target} is a {type(value).__name__}, not a model or a function")
    return value


def _is_factory(value: Any) -> bool:
    """Returns True for classes and functions without required arguments."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return isinstance(value, type)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p for p in parameters if p.default is p.empty and p.kind not in variadic]
    if required and isinstance(value, type):
        names = ", ".join(p.name for p in required)
        raise UnsupportedError(
            f"{value.__name__} cannot be created without arguments ({names}): pass a function that "
            "creates it"
        )
    return not required


_SHAPE = re.compile(r"(?P<sizes>\d+(?:[,x]\d+)*|)(?::(?P<dtype>\w+))?")


def parse_input(text: str, *, is_meta: bool = False) -> torch.Tensor:
    """Creates an input of zeros from ``"8,64"`` (float32) or ``"8,64:int64"``."""
    match = _SHAPE.fullmatch(text.replace(" ", "").strip("()[]"))
    if match is None:
        raise OptionError(f"--input-shape {text}: write sizes such as 8,64 or 8,64:int64")
    dtype = as_dtype(match["dtype"] or "float32")
    if dtype is None:
        raise OptionError(f"--input-shape {text}: {match['dtype']!r} is not a dtype of torch")
    sizes = [int(size) for size in re.split("[,x]", match["sizes"]) if size]
    return torch.zeros(sizes, dtype=dtype, device="meta" if is_meta else "cpu")
