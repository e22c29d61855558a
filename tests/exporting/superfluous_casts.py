"""Finds casts of ONNX models that an op in another dtype would save, with the same numbers."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import onnx

from tests.exporting import onnx_nodes

if TYPE_CHECKING:
    from torch import Tensor


def superfluous_casts(model: onnx.ModelProto, *inputs: Tensor) -> list[str]:
    """Returns descriptions of casts that could be removed.

    Each op with a floating-point result before or after a cast is computed in the other dtype of
    that cast, with rounded weights, where this needs fewer casts. Casts are superfluous if all
    readers of the result then read the same bits. Equal casts of one value are superfluous as well.

    Left out are ops that round inside if they compute in a low dtype: sums, and functions of ONNX's
    specification, such as ``Softmax`` and ``LayerNormalization``.
    """
    nodes = _Nodes(model, *inputs)
    found = [f"{n} casts of {source}" for (source, _), n in nodes.casts().items() if n > 1]
    for node in model.graph.node:
        if node.op_type == "Cast" or _rounds_inside(node) or not nodes.is_float(node.output[0]):
            continue
        for dtype in nodes.other_dtypes(node):
            saved = nodes.num_saved(node, dtype)
            if saved > 0 and nodes.has_same_bits(node, dtype):
                found.append(f"{saved} at {node.op_type} {node.name}")
    return found


def _rounds_inside(node: Any) -> bool:
    schema: Any = onnx.defs.get_schema(node.op_type)
    is_sum = node.op_type.startswith(("Conv", "Gemm", "MatMul", "Reduce")) or "Pool" in node.op_type
    is_function = schema.has_function or schema.has_context_dependent_function
    return len(node.output) != 1 or is_function or (is_sum and "Max" not in node.op_type)


class _Nodes:
    """The nodes of a model and their values."""

    def __init__(self, model: onnx.ModelProto, *inputs: Tensor) -> None:
        self.model = model
        self.env, _ = onnx_nodes.values(model, *inputs)
        self.weights = {weight.name for weight in model.graph.initializer}
        self.outputs = {output.name for output in model.graph.output}
        self.makers = {name: node for node in model.graph.node for name in node.output}
        self.readers: defaultdict[str, list[Any]] = defaultdict(list)
        for node in model.graph.node:
            for name in dict.fromkeys(node.input):
                self.readers[name].append(node)

    def casts(self) -> Counter[Any]:
        """Counts casts by source and dtype."""
        casts = [node for node in self.model.graph.node if node.op_type == "Cast"]
        return Counter((node.input[0], self.env[node.output[0]].dtype) for node in casts)

    def is_float(self, name: str) -> bool:
        """Returns True if a value is floating-point."""
        return name in self.env and self.env[name].is_floating_point()

    def _source(self, name: str) -> str | None:
        """Returns what a value was cast from; None if a cast did not compute it."""
        maker = self.makers.get(name)
        is_cast = maker is not None and maker.op_type == "Cast" and self.is_float(maker.input[0])
        return maker.input[0] if maker is not None and is_cast else None

    def _casts_of(self, name: str, dtype: Any) -> list[str]:
        readers = [r.output[0] for r in self.readers[name] if r.op_type == "Cast"]
        return [output for output in readers if self.env[output].dtype == dtype]

    def other_dtypes(self, node: Any) -> set[Any]:
        """Returns the dtypes of values that are cast before or after a node."""
        sources = filter(None, map(self._source, node.input))
        casts = [r.output[0] for r in self.readers[node.output[0]] if r.op_type == "Cast"]
        dtypes = {self.env[name].dtype for name in (*sources, *casts) if self.is_float(name)}
        return dtypes - {self.env[node.output[0]].dtype}

    def num_saved(self, node: Any, dtype: Any) -> int:
        """Returns how many casts a node in another dtype would save."""
        output, saved = node.output[0], 0
        saved += len(self._casts_of(output, dtype))
        saved -= self._has_plain_readers(output, dtype)
        for name in {name for name in node.input if self.is_float(name)} - self.weights:
            source = self._source(name)
            if source is not None and self.env[source].dtype == dtype:
                saved += self.readers[name] == [node] and name not in self.outputs
            elif not self._casts_of(name, dtype):
                saved -= 1
        return saved

    def _has_plain_readers(self, name: str, dtype: Any) -> bool:
        casts = self._casts_of(name, dtype)
        plain = [reader for reader in self.readers[name] if reader.output[0] not in casts]
        return bool(plain) or name in self.outputs

    def has_same_bits(self, node: Any, dtype: Any) -> bool:
        """Returns True if the readers of a node read the same bits if it computes in a dtype."""
        output, env, given = node.output[0], self.env, {}
        for name in filter(self.is_float, node.input):
            source = self._source(name)
            is_cast = source is not None and env[source].dtype == dtype
            given[name] = env[source] if source is not None and is_cast else env[name].to(dtype)
        [result] = onnx_nodes.call(node, {**env, **given}, [dtype], self.model.opset_import)
        is_same = all(result.equal(env[name]) for name in self._casts_of(output, dtype))
        if self._has_plain_readers(output, dtype):
            is_same &= result.to(env[output].dtype).equal(env[output])
        return is_same
