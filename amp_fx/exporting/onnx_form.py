"""``amp_fx.for_onnx``: an exported program in the form that ONNX and its runtimes take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.export import ExportedProgram

from amp_fx.backend.pipeline import run_passes
from amp_fx.errors import CompileTargetError
from amp_fx.exporting.program import clean, copied_graph, with_graph, written_inputs
from amp_fx.passes.widen_ops import WidenOps
from amp_fx.regions.state import no_autocast

if TYPE_CHECKING:
    from collections.abc import Iterable


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
