"""Inserts the casts that the policy requires, and sets the value of every node.

Before:
    %y = torch.nn.functional.linear(%x, %weight, %bias)
After:
    %x_bfloat16      = aten._to_copy(%x, dtype=torch.bfloat16)
    %weight_bfloat16 = aten._to_copy(%weight, dtype=torch.bfloat16)
    %bias_bfloat16   = aten._to_copy(%bias, dtype=torch.bfloat16)
    %y               = aten.linear(%x_bfloat16, %weight_bfloat16, %bias_bfloat16)

Left unchanged: nodes that need no cast, which keep Dynamo's target; in-place methods; opaque nodes,
which run under native autocast (``wrap_opaque_nodes``). The bodies of checkpoint, wrap and cond are
rewritten as graphs; those of ``torch.compiler.nested_compile_region`` once per way of calling them
(``graphs.shared_bodies``).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx

from amp_fx.dtypes import is_low
from amp_fx.graphs.bodies import (
    argument_graphs,
    bodies_of,
    body_nodes,
    has_plain_bodies,
    has_shared_body,
    operands_of,
)
from amp_fx.graphs.casts import CAPTURED_DTYPE, KERNEL_RESULT, add_cast
from amp_fx.graphs.conditions import SITES_KNOWN, VALUES_KNOWN
from amp_fx.graphs.decompose import (
    Decomposer,
    NotPlainError,
    OpaqueKernelError,
    is_getitem,
    replace_with_decomposition,
    spell_out_tuples,
)
from amp_fx.graphs.loops import (
    body_of,
    body_results,
    cast_result,
    differing_states,
    is_loop,
    restore_bodies,
)
from amp_fx.graphs.metadata import CAPTURED, DECISIONS, HAS_REWRITTEN_BODIES, OPAQUE, SITE, VALUE
from amp_fx.graphs.mixtures import reject_mixture
from amp_fx.graphs.opaque import (
    MixtureRecorder,
    RejectedTransformError,
    evaluate_opaque,
    evaluate_together,
    is_bare_function,
    iterate_steps,
    native_autocast,
)
from amp_fx.graphs.range_guard import clamp_fill_value, reason_for_float32, record_range
from amp_fx.graphs.shared_bodies import (
    SharedBodies,
    call_shared,
    fresh_results,
    inline_shared_bodies,
)
from amp_fx.graphs.values import (
    RejectedMixtureError,
    adopt_captured,
    analysis,
    argument_values,
    call_target,
    detect_fake_mode,
    dtypes_differ,
    remember_captured,
    set_value,
    storage_id,
    tensors_in,
    update_value,
    values_in,
)
from amp_fx.passes.base import PassResult
from amp_fx.passes.mark_regions import MarkRegions
from amp_fx.passes.restore_outputs import RestoreOutputs
from amp_fx.regions.module_stack import NO_FRAME
from amp_fx.torch_private.ops import HigherOrderOperator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amp_fx.graphs.conditions import Condition
    from amp_fx.graphs.records import AutocastSite
    from amp_fx.policies.policy import Policy
    from amp_fx.regions.module_stack import CompileFrame

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class InsertCasts:
    """Inserts casts into a graph whose nodes are annotated with their region (``mark_regions``).

    Attributes:
        policy: The cast policy of each op, per device type.
        frame: The modules around the compiled frame (``module_stack.compile_frame``).
        guards_range: If True, handles numbers that the low dtype cannot hold (``range_guard``).
        flattens: If True, flattens products where eager autocast does.
    """

    name: ClassVar[str] = "insert_casts"
    requires: ClassVar[tuple[Condition, ...]] = (SITES_KNOWN,)
    ensures: ClassVar[tuple[Condition, ...]] = (SITES_KNOWN, VALUES_KNOWN)
    is_needed: ClassVar[bool] = True
    policy: Policy
    frame: CompileFrame = NO_FRAME
    guards_range: bool = True
    flattens: bool = True

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``casts_inserted``, ``nodes_decomposed`` and the other edits of ``_Rewriter``."""
        remember_captured(gm.graph)
        mode = detect_fake_mode(gm.graph)
        decomposer = Decomposer(self.policy, mode, self.frame, flattens=self.flattens)
        shared = SharedBodies(gm, self.policy, self.frame)
        rewriter = _Rewriter(gm, decomposer, shared, guards_range=self.guards_range)
        rewriter.run()
        inline_shared_bodies(gm, called_once=True)
        return PassResult(rewriter.counts)


class _Rewriter:
    """Visitor of one graph; bodies of higher-order ops have their own.

    Nodes are visited in topological order: the dtypes of a node's inputs are only known after the
    inputs were cast.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        decomposer: Decomposer,
        shared: SharedBodies,
        *,
        guards_range: bool,
    ) -> None:
        self.gm = gm
        self.graph = gm.graph
        self.decomposer = decomposer
        self.fake_mode = decomposer.fake_mode
        self.shared = shared
        self.guards_range = guards_range
        self.counts: Counter[str] = Counter()

    def run(self, operands: list[Any] | None = None) -> None:
        """Rewrites the graph, whose placeholders get the values of ``operands``."""
        placeholders = self.graph.find_nodes(op="placeholder")
        values = operands or [_input_value(node) for node in placeholders]
        for node, value in zip(placeholders, values, strict=True):
            set_value(node, value)
        for nodes in iterate_steps(self.graph):
            if len(nodes) > 1:
                self._visit_transform(nodes)
            elif nodes[0].op == "get_attr":
                set_value(nodes[0], self._attribute_value(nodes[0]))
            elif nodes[0].op in ("call_function", "call_method"):
                self._visit(nodes[0])

    def _visit(self, node: fx.Node) -> None:
        if OPAQUE.is_on(node):
            self._visit_opaque(node)
            return
        site = SITE.of(node)
        if not site.state.enabled or not _may_need_casts(node):
            self._keep(node)
            return
        spell_out_tuples(node)
        try:
            decomposed, inputs = self.decomposer.decompose(node, site)
        except NotPlainError as error:
            self._visit_refused(node, error)
            return
        DECISIONS.put(node, decomposed.decisions)
        if decomposed.graph is None:
            self._keep(node)
        else:
            self.counts["casts_inserted"] += replace_with_decomposition(
                node, decomposed, inputs, self._evaluate_decomposed
            )
            self.counts["nodes_decomposed"] += 1

    def _visit_refused(self, node: fx.Node, error: NotPlainError) -> None:
        """Handles a node that cannot be decomposed, because of its input dtypes or its kind."""
        if _inputs_changed(node) and self._restore_rejected(node):
            self._visit(node)
            return
        OPAQUE.put(node, str(error))
        self._visit_opaque(node)
        if isinstance(error, OpaqueKernelError) and error.result_dtype is not None:
            self._cast_result(node, error.result_dtype)

    # Plain nodes.

    def _keep(self, node: fx.Node) -> None:
        """Keeps a node without casts; restores its input dtypes if it rejects the new ones."""
        captured = CAPTURED.get(node)
        args, kwargs = argument_values(node)
        if not tensors_in(args, kwargs):
            set_value(node, call_target(node, args, kwargs) if _is_dataclass(node) else captured)
            return
        if self.guards_range:
            self._guard_range(node)
        is_changed = _inputs_changed(node)
        try:
            self._evaluate(node, checks_mixtures=is_changed)
        except RejectedMixtureError as error:
            self._restore_inputs(node, error.written)
            is_changed = False
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
            value = VALUE.get(node)
            if not dtypes_differ(captured, value):  # a constant argument sets the dtype
                self._restore_inputs(node)
                self._evaluate(node)

    def _restore_rejected(self, node: fx.Node) -> bool:
        """Restores the inputs of a node if it does not accept them; returns True if so."""
        if isinstance(node.target, HigherOrderOperator):
            return False
        try:
            self._evaluate(node, checks_mixtures=True)
        except RejectedMixtureError as error:
            self._restore_inputs(node, error.written)
        except Exception:  # noqa: BLE001 - a fake kernel may raise any exception
            self._restore_inputs(node)
        else:
            return False
        return True

    def _restore_inputs(self, node: fx.Node, written: Sequence[torch.Tensor] = ()) -> None:
        """Casts inputs back to their captured dtypes, for ops that reject mixed dtypes.

        An op must write to its argument, not to a cast of it. If the rewrite lowered a written
        argument, the other inputs are therefore cast to its new dtype instead, as ``copy_`` does.
        """
        storages = set(map(storage_id, written))
        sources = [n for n in node.all_input_nodes if isinstance(VALUE.get(n), torch.Tensor)]
        kept = [n for n in sources if storage_id(VALUE.of(n)) in storages]
        lowered = [n for n in kept if dtypes_differ(CAPTURED.get(n), VALUE.get(n))]
        for source in sources:
            if source not in kept:
                self._restore_input(node, source, next(iter(lowered), None))

    def _restore_input(
        self,
        node: fx.Node,
        source: fx.Node,
        written: fx.Node | None = None,
        *,
        before: fx.Node | None = None,
    ) -> None:
        """Casts an input to its captured dtype, or to that of a written tensor."""
        like: Any = CAPTURED.get(source) if written is None else VALUE.get(written)
        value = VALUE.get(source)
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        if is_float and dtypes_differ(like, value):
            self._cast_input(node, source, like.dtype, CAPTURED_DTYPE, before=before)
            self.counts["inputs_restored"] += 1

    def _cast_input(
        self,
        node: fx.Node,
        source: fx.Node,
        dtype: torch.dtype,
        reason: str,
        *,
        before: fx.Node | None = None,
    ) -> None:
        with self.graph.inserting_before(before or node):
            cast = add_cast(self.graph, source, dtype, reason)
        SITE.put(cast, SITE.of(node))
        self._evaluate(cast)
        node.replace_input_with(source, cast)

    def _guard_range(self, node: fx.Node) -> None:
        """Clamps numbers that a low dtype cannot hold, or runs the op in float32."""
        reason = reason_for_float32(node)
        if reason is None:
            clamp_fill_value(node)
            return
        for source in node.all_input_nodes:
            value = VALUE.get(source)
            if isinstance(value, torch.Tensor) and is_low(value.dtype):
                self._cast_input(node, source, torch.float32, "range guard")
        record_range(node, reason)
        self.counts["ops_kept_in_float32"] += 1

    # Opaque nodes.

    def _visit_opaque(self, node: fx.Node) -> None:
        if has_shared_body(node):
            self._rewrite_shared_body(node)
            OPAQUE.drop(node)
            HAS_REWRITTEN_BODIES.put(node, True)
            return
        if has_plain_bodies(node) and self._rewrite_bodies(node):
            OPAQUE.drop(node)
            HAS_REWRITTEN_BODIES.put(node, True)
            return
        if is_bare_function(node):
            self._restore_inputs(node)
        try:
            self._evaluate_opaque(node)
        except Exception:
            if not _inputs_changed(node):
                raise
            # Bodies may contain captured dtypes, which a loop compares with those of its state.
            self._restore_inputs(node)
            self._evaluate_opaque(node)

    def _visit_transform(self, nodes: list[fx.Node]) -> None:
        """Evaluates a transform.

        Raises:
            RejectedTransformError: The transform would raise under an autocast that the program
                does not ask for.
        """
        site = SITE.of(nodes[0])
        if not site.is_bare:
            evaluate_together(nodes, self.fake_mode)
            return
        if not site.casts_transforms:
            for node in nodes:
                for source in set(node.all_input_nodes).difference(nodes):
                    self._restore_input(node, source, before=nodes[0])
            evaluate_together(nodes, self.fake_mode)
            return
        recorder = MixtureRecorder()
        evaluate_together(nodes, self.fake_mode, recorder)
        reason = recorder.rejection()
        if reason:
            raise RejectedTransformError(reason)

    def _evaluate_opaque(self, node: fx.Node) -> None:
        if SITE.of(node).is_bare:
            for body in argument_graphs(self.gm, node):
                restore_bodies(body)
            if is_loop(node):
                self._restore_states(node)
        evaluate_opaque(node, self.fake_mode)

    def _restore_states(self, node: fx.Node) -> None:
        """Makes the body of a loop return its states in the dtypes in which it gets them."""
        body = body_of(self.gm, node)
        with native_autocast(node, self.fake_mode):
            results = body_results(body, node)
        differing = list(differing_states(node, results))
        wider = [n for _, n in differing if dtypes_differ(CAPTURED.get(n), VALUE.get(n))]
        for state in wider:
            self._restore_input(node, state)
        if wider:
            self._restore_states(node)
            return
        for index, state in differing:
            cast_result(body, index, VALUE.of(state).dtype)
            self.counts["outputs_restored"] += 1

    def _cast_result(self, node: fx.Node, dtype: torch.dtype) -> None:
        """Casts a result to the dtype that the real kernel returns, unlike its fake kernel.

        At run time the result already has this dtype, and the cast does nothing.
        """
        value = VALUE.get(node)
        if not isinstance(value, torch.Tensor) or value.dtype in (dtype, torch.float64):
            return
        with self.graph.inserting_after(node):
            cast = add_cast(self.graph, node, dtype, KERNEL_RESULT)
        self._evaluate(cast)
        node.replace_all_uses_with(cast, lambda user: user is not cast)
        CAPTURED.put(cast, CAPTURED.get(node))

    def _rewrite_bodies(self, node: fx.Node) -> bool:
        """Rewrites the bodies of a higher-order op; returns False if other ops share them."""
        if any(len(body_node.users) > 1 for body_node in body_nodes(node)):
            return False
        values = list(values_in(operands_of(node)))
        site = SITE.of(node)
        if node.target is torch.ops.higher_order.cond:
            site = dataclasses.replace(site, is_branch=True)
        bodies = bodies_of(self.gm, node)
        may_alias = not site.is_branch
        results = [self._rewrite_body(b, values, site, may_alias=may_alias) for b in bodies]
        if any(dtypes_differ(results[0], other) for other in results[1:]):
            results = [_restored_results(body) for body in bodies]
        set_value(node, results[0])
        return True

    def _rewrite_shared_body(self, node: fx.Node) -> None:
        """Calls the rewritten body of an equal call, or else rewrites a copy of the body."""
        site = SITE.of(node)
        body = self.shared.body_of(self.gm, node)
        key = self.shared.key_of(node, body, site)
        shared = self.shared.find(key)
        if shared is None:
            values = list(values_in(operands_of(node)))
            results = self._rewrite_body(body, values, site, may_alias=False)
            if site.is_grad_enabled:
                inline_shared_bodies(body)  # AOTAutograd fails to trace a backward in a backward
            shared = self.shared.add(key, node, body, results)
        else:
            with analysis(self.fake_mode, is_grad_enabled=site.is_grad_enabled):
                results = adopt_captured(CAPTURED.get(node), fresh_results(shared))
        call_shared(self.gm, node, shared)
        set_value(node, results)

    def _rewrite_body(
        self, body: fx.GraphModule, values: list[Any], site: AutocastSite, *, may_alias: bool
    ) -> Any:
        remember_captured(body.graph)
        MarkRegions(site).call(body)
        rewriter = _Rewriter(body, self.decomposer, self.shared, guards_range=self.guards_range)
        rewriter.run(values)
        if not may_alias:
            rewriter.clone_aliases()
        self.counts.update(rewriter.counts)
        return values_in(body.graph.output_node().args[0])

    def clone_aliases(self) -> None:
        """Clones results that share memory with operands or with each other.

        For example, ``x.to(dtype)`` returns ``x`` if ``x`` already has the dtype after the rewrite.
        """
        output = self.graph.output_node()
        placeholders = self.graph.find_nodes(op="placeholder")
        storages = set(map(storage_id, tensors_in([VALUE.get(node) for node in placeholders])))
        for node in output.all_input_nodes:
            for tensor in tensors_in(VALUE.get(node)):
                if storage_id(tensor) in storages:
                    with self.graph.inserting_before(output):
                        clone = self.graph.call_function(torch.ops.aten.clone.default, (node,))
                    SITE.put(clone, SITE.of(output))
                    CAPTURED.put(clone, CAPTURED.get(node))
                    self._evaluate(clone)
                    output.replace_input_with(node, clone)
                storages.add(storage_id(tensor))

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

    def _evaluate(self, node: fx.Node, *, checks_mixtures: bool = False) -> None:
        returns_tuple = isinstance(CAPTURED.get(node), (tuple, list))
        check = functools.partial(reject_mixture, needs_all_results=returns_tuple)
        update_value(
            node,
            self.fake_mode,
            is_grad_enabled=SITE.of(node).is_grad_enabled,
            records_writes=True,
            check=check if checks_mixtures else None,
        )


def _input_value(node: fx.Node) -> Any:
    """Returns the captured value of a placeholder, with fake tensors in lists.

    Under compiled autograd, Dynamo records the list of inputs of a backward with real tensors. The
    nodes that read the list have fake tensors.
    """
    captured = CAPTURED.get(node)
    if not isinstance(captured, list):
        return captured
    reads = {user.args[1]: CAPTURED.get(user) for user in node.users if is_getitem(user)}
    return [reads.get(i, value) for i, value in enumerate(captured)]


def _may_need_casts(node: fx.Node) -> bool:
    """Returns False for in-place methods and for nodes without floating-point inputs.

    Autocast casts neither.
    """
    if node.op == "call_method" and _is_in_place_name(str(node.target)):
        return False
    if is_getitem(node) and isinstance(VALUE.get(node.all_input_nodes[0]), (tuple, list)):
        return False
    args, kwargs = argument_values(node)
    return any(t.is_floating_point() for t in tensors_in(args, kwargs))


def _is_in_place_name(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _is_dataclass(node: fx.Node) -> bool:
    """Returns True if a node constructs a dataclass, for which capture records no value.

    ``torch.fx.proxy.TracerBase.create_arg`` adds such a node for each argument that is a dataclass.
    """
    return isinstance(node.target, type) and dataclasses.is_dataclass(node.target)


def _constructs_subclass(node: fx.Node) -> bool:
    return isinstance(node.target, type) and issubclass(node.target, torch.Tensor)


def _inputs_changed(node: fx.Node) -> bool:
    return any(dtypes_differ(CAPTURED.get(n), VALUE.get(n)) for n in node.all_input_nodes)


def _restored_results(body: fx.GraphModule) -> Any:
    """Casts the results of a branch to their captured dtypes, which all branches share."""
    RestoreOutputs().call(body)
    return values_in(body.graph.output_node().args[0])
