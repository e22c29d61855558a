"""Computes ops in float32 and rounds the result if a runtime rejects low-precision inputs.

Also casts the inputs of ops with a wider ``dtype``, which exporters apply to the rounded result.

Before (PyTorch's kernels accept inputs of mixed dtypes; ONNX requires one type):
    %y         = aten.layer_norm(%x, [64], %weight, %bias)          # bfloat16, float32, float32
After:
    %x_float32 = aten._to_copy(%x, dtype=torch.float32)
    %wide      = aten.layer_norm(%x_float32, [64], %weight, %bias)
    %y         = aten._to_copy(%wide, dtype=torch.bfloat16)

Before and after, for a low ``%x``:
    %y         = aten.softmax(%x, -1, torch.float32)
    %x_float32 = aten._to_copy(%x, dtype=torch.float32)
    %y         = aten.softmax(%x_float32, -1, torch.float32)

Exporters could cast mixtures with a float32 result themselves, and not those in lists (``cat``). As
nodes of the graph, the casts have reasons, and ``reuse_casts`` sees them.

Left unchanged: stored tensors and the dtypes of results; casts; symbolic sizes.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx
from torch.fx.node import map_arg

from amp_fx.dtypes import is_low
from amp_fx.graphs.bodies import bodies_of, has_plain_bodies
from amp_fx.graphs.casts import add_cast
from amp_fx.graphs.metadata import VALUE, provenance
from amp_fx.graphs.values import detect_fake_mode, remember_captured, tensors_in, update_value
from amp_fx.passes.base import PassResult
from amp_fx.policies.calls import TO_COPY
from amp_fx.torch_private.ops import OpOverload

if TYPE_CHECKING:
    from amp_fx.torch_private.fake_tensors import FakeTensorMode

REASON = "computed in float32"


@dataclasses.dataclass(frozen=True)
class WidenOps:
    """Inserts casts around ops of functional graphs (a cast does not alias its input).

    PyTorch's kernels accumulate in float32 as well, so that only the order of additions can differ.

    Attributes:
        dtypes: Low dtypes for which the runtime has no kernels: all ops on them are widened. Ops on
            other low dtypes are widened if they mix them with float32.
        accepts_mixed_batch_norms: Whether the runtime has batch norms of low inputs with float32
            statistics, as ONNX has since opset 15.
        without_bfloat16: Packets of ops that the runtime has for float16 and not for bfloat16.
    """

    name: ClassVar[str] = "widen_ops"
    dtypes: tuple[torch.dtype, ...] = ()
    accepts_mixed_batch_norms: bool = False
    without_bfloat16: tuple[Any, ...] = ()

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``ops_widened``, also in bodies of ``cond``."""
        remember_captured(gm.graph)
        counts: Counter[str] = Counter()
        fake_mode = detect_fake_mode(gm.graph)
        for node in list(gm.graph.nodes):
            if has_plain_bodies(node):
                for body in bodies_of(gm, node):
                    counts.update(self.call(body).counts)
            elif self._is_rejected(node):
                _widen(node, fake_mode)
                counts["ops_widened"] += 1
        return PassResult(counts)

    def _is_rejected(self, node: fx.Node) -> bool:
        if not isinstance(node.target, OpOverload) or node.target is TO_COPY:
            return False
        inputs = {t.dtype for source in node.all_input_nodes for t in _floating(source)}
        if not any(map(is_low, inputs)):
            return False
        if not inputs.isdisjoint(self.dtypes) or _has_wider_dtype(node):
            return True
        packet = getattr(node.target, "overloadpacket", None)
        if torch.bfloat16 in inputs and packet in self.without_bfloat16:
            return True
        is_accepted = self.accepts_mixed_batch_norms and node.target in _BATCH_NORMS
        return torch.float32 in inputs and not is_accepted


_aten = torch.ops.aten
_BATCH_NORMS = (_aten._native_batch_norm_legit_no_training.default, _aten.batch_norm.default)
_WITH_DTYPE = (
    _aten.cumprod,
    _aten.cumsum,
    _aten.linalg_vector_norm,
    _aten.log_softmax,
    _aten.mean,
    _aten.nansum,
    _aten.norm,
    _aten.prod,
    _aten.softmax,
    _aten.special_log_softmax,
    _aten.special_softmax,
    _aten.sum,
)
"""Ops that compute in their argument ``dtype``."""


def _has_wider_dtype(node: fx.Node) -> bool:
    """Returns True if a node computes in a wider dtype than that of its input."""
    if getattr(node.target, "overloadpacket", None) not in _WITH_DTYPE:
        return False
    return any(map(is_low, (t.dtype for t in _floating(node.all_input_nodes[0])))) and not any(
        map(is_low, (t.dtype for t in _floating(node)))
    )


def _floating(node: fx.Node) -> list[torch.Tensor]:
    return [t for t in tensors_in(VALUE.get(node)) if t.is_floating_point()]


def _widen(node: fx.Node, fake_mode: FakeTensorMode | None) -> None:
    results = [node] if isinstance(VALUE.get(node), torch.Tensor) else _items(node)
    dtypes = {result: VALUE.of(result).dtype for result in results}
    _widen_inputs(node, fake_mode)
    _evaluate(node, fake_mode)
    for result in results:
        if result is not node:
            _evaluate(result, fake_mode)
        if VALUE.of(result).dtype != dtypes[result]:
            _round(result, dtypes[result], fake_mode)


def _items(node: fx.Node) -> list[fx.Node]:
    """Returns the ``getitem`` nodes that read tensors from a node's tuple."""
    items = [user for user in node.users if user.target is operator.getitem]
    return [item for item in items if isinstance(VALUE.get(item), torch.Tensor)]


def _widen_inputs(node: fx.Node, fake_mode: FakeTensorMode | None) -> None:
    casts: dict[fx.Node, fx.Node] = {}
    for source in node.all_input_nodes:
        value = VALUE.get(source)
        if isinstance(value, torch.Tensor) and is_low(value.dtype):
            casts[source] = _cast_before(node, source, torch.float32, fake_mode)
    node.args = map_arg(node.args, lambda n: casts.get(n, n))
    node.kwargs = map_arg(node.kwargs, lambda n: casts.get(n, n))


def _cast_before(
    node: fx.Node, source: fx.Node, dtype: torch.dtype, fake_mode: FakeTensorMode | None
) -> fx.Node:
    with node.graph.inserting_before(node):
        cast = add_cast(node.graph, source, dtype, REASON)
    cast.meta.update(provenance(node))
    _evaluate(cast, fake_mode)
    return cast


def _round(node: fx.Node, dtype: torch.dtype, fake_mode: FakeTensorMode | None) -> None:
    with node.graph.inserting_after(node):
        cast = add_cast(node.graph, node, dtype, REASON)
    cast.meta.update(provenance(node))
    _evaluate(cast, fake_mode)
    node.replace_all_uses_with(cast, lambda user: user is not cast)


def _evaluate(node: fx.Node, fake_mode: FakeTensorMode | None) -> None:
    update_value(node, fake_mode, is_grad_enabled=False)
