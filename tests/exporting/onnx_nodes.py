"""Runs ONNX models node by node, and rounds every result to the type that the graph gives it.

onnxruntime omits roundings: it fuses nodes, and computes chains of low nodes in float32. Here each
node runs in a separate session that computes in float32 on exact inputs, as the kernels of PyTorch
do, and its results are rounded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
import torch
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

_LOW: dict[int, torch.dtype] = {
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
}
_DTYPES: dict[int, torch.dtype] = {
    **_LOW,
    TensorProto.FLOAT: torch.float32,
    TensorProto.DOUBLE: torch.float64,
    TensorProto.INT32: torch.int32,
    TensorProto.INT64: torch.int64,
    TensorProto.BOOL: torch.bool,
    TensorProto.UINT8: torch.uint8,
    TensorProto.INT8: torch.int8,
}
_SESSIONS: dict[bytes, Any] = {}


def run(model: onnx.ModelProto, *inputs: Tensor) -> list[Tensor]:
    """Returns the outputs of a model, in the dtypes of the file."""
    return values(model, *inputs)[1]


def values(model: onnx.ModelProto, *inputs: Tensor) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Returns all values of a model by name, and its outputs.

    Strict inference of types fails if the types of an op's inputs do not fit together.
    """
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    types = {
        value.name: value.type.tensor_type.elem_type
        for value in (*inferred.graph.value_info, *inferred.graph.output)
    }
    env = {i.name: _tensor(i) for i in model.graph.initializer}
    names = [i.name for i in model.graph.input if i.name not in env]
    env.update(zip(names, inputs, strict=True))
    for node in model.graph.node:
        results = _call(node, env, types, model.opset_import)
        env.update(zip((o for o in node.output if o), results, strict=True))
    return env, [env[output.name] for output in model.graph.output]


def _tensor(proto: TensorProto) -> Tensor:
    array = numpy_helper.to_array(proto)
    if proto.data_type == TensorProto.BFLOAT16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def _call(
    node: onnx.NodeProto, env: Mapping[str, Tensor], types: Mapping[str, int], opsets: Sequence[Any]
) -> list[Tensor]:
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type == "Cast":
        return [env[node.input[0]].to(_DTYPES[attributes["to"]])]
    if node.op_type == "Constant" and "value" in attributes:
        return [_tensor(attributes["value"])]
    dtypes = [_DTYPES[types[output]] for output in node.output if output]
    return call(node, env, dtypes, opsets)


def call(
    node: onnx.NodeProto, env: Mapping[str, Tensor], dtypes: Sequence[torch.dtype], opsets: Any
) -> list[Tensor]:
    """Computes a node in float32, and rounds its results to dtypes."""
    feeds = {name: _wide(env[name]) for name in dict.fromkeys(node.input) if name}
    session = _session(node, feeds, dtypes, opsets)
    results = session.run(None, {f"i{i}": array for i, array in enumerate(feeds.values())})
    return [torch.from_numpy(r).to(dtype) for r, dtype in zip(results, dtypes, strict=True)]


def _wide(tensor: Tensor) -> np.ndarray:
    return (tensor.float() if tensor.dtype in _LOW.values() else tensor).numpy()


def _session(
    node: onnx.NodeProto,
    feeds: Mapping[str, np.ndarray],
    dtypes: Sequence[torch.dtype],
    opsets: Sequence[Any],
) -> Any:
    numbers = {dtype: number for number, dtype in _DTYPES.items()}
    wide = [numbers[torch.float32 if d in _LOW.values() else d] for d in dtypes]
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    for attribute in copy.attribute:
        if attribute.name == "value" and attribute.t.data_type in _LOW:
            attribute.t.CopyFrom(numpy_helper.from_array(_tensor(attribute.t).float().numpy()))
    del copy.metadata_props[:]
    names = {name: f"i{i}" for i, name in enumerate(feeds)}
    copy.name = "node"
    given = [names.get(name, "") for name in copy.input]
    outputs = [f"o{i}" if name else "" for i, name in enumerate(copy.output)]
    del copy.input[:], copy.output[:]
    copy.input.extend(given)
    copy.output.extend(outputs)
    graph = helper.make_graph(
        [copy],
        "node",
        [
            helper.make_tensor_value_info(
                names[name], helper.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim
            )
            for name, array in feeds.items()
        ],
        [
            helper.make_tensor_value_info(name, number, None)
            for name, number in zip(filter(None, outputs), wide, strict=True)
        ],
    )
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    if model not in _SESSIONS:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        _SESSIONS[model] = onnxruntime.InferenceSession(model, options)
    return _SESSIONS[model]
