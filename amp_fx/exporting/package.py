"""``amp_fx.package`` and ``amp_fx.for_onnx``: programs for AOTInductor and for ONNX."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram

from amp_fx.backend.pipeline import run_passes
from amp_fx.backend.rewrite import graph_devices
from amp_fx.errors import CompileTargetError, ExportError, OptionError
from amp_fx.exporting.program import clean, copied_graph, with_graph, written_inputs
from amp_fx.passes.widen_ops import WidenOps
from amp_fx.regions.state import no_autocast
from amp_fx.weights.freeze import batch_norm_folding

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping


def for_onnx(
    exported: ExportedProgram, *, without_kernels: Iterable[torch.dtype] = (torch.bfloat16,)
) -> ExportedProgram:
    """A program whose ops ONNX can name and its runtime can run, for ``torch.onnx.export``.

    ``torch.onnx.export(amp_fx.for_onnx(exported), dynamo=True)``. PyTorch's norms take a low input
    with float32 weights, which ONNX does not; onnxruntime has no kernels for bfloat16 on the CPU.
    Such ops compute in float32, and their results are rounded: the numbers are the same up to the
    order of sums. Weights stay stored low, and the file small.

    Args:
        exported: A program, such as ``amp_fx.export`` gives; it stays as it is.
        without_kernels: The low dtypes that the runtime cannot compute in. Give none where it has
            kernels for bfloat16 (onnxruntime on CUDA).

    Raises:
        CompileTargetError: It is no exported program.
    """
    if not isinstance(exported, ExportedProgram):
        raise CompileTargetError(
            f"amp_fx.for_onnx takes an exported program, not a {type(exported).__name__}: "
            "amp_fx.export(model, args) makes one"
        )
    with no_autocast():
        exported = _functional(exported)
        gm = copied_graph(exported)
        run_passes(gm, [WidenOps(tuple(without_kernels))], check=False)
    clean(gm)
    return with_graph(exported, gm, written_inputs(exported.graph_signature))


def _functional(program: ExportedProgram) -> ExportedProgram:
    """A program without ops that write, all others as they are.

    Relies on ``run_decompositions`` opening only what its table has.
    """
    functional: ExportedProgram = program.run_decompositions({})
    return functional


SUFFIX = ".pt2"


def package(
    exported: ExportedProgram,
    path: str | os.PathLike[str],
    *,
    freezing: bool | None = None,
    fold_batch_norm: bool = False,
    inductor_configs: Mapping[str, Any] | None = None,
) -> Path:
    """Compiles an exported program into a file that runs without amp_fx, and without Python.

    ``torch._inductor.aoti_load_package(path)`` loads it, in C++
    ``torch::inductor::AOTIModelPackageLoader``. It is what
    ``torch._inductor.aoti_compile_and_package`` makes, with weights packed on the CPU: the file is
    for machines with the instructions of this one.

    Args:
        exported: A program, such as ``amp_fx.export`` gives.
        path: Where it goes; the name ends in ``.pt2``. A file that is there is replaced.
        freezing: Whether casts, packed and laid out weights are computed now, once; None: if all
            of the program is on the CPU. On small models it takes a third off the time of a call.
        fold_batch_norm: Whether freezing folds batch norms into convolutions, which changes
            roundings.
        inductor_configs: More settings for inductor, as for ``aoti_compile_and_package``.

    Returns:
        The path of the file.

    Raises:
        CompileTargetError: It is no exported program.
        OptionError: The name does not end in ``.pt2``, or there is no such folder.
        ExportError: AOTInductor cannot compile it; says why.
    """
    if not isinstance(exported, ExportedProgram):
        raise CompileTargetError(
            f"amp_fx.package takes an exported program, not a {type(exported).__name__}: "
            "amp_fx.export(model, args) makes one"
        )
    target = Path(path)
    if target.suffix != SUFFIX or not target.parent.is_dir():
        raise OptionError(
            f"{target}: the name of a package must end in {SUFFIX}, in an existing folder"
        )
    configs = dict(inductor_configs or {})
    if freezing is None:
        freezing = all(device.type == "cpu" for device in graph_devices(exported.graph_module))
    configs.setdefault("freezing", freezing)
    folding = batch_norm_folding(fold_batch_norm) if freezing else contextlib.nullcontext()
    try:
        with torch.no_grad(), no_autocast(), folding:
            torch._inductor.aoti_compile_and_package(
                exported, package_path=str(target), inductor_configs=configs
            )
    except Exception as error:
        lines = str(error).strip().splitlines()
        what = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        raise ExportError(f"AOTInductor cannot compile this program: {what}") from error
    return target
