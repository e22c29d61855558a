"""Computes products with a weight in float8 if the policy requires it and their shapes allow it.

Before:
    %weight_bfloat16 = aten._to_copy(%weight, dtype=torch.bfloat16)
    %y               = aten.linear(%x_bfloat16, %weight_bfloat16, %bias_bfloat16)
After:
    %weight_float8   = amp_fx.float8_weight(%weight, 'rowwise', True, False)
    %data, %factors  = %weight_float8
    %weight_back     = amp_fx.float8_weight(%weight, 'rowwise', True, True)
    %data_1, %f_1    = %weight_back
    %product         = amp_fx.float8_product(%x_bfloat16, %weight, 'rowwise', %data, ..., True)
    %y               = aten.add(%product, %bias_bfloat16)

Left unchanged, with the reason in ``metadata.FLOAT8_NOTE``: products that ``why_not_float8``
rejects; products without a weight; the first and the last product of the model, if their policy
comes from a preset.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from amp_fx.devices.float8 import warn_of_slowness
from amp_fx.graphs.bodies import bodies_of
from amp_fx.graphs.bodies import operands_of as operands_passed
from amp_fx.graphs.casts import inserted_cast, replace_cast
from amp_fx.graphs.conditions import SITES_KNOWN, VALUES_KNOWN
from amp_fx.graphs.metadata import (
    CAPTURED,
    DECISIONS,
    FLOAT8_NOTE,
    HAS_REWRITTEN_BODIES,
    SITE,
    VALUE,
    provenance,
)
from amp_fx.graphs.values import (
    analysis,
    argument_values,
    detect_fake_mode,
    is_written,
    update_value,
)
from amp_fx.passes.base import PassResult
from amp_fx.policies.calls import bind, qualified_name
from amp_fx.policies.float8 import (
    float8_product,
    float8_weight,
    operands_of,
    transposed_base,
    why_not_float8,
)
from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.float8 import RECIPES, SOURCES

if TYPE_CHECKING:
    from torch import fx

    from amp_fx.graphs.conditions import Condition
    from amp_fx.policies.policy import Policy
    from amp_fx.tables.float8 import Float8, Operands

    Weights = dict[tuple[fx.Node, str, bool, bool, str], tuple[fx.Node, fx.Node]]


@dataclasses.dataclass(frozen=True)
class QuantizeProducts:
    """Replaces products whose policy is float8. A weight is quantized once for all its products.

    Attributes:
        policy: The policy with the float8 settings; a region's own policy takes precedence.
        weights: Names of the placeholders that are weights.
        ends: Names of the weights of the model's first and last product. None takes those of the
            graph.
    """

    name: ClassVar[str] = "quantize_products"
    requires: ClassVar[tuple[Condition, ...]] = (SITES_KNOWN, VALUES_KNOWN)
    ensures: ClassVar[tuple[Condition, ...]] = (SITES_KNOWN, VALUES_KNOWN)
    policy: Policy
    weights: tuple[str, ...]
    ends: tuple[str, ...] | None = None

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``products_in_float8`` and ``products_not_in_float8``, also in bodies."""
        quantizer = _Quantizer(gm, self)
        quantizer.run()
        for node in filter(HAS_REWRITTEN_BODIES.is_on, gm.graph.nodes):
            for body in bodies_of(gm, node):
                quantizer.counts.update(self._for_body(node, body).call(body).counts)
        return PassResult(quantizer.counts)

    def _for_body(self, node: fx.Node, body: fx.GraphModule) -> QuantizeProducts:
        """Returns the pass for a body, with the names of the body's placeholders."""
        pairs = zip(body.graph.find_nodes(op="placeholder"), operands_passed(node), strict=False)
        names = {getattr(operand, "name", ""): inner.name for inner, operand in pairs}
        weights, ends = (
            tuple(names[name] for name in outer_names or () if name in names)
            for outer_names in (self.weights, self.ends)
        )
        return dataclasses.replace(self, weights=weights, ends=ends)


class _Quantizer:
    """Visitor of one graph; a body has its own."""

    def __init__(self, gm: fx.GraphModule, settings: QuantizeProducts) -> None:
        self.gm, self.graph, self.settings = gm, gm.graph, settings
        self.fake_mode = detect_fake_mode(gm.graph)
        self.counts: Counter[str] = Counter()
        placeholders = gm.graph.find_nodes(op="placeholder")
        names = settings.weights
        self.sources = {id(VALUE.get(n)): n for n in placeholders if n.name in names}
        self.quantized: Weights = {}

    def run(self) -> None:
        products = [(node, o) for node in self.graph.nodes if (o := _float8_operands(node))]
        weighted = [(node, o, self._weight_of(node, o)) for node, o in products]
        ends = self.settings.ends
        if ends is None:
            sources = [weight[0] for *_, weight in weighted if weight is not None]
            names = [source.name for source in sources if VALUE.of(source).dim() == 2]
            ends = (names[0], names[-1]) if names else ()
        for node, operands, weight in weighted:
            reason = self._why_not(node, weight, ends)
            if reason:
                FLOAT8_NOTE.put(node, f"not in float8: {reason}")
            else:
                assert weight is not None
                self._quantize(node, operands, *weight)
            self.counts["products_not_in_float8" if reason else "products_in_float8"] += 1

    def _weight_of(self, node: fx.Node, operands: Operands) -> tuple[fx.Node, bool] | None:
        """Returns the placeholder of a product's weight, and True if its rows are outputs."""
        argument = bind(node.target, node.args, dict(node.kwargs))[operands.weight]  # type: ignore[arg-type]
        source = argument.args[0] if inserted_cast(argument) is not None else argument
        value, has_rows = VALUE.of(source), operands.has_rows_of_outputs
        if id(value) in self.sources:
            return self.sources[id(value)], has_rows
        with analysis(self.fake_mode, is_grad_enabled=SITE.of(node).is_grad_enabled):
            base = transposed_base(value)
        return (self.sources[id(base)], not has_rows) if id(base) in self.sources else None

    def _why_not(self, node: fx.Node, weight: Any, ends: tuple[str, ...]) -> str:
        if weight is None:
            return "neither side is a weight of the graph"
        source, has_rows = weight
        if source.name in ends and DECISIONS.of(node)[0].origin == "table":
            which = "first" if source.name == ends[0] else "last"
            return f"it is the {which} product of the model"
        args, kwargs = argument_values(node)
        value = VALUE.of(source)
        state, settings = SITE.of(node).state, self._policy_at(node).float8
        low_dtype = state.low_dtype(value.device.type)
        call = (node.target, args, kwargs)
        return why_not_float8(call, value, low_dtype, settings, has_rows_of_outputs=has_rows)  # type: ignore[arg-type]

    def _policy_at(self, node: fx.Node) -> Policy:
        return SITE.of(node).state.policy or self.settings.policy

    def _quantize(self, node: fx.Node, operands: Operands, weight: fx.Node, has_rows: bool) -> None:
        settings = self._policy_at(node).float8
        recipe = settings.recipe
        bound = bind(node.target, node.args, dict(node.kwargs))  # type: ignore[arg-type]
        x, bias = bound[operands.input], bound.get(operands.bias)
        has_gradient = SITE.of(node).is_grad_enabled
        forward = self._quantized(node, weight, settings, has_rows, is_back=False)
        back: tuple[Any, Any] = (None, None)
        if has_gradient and VALUE.of(x).requires_grad:
            back = self._quantized(node, weight, settings, has_rows, is_back=True)
        differentiable_weight = weight if has_gradient and VALUE.of(weight).requires_grad else None
        args = (x, differentiable_weight, recipe, *forward, *back, has_rows)
        result = self._add(node, float8_product, args)
        note = f"float8, recipe {recipe}: {RECIPES[recipe]}"
        if SOURCES[settings.source] is not None:
            note += f"; the weight is rounded to {settings.source} first"
        FLOAT8_NOTE.put(result, note)
        DECISIONS.put(result, DECISIONS.of(node))
        if bias is not None:
            result = self._add(node, torch.ops.aten.add.Tensor, (result, bias))
        CAPTURED.put(result, CAPTURED.get(node))
        unused = bound[operands.weight]
        name = node.name
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)
        result._rename(name)
        while not unused.users and unused.op != "placeholder":
            source = unused.all_input_nodes[0]
            replace_cast(unused, weight, "the weight is quantized to float8 instead")
            unused = source
        if VALUE.of(result).device.type == "cpu":
            warn_of_slowness()

    def _quantized(
        self, node: fx.Node, weight: fx.Node, settings: Float8, has_rows: bool, *, is_back: bool
    ) -> tuple[fx.Node, fx.Node]:
        key = weight, settings.recipe, has_rows, is_back, settings.source
        if key in self.quantized and not is_written(weight):
            return self.quantized[key]
        pair = self._add(node, float8_weight, key)
        data, factors = (self._add(node, operator.getitem, (pair, i)) for i in (0, 1))
        self.quantized[key] = data, factors
        return data, factors

    def _add(self, node: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
        with self.graph.inserting_before(node):
            new = self.graph.call_function(target, args)
        new.meta = provenance(node)
        update_value(new, self.fake_mode, is_grad_enabled=SITE.of(node).is_grad_enabled)
        return new


def _float8_operands(node: fx.Node) -> Operands | None:
    """Returns the operands of a product whose policy is float8, or None for other nodes."""
    operands = operands_of(node.target)
    if operands is None:
        return None
    name = qualified_name(node.target)  # type: ignore[arg-type]
    decisions = DECISIONS.get(node) or ()
    is_float8 = any(d.op == name and d.policy is CastPolicy.FLOAT8 for d in decisions)
    return operands if is_float8 and not FLOAT8_NOTE.is_on(node) else None
