"""``amp_fx.to_onnx`` and ``amp_fx.for_onnx``: programs as typed ONNX files.

ONNX requires one float type for most inputs of an op, and runtimes lack kernels for some types. A
``OnnxRuntime`` describes what a runtime accepts.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.backend.pipeline import run_passes
from amp_fx.errors import OptionError, UnsupportedError, did_you_mean
from amp_fx.exporting.program import (
    REGION,
    check_program,
    clean,
    copied_graph,
    with_graph,
    without_gradients,
    written_inputs,
)
from amp_fx.graphs.bodies import graphs_in
from amp_fx.graphs.metadata import CAST, CUSTOM
from amp_fx.graphs.reasons import describe, origin_and_reason
from amp_fx.passes.decompose_float32_products import DecomposeFloat32Products
from amp_fx.passes.reuse_casts import ReuseCasts
from amp_fx.passes.widen_ops import WidenOps
from amp_fx.progress import working
from amp_fx.regions.state import no_autocast
from amp_fx.torch_private import pytree
from amp_fx.torch_private.onnx import without_folded_batch_norms
from amp_fx.torch_private.ops import OpOverload

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from torch import fx
    from torch.export import ExportedProgram

    from amp_fx.exporting.rewriting import ExportRegion


@dataclasses.dataclass(frozen=True)
class OnnxRuntime:
    """A runtime of ONNX files.

    Attributes:
        opset: The version of ONNX's operators.
        without_kernels: The low dtypes for which the runtime has no kernels. Ops on them compute in
            float32 and round their results.
        accepts_mixed_batch_norms: Whether batch norms of low inputs with float32 statistics run.
        without_bfloat16: Packets of ops that have no bfloat16 in this opset.
    """

    opset: int
    without_kernels: tuple[torch.dtype, ...] = ()
    accepts_mixed_batch_norms: bool = False
    without_bfloat16: tuple[Any, ...] = ()


TARGETS: Mapping[str, OnnxRuntime] = {
    # Without bfloat16 kernels on the CPU.
    "onnxruntime": OnnxRuntime(opset=20, without_kernels=(torch.bfloat16,)),
    # Convolutions take bfloat16 since opset 22. The parser computes scale and shift of a batch norm
    # in float32.
    # TopK has it since opset 24.
    "tensorrt": OnnxRuntime(
        opset=22,
        accepts_mixed_batch_norms=True,
        without_bfloat16=(torch.ops.aten.topk, torch.ops.aten.sort, torch.ops.aten.argsort),
    ),
}


@working("writing an ONNX file")
def to_onnx(
    exported: ExportedProgram, path: str | os.PathLike[str], *, target: str = "onnxruntime"
) -> Path:
    """Writes a program to an ONNX file in which each tensor has the dtype of the program.

    Inputs have the names of the model's arguments. Outputs have the keys of a dictionary or
    dataclass that the model returns, else ``output`` or ``output_0``, ``output_1`` and so on. The
    metadata of each node, ``amp_fx.reason``, has the reason of its dtype, unless the program was
    loaded from a file. Weights of more than 1.5 GB are written to a second file, ``PATH.data``.

    Args:
        exported: A program, such as that of ``amp_fx.export``; it is not changed.
        path: Path of the file, with the suffix ``.onnx``. An existing file is replaced.
        target: The runtime. ``"tensorrt"`` computes bfloat16 in bfloat16 and requires opset 22,
            and batch norms keep float32 statistics. ``"onnxruntime"`` computes bfloat16 in float32.

    Returns:
        The path of the file.

    Raises:
        ArgumentTypeError: ``exported`` is not an exported program.
        OptionError: The target is unknown, the path does not end in ``.onnx``, or its folder does
            not exist.
        UnsupportedError: ONNX cannot express the program, or a package is missing.
    """
    check_program("to_onnx", exported)
    if target not in TARGETS:
        suggestion = did_you_mean(target, TARGETS)
        raise OptionError(
            f"target={target!r} is not one of {', '.join(map(repr, TARGETS))}{suggestion}"
        )
    file = Path(path)
    if file.suffix != SUFFIX or not file.parent.is_dir():
        raise OptionError(
            f"path={str(file)!r}: the path must end in {SUFFIX} and be in an existing folder"
        )
    written = _converted(exported, TARGETS[target])
    region: ExportRegion | None = exported.graph_module.meta.get(REGION)
    if region is not None:
        _add_reasons(written)
        text = f"{describe(region.state)}, policy {region.policy.name!r}"
        written.model.metadata_props["amp_fx.region"] = text
    written.save(file)
    return file


SUFFIX = ".onnx"


def for_onnx(
    exported: ExportedProgram, *, without_kernels: Iterable[torch.dtype] = (torch.bfloat16,)
) -> ExportedProgram:
    """Converts a program for ``torch.onnx.export``; ``amp_fx.to_onnx`` does both.

    Use it as ``torch.onnx.export(amp_fx.for_onnx(exported), dynamo=True)``. PyTorch's norms accept
    low inputs with float32 weights, which ONNX does not support, and onnxruntime has no bfloat16
    kernels on the CPU. Such ops compute in float32 and round their results, so results are equal up
    to the order of sums. Weights remain stored low, so the file does not grow.

    Args:
        exported: A program, such as that of ``amp_fx.export``; it is not changed.
        without_kernels: The low dtypes for which the runtime has no kernels. Pass ``()`` if it has
            bfloat16 kernels (onnxruntime on CUDA); convolutions in bfloat16 then need
            ``opset_version=22``.

    Raises:
        ArgumentTypeError: ``exported`` is not an exported program.
    """
    check_program("for_onnx", exported)
    return _in_form(exported, OnnxRuntime(opset=20, without_kernels=tuple(without_kernels)))


def _in_form(exported: ExportedProgram, target: OnnxRuntime) -> ExportedProgram:
    """Returns a program whose ops a runtime accepts; nodes are annotated with their reasons."""
    gm = copied_graph(exported)
    _annotate(gm, exported.graph_module.meta.get(REGION))
    exported = with_graph(exported, gm, ())
    with no_autocast():
        if not _is_functional(gm):
            exported = exported.run_decompositions({})  # only decomposes ops that write
        gm = copied_graph(exported)
        passes = (
            DecomposeFloat32Products(),
            WidenOps(
                target.without_kernels, target.accepts_mixed_batch_norms, target.without_bfloat16
            ),
            ReuseCasts(target.without_kernels),
        )
        run_passes(gm, passes, check=False)
    for graph in graphs_in(gm):
        for node in graph.nodes:
            if CAST.is_on(node) and _reason_of(node) is None:
                _put_reason(node, f"inserted cast: {CAST.of(node).reason}")
    clean(gm)
    written = written_inputs(exported.graph_signature)
    return without_gradients(with_graph(exported, gm, written))


def _is_functional(gm: fx.GraphModule) -> bool:
    """Returns True if no op of a graph writes to its inputs."""
    targets = [node.target for graph in graphs_in(gm) for node in graph.nodes]
    return not any(isinstance(op, OpOverload) and op._schema.is_mutable for op in targets)


_REASON = "amp_fx.reason"


def _annotate(gm: fx.GraphModule, region: ExportRegion | None) -> None:
    if region is None:
        return
    for graph in graphs_in(gm):
        for node in graph.nodes:
            if node.op == "call_function":
                kind = "cast" if CAST.is_on(node) else "op"
                _, reason = origin_and_reason(node, kind, region.state, "")
                _put_reason(node, reason)


def _reason_of(node: fx.Node) -> str | None:
    return (CUSTOM.get(node) or {}).get(_REASON)


def _put_reason(node: fx.Node, reason: str) -> None:
    """Annotates a node. Unlike other metadata, annotations survive decompositions."""
    CUSTOM.put(node, {**(CUSTOM.get(node) or {}), _REASON: reason})


def _converted(exported: ExportedProgram, target: OnnxRuntime) -> Any:
    """Returns a program of ``torch.onnx``."""
    try:
        with without_folded_batch_norms():
            written = torch.onnx.export(
                _in_form(exported, target),
                dynamo=True,
                verbose=False,
                opset_version=target.opset,
                output_names=_output_names(exported),
            )
    except ImportError as error:
        raise UnsupportedError(
            f"ONNX needs more packages ({error}): pip install onnxscript"
        ) from error
    except torch.onnx.OnnxExporterError as error:
        cause = error.__cause__ or error
        raise UnsupportedError(f"ONNX cannot express this program: {cause}") from error
    assert written is not None
    return written


def _output_names(exported: ExportedProgram) -> list[str]:
    """Returns the names of a program's outputs in the structure that the model returns."""
    spec = exported.call_spec.out_spec
    assert spec is not None
    outputs = pytree.tree_unflatten(range(spec.num_leaves), spec)
    inputs = set(exported.graph_signature.user_inputs)
    names = []
    for path, _ in pytree.tree_flatten_with_path(outputs)[0]:
        name = "_".join(map(_key_name, path))
        if not name or name[0].isdigit():
            name = f"output_{name}".rstrip("_")
        names.append(f"{name}_output" if name in inputs else name)
    written = len(exported.graph_signature.output_specs) - len(names)
    return [*[f"written_{i}" for i in range(written)], *names]


def _key_name(key: Any) -> str:
    """Returns the name of a key in a path of a nested container."""
    if isinstance(key, pytree.MappingKey):
        return str(key.key)
    return key.name if isinstance(key, pytree.GetAttrKey) else str(key.idx)


def _add_reasons(written: Any) -> None:
    """Copies the annotations of nodes to the metadata of the ONNX nodes that they became."""
    reasons = {
        node.name: _reason_of(node)
        for graph in graphs_in(written.exported_program.graph_module)
        for node in graph.nodes
    }
    for node in written.model.graph.all_nodes():
        source = _NAME.match(node.metadata_props.get("pkg.torch.onnx.fx_node", ""))
        reason = reasons.get(source[1]) if source else None
        node.metadata_props[_REASON] = reason or "runs in the dtypes of its inputs"


_NAME = re.compile(r"%(\w+)")
