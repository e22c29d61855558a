"""Decomposes nodes of captured graphs into dispatcher-level ops and their casts.

Dynamo's nodes call Python functions (``torch.nn.functional.*``, ``torch.*``, methods), but policies
are defined for ATen ops. Each node is therefore traced before dispatch
(``make_fx(pre_dispatch=True)``), on fake tensors with the dtypes of its rewritten inputs. The
decomposition table applies the policy: an op with a policy is recorded with casts of its inputs, a
composite op without a policy is decomposed, and any other op is recorded unchanged. A node whose
trace contains no casts is not replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.node import map_aggregate, map_arg

from amp_fx.errors import PolicyError, UnsupportedError
from amp_fx.graphs.casts import cast_name, mark_cast
from amp_fx.graphs.decomposed_kernels import (
    DECOMPOSITIONS,
    corrected_version,
    flattened_product,
    is_flattened,
    lstm_version,
)
from amp_fx.graphs.metadata import CAPTURED, CAST, DECISIONS, VALUE, provenance
from amp_fx.graphs.records import OpDecision
from amp_fx.graphs.sizes import hint
from amp_fx.graphs.values import (
    analysis,
    call_target,
    hide_meta_errors,
    is_symbolic,
    set_value,
    tensors_in,
)
from amp_fx.policies.calls import TO_COPY, qualified_name, reaches_autocast, restore_results
from amp_fx.policies.float32_products import can_give_float32, run_with_float32_result
from amp_fx.regions.autocast_kernels import has_autocast_kernel
from amp_fx.regions.module_stack import NO_FRAME, module_stack
from amp_fx.regions.registered_ops import report_mixture
from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.kernels import FLOAT32, LOW, opaque_result
from amp_fx.torch_private.fake_tensors import FakeTensor
from amp_fx.torch_private.ops import DispatchKey, OpOverload, has_kernel_for
from amp_fx.torch_private.patches import without_metadata_guards
from amp_fx.torch_private.tracing import MakefxTracer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amp_fx.graphs.records import AutocastSite
    from amp_fx.policies.changes import ModuleStack
    from amp_fx.policies.decide import Resolver
    from amp_fx.policies.policy import Policy
    from amp_fx.regions.module_stack import CompileFrame
    from amp_fx.regions.state import AutocastState
    from amp_fx.torch_private.fake_tensors import FakeTensorMode


class NotPlainError(Exception):
    """Raised if a node cannot be decomposed. The node then runs under native autocast."""


class OpaqueKernelError(NotPlainError):
    """Raised if a node calls an op whose kernel casts internally (``tables/kernels.py``)."""

    def __init__(self, op: str, low_dtype: torch.dtype, result: str) -> None:
        super().__init__(f"the kernel of {op} calls ops that autocast casts")
        self.result_dtype = {LOW: low_dtype, FLOAT32: torch.float32}.get(result)


@dataclasses.dataclass(frozen=True)
class Decomposition:
    """Decomposition of a node.

    Attributes:
        graph: Dispatcher-level ops with their casts, with one placeholder for each distinct input
            of the node. None if no cast is needed.
        decisions: Decisions on the ops with a policy, in call order.
    """

    graph: fx.Graph | None
    decisions: tuple[OpDecision, ...]


class Decomposer:
    """Decomposes the nodes of one graph; equal calls are traced once.

    With ``flattens``, products are flattened where eager autocast does (``is_flattened``).
    """

    def __init__(
        self,
        policy: Policy,
        fake_mode: FakeTensorMode | None,
        frame: CompileFrame = NO_FRAME,
        *,
        flattens: bool = True,
    ) -> None:
        self.policy = policy
        self.flattens = flattens
        self.fake_mode = fake_mode
        self.frame = frame
        self.num_traced = 0
        self._memo: dict[Any, Decomposition | NotPlainError] = {}

    def decompose(self, node: fx.Node, site: AutocastSite) -> tuple[Decomposition, list[Any]]:
        """Decomposes one call node.

        Returns:
            The decomposition, and the node's distinct input nodes in the order of the placeholders
            of ``Decomposition.graph``.

        Raises:
            NotPlainError: The node cannot be traced.
            UnsupportedError: The node calls an op that autocast bans.
            PolicyError: A rule of the policy failed; the message names the node.
        """
        inputs = node.all_input_nodes
        resolver = (site.state.policy or self.policy).resolver
        stack = module_stack(node, self.frame) if resolver.depends_on_module else ()
        # The site contains the policy of the region, so the key need not contain the resolver.
        key = (call_key(node, inputs), site, resolver.stack_key(stack))
        if key not in self._memo:
            try:
                self._memo[key] = self._trace(node, inputs, site, resolver, stack)
            except PolicyError as error:
                raise PolicyError(f"{error} (node {node.format_node()})") from error
            except NotPlainError as error:
                # Cached as well, because a trace that fails takes as long as one that does not.
                self._memo[key] = error
        result = self._memo[key]
        if isinstance(result, NotPlainError):
            raise result
        return result, inputs

    def _trace(
        self,
        node: fx.Node,
        inputs: list[fx.Node],
        site: AutocastSite,
        resolver: Resolver,
        stack: ModuleStack,
    ) -> Decomposition:
        self.num_traced += 1
        values = [VALUE.get(n) for n in inputs]
        table = _PolicyTable(resolver, site.state, stack, self.flattens)
        try:
            return self._trace_on(values, node, site, table)
        except NotPlainError:
            # C++ kernels of some composite ops (``upsample_*.vec``) accept no symbolic sizes. A
            # trace with hints shows whether they call an op with a policy.
            hinted = [_with_hints(value) for value in values]
            if all(map(operator.is_, values, hinted)):
                raise
            table = _PolicyTable(resolver, site.state, stack, self.flattens)
            decomposed = self._trace_on(hinted, node, site, table)
            # The sizes in this graph are numbers. Only the answer that no cast is needed is true
            # for other sizes.
            if decomposed.graph is not None:
                raise
            return decomposed

    def _trace_on(
        self, values: list[Any], node: fx.Node, site: AutocastSite, table: _PolicyTable
    ) -> Decomposition:
        inputs = node.all_input_nodes

        def call(*values: Any) -> Any:
            env = dict(zip(inputs, values, strict=True))
            args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
            return call_target(node, args, kwargs)

        with (
            analysis(self.fake_mode, is_grad_enabled=site.is_grad_enabled),
            without_metadata_guards(self.fake_mode),
        ):
            graph = trace_pre_dispatch(call, values, table)
        if not table.num_changed:
            return Decomposition(None, tuple(table.decisions))
        # The tensor of such a node is an attribute of the trace's module, which is not copied with
        # the nodes.
        if any(n.op == "get_attr" for n in graph.nodes):
            raise NotPlainError(f"a trace of {node.target} would contain a constant tensor")
        return Decomposition(graph, tuple(table.decisions))


def _with_hints(value: Any) -> Any:
    """Replaces symbolic sizes and strides by their hints.

    Returns other values unchanged, including tensor subclasses.
    """
    is_plain = isinstance(value, FakeTensor) and value.layout is torch.strided
    if not is_plain or not is_symbolic(value):
        return hint(value)
    sizes, strides = list(map(hint, value.size())), list(map(hint, value.stride()))
    with value.fake_mode:
        hinted = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
    return hinted.requires_grad_(value.requires_grad)


class _PolicyTable:
    """Lazy decomposition table that applies a policy.

    An op with a policy is recorded with its casts. A composite op without a policy is decomposed,
    but its decomposition is discarded if it contains no casts.
    """

    def __init__(
        self, resolver: Resolver, state: AutocastState, stack: ModuleStack, flattens: bool
    ) -> None:
        self.tracer: MakefxTracer | None = None
        self.decisions: list[OpDecision] = []
        self.num_changed = 0
        self._resolver = resolver
        self._state = state
        self._stack = stack
        self._flattens = flattens and state.cache_enabled
        self._is_settled = False
        self._is_replacing = False

    # No ``__len__``: the tracer would replace an empty table.

    # Every overload: whether it has a policy depends on its arguments, which ``in`` does not get.
    def __contains__(self, op: object) -> bool:
        return isinstance(op, OpOverload)

    def __getitem__(self, op: OpOverload) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._call(op, args, kwargs)

    def _call(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The tracer calls the table for every op, also for those that the table itself calls. The
        # op after its casts is recorded as it is (``_is_settled``), and so are all ops of a
        # replacement (``_is_replacing``). Without these flags, the table would cast for them again,
        # without end.
        if self._is_settled or self._is_replacing:
            self._is_settled = False
            return NotImplemented
        has_policy = False
        is_float8 = False  # float8 products are decomposed even if they need no cast
        restored_dtype = None
        call = (op, args, kwargs)
        # As in the dispatcher, where each enabled device type has an autocast key: each casts the
        # tensors on its own devices.
        for device_type in self._state.enabled:
            if not reaches_autocast(args, kwargs, device_type):
                continue
            decision = self._resolver.decide(call, device_type, self._stack)
            low_dtype = self._state.low_dtype(device_type)
            if decision is None:
                _reject_opaque_kernel(op, device_type, low_dtype)
                report_mixture(call, device_type)
                continue
            has_policy = True
            name, policy, origin = qualified_name(op), decision.policy, decision.origin
            is_float8 |= policy is CastPolicy.FLOAT8
            self.decisions.append(OpDecision(name, device_type, policy, origin))
            is_wide = policy is CastPolicy.LOWER_PRECISION_WIDE
            if is_wide and can_give_float32(call, device_type):
                self.num_changed += 1
                with self._record_unchanged():
                    return run_with_float32_result(call, low_dtype)
            call, restored = decision.apply(call, device_type, low_dtype)
            restored_dtype = restored_dtype or restored
        # ``apply`` returns the objects that it got if it changes nothing.
        if call[1] is not args or call[0] is not op or is_float8:
            self.num_changed += 1
            if self._flattens and is_flattened(args, call):
                with self._record_unchanged():
                    result = flattened_product(call)
            else:
                # The casts need no flag: ``_to_copy`` has no policy, and no composite kernel.
                self._is_settled = True
                result = call[0](*call[1], **call[2])
            return restore_results(result, restored_dtype)
        # Eager autocast is off inside an op with a policy, so the ops inside are not decomposed.
        return NotImplemented if has_policy else self._decompose(op, args, kwargs)

    @contextlib.contextmanager
    def _record_unchanged(self) -> Iterator[None]:
        """Context in which ops have no policy and are recorded as they are."""
        self._is_replacing = True
        try:
            yield
        finally:
            self._is_replacing = False

    def _decompose(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        corrected = corrected_version(op, args)
        if corrected is not None:
            self.num_changed += 1
            with self._record_unchanged():
                return corrected(*args, **kwargs)
        num_changed = self.num_changed
        function = self._function_of(op, args)
        if function is None:
            return NotImplemented
        # The ops inside reach this table one by one. If none of them is cast, the trace keeps the
        # composite op, for which AOTAutograd and inductor have their own decompositions.
        with _roll_back_unless(self.tracer, lambda: self.num_changed > num_changed):
            result = function(*args, **kwargs)
        return result if self.num_changed > num_changed else NotImplemented

    def _function_of(self, op: OpOverload, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Returns a function that calls the ops inside an op; None if the op is not decomposed."""
        if op in DECOMPOSITIONS and not any(tensor.is_nested for tensor in tensors_in(args)):
            return DECOMPOSITIONS[op]
        if op is torch.ops.aten.lstm.input:
            low_dtype = self._state.low_dtype("cpu") if "cpu" in self._state.enabled else None
            if version := lstm_version(args, low_dtype):
                self.num_changed += 1  # also without casts, AOTAutograd cannot take the kernel
                return version
        # A write to a cast would be lost.
        if op._schema.is_mutable:
            return None
        # The C++ kernel, not ``OpOverload.decompose``: that prefers Python decompositions, which
        # eager code never runs, and which may call other ops (``upsample_*.vec``).
        key = DispatchKey.CompositeImplicitAutograd
        is_composite = has_kernel_for(qualified_name(op), key.name)
        return functools.partial(op._op_dk, key) if is_composite else None


def _reject_opaque_kernel(op: OpOverload, device_type: str, low_dtype: torch.dtype) -> None:
    """Raises if an op has an autocast kernel of a library, or a kernel that casts internally."""
    if op.namespace != "aten" and has_autocast_kernel(op, device_type):
        raise NotPlainError(f"{qualified_name(op)} has an autocast kernel of its library")
    result = opaque_result(qualified_name(op), device_type)
    if result is not None:
        raise OpaqueKernelError(qualified_name(op), low_dtype, result)


@contextlib.contextmanager
def _roll_back_unless(
    tracer: MakefxTracer | None, is_changed: Callable[[], bool]
) -> Iterator[None]:
    """Context whose traced nodes are removed at the end unless ``is_changed`` returns True."""
    assert tracer is not None
    assert tracer.fx_tracer is not None
    fx_tracer = tracer.fx_tracer
    before = set(fx_tracer.graph.nodes)
    # Symbols and expressions that occurred first inside would refer to erased nodes.
    symnodes = dict(fx_tracer.symnode_tracker.sym_node_dict)
    expressions = dict(fx_tracer.sympy_expr_tracker)
    # A call that returns its input, such as ``to``, replaces the proxy of the input.
    tensors = list(fx_tracer.tensor_tracker.items())
    yield
    if is_changed():
        return
    for node in reversed(list(fx_tracer.graph.nodes)):
        if node not in before:
            fx_tracer.graph.erase_node(node)
    for tensor, proxy in tensors:
        fx_tracer.tensor_tracker[tensor] = proxy
    fx_tracer.symnode_tracker.sym_node_dict = symnodes
    fx_tracer.sympy_expr_tracker = expressions


def call_key(node: fx.Node, inputs: list[fx.Node]) -> Any:
    """Returns a key of a call's target, constants and input metadata, equal for equal traces."""
    index = {n: i for i, n in enumerate(inputs)}
    metadata = tuple(value_key(VALUE.get(n)) for n in inputs)
    # Two nodes may have the same tensor as value (``x.float()`` is ``x`` if ``x`` is float32). The
    # trace then has one input for both, so it must not be reused for two different tensors.
    values = [id(VALUE.get(n)) for n in inputs]
    identity = tuple(map(values.index, values))
    constants = repr(map_aggregate((node.args, node.kwargs), lambda a: _leaf_key(a, index)))
    return node.op, node.target, constants, metadata, identity


_PLAIN_CONSTANTS = (bool, int, float, complex, str, torch.dtype, torch.device)


def _leaf_key(leaf: Any, index: dict[fx.Node, int]) -> Any:
    if isinstance(leaf, fx.Node):
        return f"%{index[leaf]}"
    if leaf is None or isinstance(leaf, _PLAIN_CONSTANTS):
        return leaf
    # Other constants, such as functions, may print alike. The node refers to them, so that their
    # ids stay unique.
    return f"{type(leaf).__qualname__}:{leaf!r}:{id(leaf)}"


def value_key(value: Any) -> Any:
    """Returns a key of the metadata of a tensor, or of a number, equal for equal metadata.

    Raises:
        NotPlainError: The value is a tuple.
    """
    if isinstance(value, torch.Tensor):
        size = tuple(map(str, value.size()))
        stride = tuple(map(str, value.stride())) if value.layout is torch.strided else None
        # Lazy conjugates and negatives are traced into other ops than the tensors that they view.
        flags = value.requires_grad, value.is_conj(), value.is_neg()
        return type(value), size, stride, value.dtype, value.device, value.layout, flags
    if isinstance(value, (tuple, list)):
        raise NotPlainError("an input is a tuple of tensors")
    return type(value), str(value)


def trace_pre_dispatch(fn: Callable[..., Any], values: list[Any], table: _PolicyTable) -> fx.Graph:
    """Traces a call into the ops that reach the autocast keys of the dispatcher.

    Relies on ``MakefxTracer``, the implementation of ``make_fx``. ``make_fx`` itself would copy the
    lazy decomposition table into a dict.

    Raises:
        NotPlainError: The call cannot be traced.
    """
    tracer = MakefxTracer(
        decomposition_table=None,
        # The inputs are fake already, in the mode of the graph.
        tracing_mode="real",
        _allow_non_fake_inputs=True,
        pre_dispatch=True,
        record_module_stack=False,
        _allow_fake_constant=False,
        _error_on_data_dependent_ops=True,
        _disable_torch_fn_metadata_mode=True,
    )
    tracer.decomposition_table = table  # type: ignore[assignment]
    table.tracer = tracer
    try:
        with hide_meta_errors():
            return tracer.trace(fn, *values).graph
    except (NotPlainError, UnsupportedError, PolicyError):
        raise
    except Exception as error:
        raise NotPlainError(f"{type(error).__name__}: {error}") from error


def replace_with_decomposition(
    node: fx.Node,
    decomposed: Decomposition,
    inputs: list[fx.Node],
    evaluate_node: Callable[[fx.Node], None],
) -> int:
    """Replaces a node by its decomposition.

    Returns:
        The number of casts among the new nodes.

    Raises:
        NotPlainError: A user of the node reads its tuple of results other than by item.
    """
    assert decomposed.graph is not None
    placeholders = decomposed.graph.find_nodes(op="placeholder")
    env: dict[fx.Node, fx.Node] = dict(zip(placeholders, inputs, strict=True))
    num_casts = 0
    for op in decomposed.graph.nodes:
        if op.op not in ("placeholder", "output"):
            with node.graph.inserting_before(node):
                new = env[op] = node.graph.node_copy(op, env.__getitem__)
            new.meta = provenance(node)
            if new.target is TO_COPY:
                mark_cast(new, str(node.target))
                new._rename(cast_name(new.all_input_nodes[0], CAST.of(new).dtype))
            # By name, because a trace does not tell which of several calls a node stands for.
            decisions = [d for d in decomposed.decisions if d.node_op == _op_name(op)]
            DECISIONS.put(new, tuple(decisions))
            num_casts += CAST.is_on(new)
            evaluate_node(new)
    result = map_arg(decomposed.graph.output_node().args[0], env.__getitem__)
    _replace(node, result, decomposed, fresh=set(env.values()) - set(inputs))
    return num_casts


def _op_name(op: fx.Node) -> str | None:
    return qualified_name(op.target) if isinstance(op.target, OpOverload) else None


def _replace(node: fx.Node, result: Any, decomposed: Decomposition, fresh: set[fx.Node]) -> None:
    """Replaces a node by ``result``, which is a node or a tuple of nodes."""
    name = node.name
    if isinstance(result, fx.Node):
        if result in fresh:
            _inherit(result, CAPTURED.get(node), decomposed)
        node.replace_all_uses_with(result)
        node.graph.erase_node(node)
        if result in fresh:
            result.name = name  # unused since the erasure, but ``_rename`` would add a number
        return
    captured: Any = CAPTURED.get(node)
    # A tuple of nodes is no node. Its readers are replaced by the items that they read.
    for user in list(node.users):
        if not is_getitem(user):
            raise NotPlainError(f"{user} reads the whole tuple that {node} returns")
        item = result[user.args[1]]
        if item in fresh:
            _inherit(item, captured[user.args[1]], decomposed)
        user.replace_all_uses_with(item)
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _inherit(result: fx.Node, captured: Any, decomposed: Decomposition) -> None:
    """Records the captured value, and the decisions on ops that the graph no longer contains."""
    assert decomposed.graph is not None
    names = {_op_name(op) for op in decomposed.graph.nodes}
    removed = [decision for decision in decomposed.decisions if decision.node_op not in names]
    CAPTURED.put(result, captured)
    DECISIONS.put(result, (*DECISIONS.of(result), *removed))


def spell_out_tuples(node: fx.Node) -> None:
    """Replaces inputs that are tuples of tensors by their items, which can be cast."""
    items: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for source in node.all_input_nodes:
        value = VALUE.get(source)
        if isinstance(value, (tuple, list)) and tensors_in(value):
            items[source] = tuple(_item(source, index, node) for index in range(len(value)))
    if items:
        arguments = (node.args, node.kwargs)
        node.args, node.kwargs = map_arg(arguments, lambda n: items.get(n, n))


def _item(source: fx.Node, index: int, node: fx.Node) -> fx.Node:
    with node.graph.inserting_before(node):
        item = node.graph.call_function(operator.getitem, (source, index))
    captured = CAPTURED.get(source)
    # Of the reader: the item belongs to its region, not to that of the tuple.
    item.meta = provenance(node)
    CAPTURED.put(item, None if captured is None else captured[index])
    set_value(item, VALUE.of(source)[index])
    return item


def is_getitem(node: fx.Node) -> bool:
    """Returns True if a node takes one item of a tuple."""
    return node.target is operator.getitem and isinstance(node.args[1], int)
