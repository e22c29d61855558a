"""``python -m amp_fx export``: exports a model in mixed precision for torch, C++ or ONNX."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.commands.explain import load_with_inputs
from amp_fx.errors import ArgumentTypeError, OptionError
from amp_fx.exporting.entry import export, package
from amp_fx.exporting.onnx_file import to_onnx
from amp_fx.exporting.program import weight_bytes

if TYPE_CHECKING:
    import argparse

    from torch.export import ExportedProgram

_ENDINGS = (".pt2", ".onnx")


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns 0."""
    _check_out(args)
    model, inputs = load_with_inputs(args)
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(f"{args.target} is not a module, which torch.export requires")
    model.eval()
    program = export(
        model,
        inputs,
        device_type=args.device_type or ("cuda" if args.runtime == "tensorrt" else None),
        dtype=args.dtype,
        policy=args.policy,
        output_dtype=args.output_dtype,
        dynamic_shapes=_dynamic_shapes(args.dynamic, inputs),
        strict=args.strict,
        weights=args.weights,
        fold_batch_norm=args.fold_batch_norm,
    )
    _write(program, args)
    size = sum(p.numel() * p.itemsize for p in [*model.parameters(), *model.buffers()])
    after, before = (f"{number / 1e6:.3g} MB" for number in (weight_bytes(program), size))
    sys.stdout.write(f"wrote {args.out}: weights {after}, in the model {before}\n")
    return 0


def _check_out(args: argparse.Namespace) -> None:
    if args.out.suffix not in _ENDINGS or not args.out.parent.is_dir():
        endings = " or ".join(_ENDINGS)
        raise OptionError(
            f"{args.out}: the path must end in {endings} and be in an existing folder"
        )
    if args.package and args.out.suffix != ".pt2":
        raise OptionError(f"--package {args.out}: the path of a package must end in .pt2")
    if args.runtime and args.out.suffix != ".onnx":
        raise OptionError(f"--target {args.runtime}: the path {args.out} must end in .onnx")


def _dynamic_shapes(dims: list[int], inputs: tuple[Any, ...]) -> Any:
    """Returns the argument of ``torch.export``, which determines the range of each size."""
    if not dims:
        return None
    num_dims = [value.dim() if isinstance(value, torch.Tensor) else 0 for value in inputs]
    most = max(num_dims, default=0)
    if missing := [dim for dim in dims if not 0 <= dim < most]:
        raise OptionError(f"--dynamic {missing[0]}: inputs have dimensions 0 to {most - 1} at most")
    return tuple(
        {dim: torch.export.Dim.AUTO for dim in dims if dim < num}
        if isinstance(value, torch.Tensor)
        else None
        for value, num in zip(inputs, num_dims, strict=True)
    )


def _write(program: ExportedProgram, args: argparse.Namespace) -> None:
    if args.package:
        package(program, args.out)
    elif args.out.suffix == ".onnx":
        to_onnx(program, args.out, target=args.runtime or "onnxruntime")
    else:
        torch.export.save(program, args.out)
