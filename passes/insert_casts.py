"""Inserts the casts that the policy demands, op by op, and gives every node its value.

Before:
    %y = torch.nn.functional.linear(%x, %weight, %bias)
After:
    %x_bfloat16      = aten._to_copy(%x, dtype=torch.bfloat16)
    %weight_bfloat16 = aten._to_copy(%weight, dtype=torch.bfloat16)
    %bias_bfloat16   = aten._to_copy(%bias, dtype=torch.bfloat16)
    %y               = aten.linear(%x_bfloat16, %weight_bfloat16, %bias_bfloat16)

Nodes are visited in order, because the dtypes that reach a node are those its inputs have
after their own casts. Left alone on purpose: nodes that need no cast keep Dynamo's target;
in-place methods; islands, which run under native autocast (``wrap_islands``), but for the
bodies of checkpoint, wrap and cond, which are graphs and are rewritten as such.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx

from amp_fx.graphs.bodies import (
    bodies_of,
    body_nodes,
    has_plain_bodies,
    mark_rewritten,
    operands_of,
)
from amp_fx.graphs.casts import CAPTURED_DTYPE, KERNEL_RESULT, add_cast
from amp_fx.graphs.conditions import SITES_KNOWN, VALUES_KNOWN
from amp_fx.graphs.decompose import (
    Decomposer,
    NotPlainError,
    OpaqueKernelError,
    Site,
    inline,
    is_getitem,
    spell_out_tuples,
)
from amp_fx.graphs.islands import evaluate_island, evaluate_together, in_steps, is_bare_function
from amp_fx.graphs.metadata import CAPTURED, DECISIONS, ISLAND, SITE
from amp_fx.graphs.mixtures import MixtureProbe
from amp_fx.graphs.range_guard import clamp_fill_value, reason_for_float32, record_range
from amp_fx.graphs.values import (
    analysis,
    argument_values,
    call_target,
    captured_value,
    detect_fake_mode,
    dtypes_differ,
    evaluate,
    remember_captured,
    set_value,
    tensors_in,
    value_of,
    values_in,
)
from amp_fx.passes.base import PassResult
from amp_fx.passes.mark_regions import MarkRegions
from amp_fx.passes.restore_outputs import RestoreOutputs
from amp_fx.regions.module_stack import NO_FRAME

if TYPE_CHECKING:
    from amp_fx.graphs.conditions import Condition
    from amp_fx.policies.policy import Policy
    from amp_fx.regions.module_stack import CompileFrame
    from amp_fx.torch_private.fake_tensors import FakeTensorMode

log = logging.getLogger(__name__)

_LOW_DTYPES = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class InsertCasts:
    """Rewrites a graph whose nodes know their region (``mark_regions``).

    Attributes:
        policy: Which op is cast how, per device type.
        frame: The modules around the compiled frame (``module_stack.compile_frame``).
        guards_range: Whether numbers that the low dtype cannot hold are looked for
            (``range_guard``).
    """

    name: ClassVar[str] = "insert_casts"
    requires: ClassVar[tuple[Condition, ...]] = (SITES_KNOWN,)
    ensures: ClassVar[tuple[Condition, ...]] = (SITES_KNOWN, VALUES_KNOWN)
    is_needed: ClassVar[bool] = True
    policy: Policy
    frame: CompileFrame = NO_FRAME
    guards_range: bool = True

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Inserts casts, counts them as ``casts_inserted``, and sets every value."""
        remember_captured(gm.graph)
        decomposer = Decomposer(self.policy, detect_fake_mode(gm.graph), self.frame)
        rewriter = _Rewriter(gm, decomposer, guards_range=self.guards_range)
        rewriter.run()
        return PassResult(rewriter.counts)


class _Rewriter:
    """One walk over one graph; bodies of higher-order ops get their own."""

    def __init__(self, gm: fx.GraphModule, decomposer: Decomposer, *, guards_range: bool) -> None:
        self.gm = gm
        self.graph = gm.graph
        self.decomposer = decomposer
        self.guards_range = guards_range
        self.probe = MixtureProbe()
        self.counts: Counter[str] = Counter()

    @property
    def fake_mode(self) -> FakeTensorMode | None:
        return self.decomposer.fake_mode

    def run(self, operands: list[Any] | None = None) -> Any:
        """Rewrites the graph; returns the values of its outputs."""
        placeholders = self.graph.find_nodes(op="placeholder")
        values = operands or [_input_value(node) for node in placeholders]
        for node, value in zip(placeholders, values, strict=True):
            set_value(node, value)
        for nodes in in_steps(self.graph):
            if len(nodes) > 1:
                evaluate_together(nodes, self.fake_mode, self.decomposer.frame)
            elif nodes[0].op == "get_attr":
                set_value(nodes[0], self._attribute_value(nodes[0]))
            elif nodes[0].op in ("call_function", "call_method"):
                self._visit(nodes[0])
        return values_in(self.graph.output_node().args[0])

    def _visit(self, node: fx.Node) -> None:
        if ISLAND.is_on(node):
            self._visit_island(node)
            return
        site = SITE.of(node)
        if not site.state.enabled or not _may_need_casts(node):
            self._keep(node)
            return
        spell_out_tuples(node)
        try:
            decomposed, inputs = self.decomposer.open(node, site)
        except NotPlainError as error:
            self._visit_refused(node, error)
            return
        DECISIONS.put(node, decomposed.decisions)
        if decomposed.graph is None:
            self._keep(node)
        else:
            self.counts["casts_inserted"] += inline(
                node, decomposed, inputs, self._evaluate_decomposed
            )
            self.counts["nodes_opened"] += 1

    def _visit_refused(self, node: fx.Node, error: NotPlainError) -> None:
        """A node that cannot be decomposed: for the dtypes that it gets, or for what it is."""
        if _inputs_changed(node) and not self.probe.takes(node):
            self._restore_inputs(node)
            self._visit(node)
            return
        ISLAND.put(node, str(error))
        self._visit_island(node)
        if isinstance(error, OpaqueKernelError) and error.result_dtype is not None:
            self._cast_result(node, error.result_dtype)

    # Plain nodes.

    def _keep(self, node: fx.Node) -> None:
        """Leaves a node as it is, but sees to it that it can take what it now gets."""
        captured = captured_value(node)
        args, kwargs = argument_values(node)
        if not tensors_in(args, kwargs):
            set_value(node, call_target(node, args, kwargs) if _is_dataclass(node) else captured)
            return
        if self.guards_range:
            self._guard_range(node)
        is_changed = _inputs_changed(node)
        if is_changed and not self.probe.takes(node):
            self._restore_inputs(node)
            is_changed = False
        try:
            self._evaluate(node)
        except Exception as error:
            if is_changed:
                self._restore_inputs(node)
                self._evaluate(node)
            elif captured is not None:
                log.debug("keeping the captured value of %s: %s", node, error)
                set_value(node, captured)
            else:
                raise
        if is_changed and _constructs_subclass(node):
            value = value_of(node)
            if not dtypes_differ(captured, value):  # a constant argument says which dtype it has
                self._restore_inputs(node)
                self._evaluate(node)

    def _restore_inputs(self, node: fx.Node) -> None:
        """Casts inputs back to the dtypes that were captured: some ops take no mixture."""
        for source in node.all_input_nodes:
            captured = captured_value(source)
            if isinstance(captured, torch.Tensor) and dtypes_differ(captured, value_of(source)):
                self._cast_input(node, source, captured.dtype, CAPTURED_DTYPE)
                self.counts["inputs_restored"] += 1

    def _cast_input(self, node: fx.Node, source: fx.Node, dtype: torch.dtype, reason: str) -> None:
        with self.graph.inserting_before(node):
            cast = add_cast(self.graph, source, dtype, reason)
        SITE.put(cast, SITE.of(node))
        self._evaluate(cast)
        node.replace_input_with(source, cast)

    def _guard_range(self, node: fx.Node) -> None:
        """Clamps numbers that a low dtype cannot hold, or keeps the op in float32."""
        reason = reason_for_float32(node)
        if reason is None:
            clamp_fill_value(node)
            return
        for source in node.all_input_nodes:
            value = value_of(source)
            if isinstance(value, torch.Tensor) and value.dtype in _LOW_DTYPES:
                self._cast_input(node, source, torch.float32, "range guard")
        record_range(node, reason)
        self.counts["ops_kept_in_float32"] += 1

    # Islands.

    def _visit_island(self, node: fx.Node) -> None:
        if has_plain_bodies(node) and self._rewrite_bodies(node):
            ISLAND.drop(node)
            mark_rewritten(node)
            return
        if is_bare_function(node):
            self._restore_inputs(node)
        try:
            evaluate_island(node, self.fake_mode, self.decomposer.frame)
        except Exception:
            if not _inputs_changed(node):
                raise
            # Bodies may name dtypes as captured, which loops compare to those of what they carry.
            self._restore_inputs(node)
            evaluate_island(node, self.fake_mode, self.decomposer.frame)

    def _cast_result(self, node: fx.Node, dtype: torch.dtype) -> None:
        """Makes known a dtype that only the real kernel gives; costs nothing where it does."""
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or value.dtype in (dtype, torch.float64):
            return
        with self.graph.inserting_after(node):
            cast = add_cast(self.graph, node, dtype, KERNEL_RESULT)
        self._evaluate(cast)
        node.replace_all_uses_with(cast, lambda user: user is not cast)
        CAPTURED.put(cast, captured_value(node))

    def _rewrite_bodies(self, node: fx.Node) -> bool:
        """Rewrites the graphs that a higher-order op runs; False if others run them too."""
        if any(len(body_node.users) > 1 for body_node in body_nodes(node)):
            return False
        values = list(values_in(operands_of(node)))
        site = SITE.of(node)
        if node.target is torch.ops.higher_order.cond:
            site = dataclasses.replace(site, is_branch=True)
        bodies = bodies_of(self.gm, node)
        results = [self._rewrite_body(body, values, site) for body in bodies]
        if any(dtypes_differ(results[0], other) for other in results[1:]):
            results = [_restored_results(body) for body in bodies]
        set_value(node, results[0])
        return True

    def _rewrite_body(self, body: fx.GraphModule, values: list[Any], site: Site) -> Any:
        remember_captured(body.graph)
        MarkRegions(site).call(body)
        rewriter = _Rewriter(body, self.decomposer, guards_range=self.guards_range)
        result = rewriter.run(values)
        self.counts.update(rewriter.counts)
        return result

    def _attribute_value(self, node: fx.Node) -> Any:
        value: Any = self.gm
        for name in str(node.target).split("."):
            value = getattr(value, name)
        if isinstance(value, torch.Tensor) and self.fake_mode is not None:
            return self.fake_mode.from_tensor(value, static_shapes=True)
        return value

    def _evaluate_decomposed(self, node: fx.Node) -> None:
        if self.guards_range:
            clamp_fill_value(node)
        self._evaluate(node)

    def _evaluate(self, node: fx.Node) -> None:
        is_grad_enabled = SITE.of(node).is_grad_enabled
        with analysis(self.fake_mode, is_grad_enabled=is_grad_enabled, records_writes=True):
            set_value(node, evaluate(node))


def _input_value(node: fx.Node) -> Any:
    """Returns the captured value of a placeholder, with fake tensors inside of lists too.

    Dynamo records the list of inputs of a backward under compiled autograd with real tensors; the
    nodes that read the list have fake ones.
    """
    captured = captured_value(node)
    if not isinstance(captured, list):
        return captured
    reads = {user.args[1]: captured_value(user) for user in node.users if is_getitem(user)}
    return [reads.get(i, value) for i, value in enumerate(captured)]


def _may_need_casts(node: fx.Node) -> bool:
    """False for what autocast never touches: no floating tensor, or an in-place method."""
    if node.op == "call_method" and _is_in_place_name(str(node.target)):
        return False
    if is_getitem(node) and isinstance(value_of(node.all_input_nodes[0]), (tuple, list)):
        return False
    args, kwargs = argument_values(node)
    return any(t.is_floating_point() for t in tensors_in(args, kwargs))


def _is_in_place_name(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _is_dataclass(node: fx.Node) -> bool:
    """Returns True if a node constructs a dataclass, for which capture records no value.

    Relies on ``torch.fx.proxy.TracerBase.create_arg``, which adds such a node for each dataclass
    among a call's arguments.
    """
    return isinstance(node.target, type) and dataclasses.is_dataclass(node.target)


def _constructs_subclass(node: fx.Node) -> bool:
    return isinstance(node.target, type) and issubclass(node.target, torch.Tensor)


def _inputs_changed(node: fx.Node) -> bool:
    return any(dtypes_differ(captured_value(n), value_of(n)) for n in node.all_input_nodes)


def _restored_results(body: fx.GraphModule) -> Any:
    """The results of a branch in the dtypes of capture, in which all branches agree."""
    RestoreOutputs().call(body)
    return values_in(body.graph.output_node().args[0])
