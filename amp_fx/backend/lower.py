"""Rewrites the graphs of AOTAutograd, decides what they cache, and compiles them.

- Values computed from weights are inputs of the code (``weights.split``).
- Without gradients on the CPU, inductor packs weights for its kernels; oneDNN's packed weights are
  constants of the code (``weights.pack``).
- With gradients, values of weights that get gradients are computed in every call: with one call
  per update, caching would move more memory than it saves. ``options={"weight_cache": "training"}``
  caches them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import operator
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import CheckpointPolicy

from amp_fx.backend.added_passes import with_added
from amp_fx.backend.ahead import is_ahead_of_time
from amp_fx.backend.numerics import inductor_config, is_strict, uses_inductor
from amp_fx.backend.pipeline import aot_passes, packing_passes, run_passes
from amp_fx.graphs.bodies import copy_graph_module
from amp_fx.graphs.metadata import SITE, VALUE
from amp_fx.passes.lay_out_convolutions import LayOutConvolutions
from amp_fx.stats import record
from amp_fx.torch_private.aot_autograd import min_cut_rematerialization_partition
from amp_fx.torch_private.fake_tensors import FakeTensor, detect_fake_mode, unset_fake_temporarily
from amp_fx.torch_private.inductor_passes import CustomPartitionerFn
from amp_fx.torch_private.modes import no_dispatch_modes
from amp_fx.torch_private.tracing import TracingContext
from amp_fx.weights.aliases import computed_outputs, escaping, written_inputs
from amp_fx.weights.cache_entry import computing_values
from amp_fx.weights.call import CachedCall, verify_level
from amp_fx.weights.checked_calls import checked_backward, checked_results
from amp_fx.weights.inputs import TRAINED, UNWATCHED, find_candidates, owner_of
from amp_fx.weights.pack import CannotPackError, Constants, compile_packed, packing
from amp_fx.weights.plan import PLAN, CachePlan, plan, why_uncached
from amp_fx.weights.prepare import run_node
from amp_fx.weights.read_only import is_checking
from amp_fx.weights.store import STORE
from amp_fx.weights.stored_low import stored_tensors
from amp_fx.weights.watch import engine, is_available

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    import torch
    from torch import fx

    from amp_fx.backend.rewrite import Rewritten
    from amp_fx.options import Options
    from amp_fx.passes.base import Pass
    from amp_fx.weights.inputs import Candidates, Inputs

log = logging.getLogger("amp_fx.caching")


@dataclasses.dataclass(frozen=True)
class Caching:
    """Values of one captured graph that its compiled code caches.

    Attributes:
        candidates: The weights.
        options: The options of the backend.
        owner: Name under which ``stats`` counts the values.
        is_packable: Whether values may be constants of generated code.
        has_backward: Whether the graph is differentiated.
        can_watch: Returns True if writes to weights can be detected. The first call on a machine
            waits for a C++ compiler.
    """

    candidates: Candidates
    options: Options
    owner: str
    is_packable: bool
    has_backward: bool
    can_watch: Callable[[], bool] = is_available

    def why_off(self) -> CachePlan | None:
        """Returns an empty plan with the reasons why nothing is cached.

        Returns None if the forward graph may cache something.
        """
        weights = self.candidates.weights
        chosen = self.candidates.chosen(is_inference=not self.has_backward)
        if chosen and self.can_watch():
            return None
        reasons = {w.name: UNWATCHED if i in chosen else TRAINED for i, w in weights.items()}
        return CachePlan(uncached={**self.candidates.rejected, **reasons})

    def partition(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[Any],
        *,
        num_fwd_outputs: int,
        **kwargs: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partitions a joint graph so that the forward saves cached values for the backward.

        torch's partitioner keeps values marked ``MUST_SAVE`` only if the forward computes them
        anyway. So they are outputs of the forward while the graph is partitioned.
        """
        # The backward reads the same cached values as the forward, so it must get them from the
        # forward: AOTAutograd passes a backward nothing but saved tensors and gradients.
        saved = self._save_values(gm)
        _add_outputs(gm, num_fwd_outputs, saved)
        num_outputs = num_fwd_outputs + len(saved)
        forward, backward = min_cut_rematerialization_partition(
            gm, joint_inputs, num_fwd_outputs=num_outputs, **kwargs
        )
        _remove_outputs(forward, num_fwd_outputs, num_outputs)
        return forward, backward

    def in_graph(self, graph: AotGraph, *, is_packed: bool = False) -> Candidates:
        """Returns the weights that a graph may cache, by their positions in it.

        Args:
            graph: A forward graph.
            is_packed: Whether weights become constants.
        """
        return self.candidates.in_graph(
            graph.gm.graph.find_nodes(op="placeholder"),
            is_inference=graph.stage == "inference",
            is_packed=is_packed,
        )

    def to_pack(self, graph: AotGraph) -> Candidates | None:
        """Returns the weights of a graph that may become constants; None if there are none."""
        # A graph with gradients cannot be packed: its backward reads the plain weight.
        if not self.is_packable or graph.stage != "inference":
            return None
        candidates = self.in_graph(graph, is_packed=True)
        return candidates if candidates.weights else None

    def call(self, *args: Any, **code: Any) -> CachedCall:
        """Returns compiled code that is called with cached values, and counts its casts."""
        verify = verify_level(self.options.verify)
        call = CachedCall(*args, owner=self.owner, verify=verify, **code)
        specs: Any = [spec for spec in call.specs if not spec.is_alias]
        casts = {cast for spec in specs for cast in spec.casts()}
        record({"weight_casts_kept": len(casts)})
        return call

    @contextlib.contextmanager
    def partitioning(self) -> Iterator[None]:
        """Makes inductor call ``partition`` for a graph with a backward.

        A partitioner of the user is not replaced.
        """
        from amp_fx.torch_private.inductor_config import config

        # Only a graph with a backward is partitioned, and inductor pickles its settings for keys.
        if not self.has_backward:
            yield
            return
        partitioner = config.custom_partitioner_fn or Partitioner(self)
        with config.patch(custom_partitioner_fn=partitioner):
            yield

    def _save_values(self, gm: fx.GraphModule) -> list[fx.Node]:
        """Lays out and marks the values that are cached in a joint graph."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        primals = [node for node in placeholders if node.name.startswith("primals")]
        candidates = self.candidates.in_graph(primals, is_inference=False, is_packed=False)
        num_outputs = len(_outputs_of(gm))  # results and gradients are both for the caller
        if self.options.compiler == "inductor":
            run_passes(gm, [LayOutConvolutions(candidates, num_outputs, is_inference=False)])
        saved = list(plan(gm, candidates, num_outputs).nodes)
        for node in saved:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return saved


def find_cached(
    inputs: Inputs,
    rewritten: Rewritten,
    options: Options,
    *,
    can_watch: Callable[[], bool] = is_available,
    foreign_ids: Collection[int] = (),
) -> Caching | None:
    """Finds out what the graphs of a rewritten graph can cache; None if nothing.

    Args:
        inputs: The inputs of the captured graph.
        rewritten: The graph, rewritten.
        options: The options of the backend.
        can_watch: Returns True if writes to weights can be detected.
        foreign_ids: Identities of fake copies of weights whose memory torch did not allocate.
    """
    is_allowed = options.weight_cache and rewritten.state.cache_enabled
    if not is_allowed or not options.uses_aot_autograd:
        log.debug("nothing is cached: the option weight_cache, or autocast's cache, is off")
        return None
    # Weights that ``store_low`` converted need no cast, and packed copies would take the memory
    # that it saved. ``freezing=True`` asks for packed copies.
    candidates = find_candidates(
        inputs,
        rewritten.gm,
        frame=rewritten.frame,
        stored=set() if options.freezing else stored_tensors(rewritten.frame.modules()),
        foreign_ids=foreign_ids,
        is_training_cached=options.weight_cache == "training",
    )
    # Without autocast, the program asked for float32, whose packed kernels have other bits.
    ops = [n for n in rewritten.gm.graph.nodes if n.op not in ("placeholder", "output")]
    has_autocast = any(SITE.is_on(node) and SITE.of(node).state.enabled for node in ops)
    is_packable = has_autocast and may_pack(options, inputs)
    owner = owner_of(rewritten.gm, rewritten.root)
    return Caching(candidates, options, owner, is_packable, inputs.has_backward, can_watch)


@dataclasses.dataclass(frozen=True)
class AotGraph:
    """A graph of AOTAutograd, and how its inner compiler is called.

    Attributes:
        gm: The graph, which passes edit.
        example_inputs: Its inputs, fake.
        kwargs: Other arguments of the inner compiler.
        is_inductor: Whether inductor generates code.
        is_counted: Whether ``amp_fx.stats`` counts edits; those of an explanation are not.
    """

    gm: fx.GraphModule
    example_inputs: Sequence[Any]
    kwargs: Mapping[str, Any]
    is_inductor: bool = True
    is_counted: bool = True

    @property
    def stage(self) -> str:
        """``"forward"``, ``"backward"`` or ``"inference"``."""
        if self.kwargs.get("is_backward"):
            return "backward"
        return "inference" if self.kwargs.get("is_inference") else "forward"

    @property
    def num_returned(self) -> int:
        """Number of outputs that the caller gets; what follows is saved for the backward."""
        context = TracingContext.try_get()
        metadata = None if context is None else context.fw_metadata
        if self.stage == "forward" and metadata is not None:
            return int(metadata.num_forward_returns)
        return len(_outputs_of(self.gm))

    def copy(self) -> AotGraph:
        """Returns the same with a copy of the graph."""
        return dataclasses.replace(self, gm=copy_graph_module(self.gm))

    def moving_inputs(self) -> set[str]:
        """Returns the names of the inputs whose addresses change between calls."""
        static = self.kwargs.get("static_input_idxs") or ()
        nodes = self.gm.graph.find_nodes(op="placeholder")
        return {node.name for i, node in enumerate(nodes) if i not in static}

    def kwargs_with_values(self, passed: tuple[int, ...]) -> dict[str, Any]:
        """Returns the arguments of the inner compiler after cached values became inputs.

        The addresses of the values do not change, as those of the inputs in ``static_input_idxs``.

        Args:
            passed: Positions of the original inputs that precede the values now.
        """
        num_inputs = len(self.gm.graph.find_nodes(op="placeholder"))
        given = self.kwargs.get("static_input_idxs") or ()
        static = [new for new, old in enumerate(passed) if old in given]
        static += range(len(passed), num_inputs)
        return {**self.kwargs, "static_input_idxs": static}


def lower_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options,
    caching: Caching | None,
    compile_graph: Callable[..., Any],
    is_inductor: bool = True,
    **kwargs: Any,
) -> Any:
    """Rewrites and compiles a graph; AOTAutograd's inner compiler.

    Args:
        gm: The graph, which is edited.
        example_inputs: Its inputs, fake.
        options: The options of the backend.
        caching: Values to cache; None caches nothing.
        compile_graph: Inductor's ``compile_fx_inner``, or a function like it.
        is_inductor: Whether inductor generates code.
        **kwargs: Other arguments of the inner compiler.
    """
    graph = AotGraph(gm, example_inputs, kwargs, is_inductor)
    # Without caching, a backward has no cached values among its inputs to protect either.
    if caching is None:
        rewrite_graph(graph, options, None)
        return compile_graph(gm, example_inputs, **kwargs)
    if graph.stage == "backward":
        rewrite_graph(graph, options, caching.candidates)
        compiled = compile_graph(gm, example_inputs, **kwargs)
        return checked_backward(compiled, caching.owner) if is_checking() else compiled
    # Before the passes, which may remove the copies that this checks for.
    returned = computed_outputs(gm, graph.num_returned) if is_checking() else None
    packable = caching.to_pack(graph)
    has_data = not any(type(w.tensor) is FakeTensor for w in caching.candidates.weights.values())
    call = None
    # Packing computes values while it rewrites, which takes data. Weights are fake if Dynamo's
    # ``DDPOptimizer`` splits a graph into parts.
    if packable is not None and has_data:
        try:
            # Of a copy: whether a graph can be packed is known after its code was generated.
            call = _lower_packed(graph.copy(), caching, packable, compile_graph)
        except CannotPackError as error:
            log.debug("not packed: %s", error)
            _forget_output_strides()
    if call is None:
        call = _lower_split(graph, caching, compile_graph)
    if returned is not None and isinstance(call, CachedCall):
        return checked_results(call, returned)
    return call


def rewrite_graph(
    graph: AotGraph, options: Options, candidates: Candidates | None, packing: tuple[Pass, ...] = ()
) -> CachePlan:
    """Runs all passes over a graph of AOTAutograd, in place.

    Args:
        graph: The graph.
        options: The options of the backend.
        candidates: The weights that may be cached, by position; None caches nothing.
        packing: The passes that pack weights, if they become constants.

    Returns:
        The plan of ``split_weights``; empty if that pass does not run.
    """
    gm = graph.gm
    passes = aot_passes(
        options,
        candidates,
        stage=graph.stage,
        num_returned=graph.num_returned,
        is_inductor=graph.is_inductor,
        is_strict=is_strict(options),
        moving=graph.moving_inputs() if has_cudagraphs({}) else None,
        packing=packing,
    )
    # A backward is compiled when it first runs, possibly under a mode of the user's program, which
    # must not see the fake tensors of the graph.
    with no_dispatch_modes():
        reports = run_passes(gm, with_added(passes, (), options.disable_passes, is_aot=True))
    if graph.is_counted:
        record(*(report.counts for report in reports))
    planned: CachePlan = gm.meta.pop(PLAN, CachePlan())  # keys of caches contain ``gm.meta``
    planned.log_reasons()
    return planned


def pack_graph(
    graph: AotGraph,
    options: Options,
    candidates: Candidates,
    weights: Mapping[int, torch.Tensor],
    run: Callable[..., Any] = run_node,
) -> tuple[Constants, CachePlan, bool]:
    """Runs all passes over a graph without gradients whose weights become constants, in place.

    Args:
        graph: The graph.
        options: The options of the backend.
        candidates: The weights that may be cached, by position.
        weights: Their tensors, or fake ones.
        run: Computes a node from the values of its inputs.

    Returns:
        The constants, what the code caches, and inductor's decision on layouts.
    """
    from amp_fx.torch_private.inductor import GraphLowering

    # All that depends on the graph as AOTAutograd made it comes first: the passes replace inputs
    # and layouts.
    gm = graph.gm
    placeholders, written = gm.graph.find_nodes(op="placeholder"), written_inputs(gm)
    weights = {i: weight for i, weight in weights.items() if placeholders[i] not in written}
    escaped = escaping(gm, graph.num_returned)
    uncached = why_uncached(placeholders, candidates, written, escaped)
    is_channels_last = bool(GraphLowering.decide_layout_opt(gm, is_inference=True))
    constants = Constants({i: weight.name for i, weight in candidates.weights.items()}, run)
    steps = packing_passes(
        constants, weights, options, is_strict=is_strict(options), is_channels_last=is_channels_last
    )
    rewrite_graph(graph, options, candidates, steps)
    passed = tuple(i for i in range(len(placeholders)) if i not in weights)
    planned = constants.plan(gm, passed, uncached)
    planned.log_reasons()
    return constants, planned, is_channels_last


def _lower_split(graph: AotGraph, caching: Caching, compile_graph: Callable[..., Any]) -> Any:
    """Compiles a graph whose cached values are inputs."""
    gm = graph.gm
    planned = rewrite_graph(graph, caching.options, caching.in_graph(graph))
    if not planned.values:
        return compile_graph(gm, graph.example_inputs, **graph.kwargs)
    values = gm.graph.find_nodes(op="placeholder")[len(planned.passed) :]
    examples = [*(graph.example_inputs[i] for i in planned.passed), *map(VALUE.of, values)]
    kwargs = graph.kwargs_with_values(planned.passed)
    compiled = compile_graph(gm, examples, **kwargs)
    return caching.call(planned.values, planned.passed, compiled=compiled)


def _lower_packed(
    graph: AotGraph, caching: Caching, candidates: Candidates, compile_graph: Callable[..., Any]
) -> CachedCall:
    """Compiles a graph whose packed weights are constants; other values are inputs."""
    from amp_fx.torch_private.inductor_config import config

    tensors = {i: weight.tensor for i, weight in candidates.weights.items()}
    with unset_fake_temporarily():
        # Note [Values are computed from aliases] in ``weights.store``.
        unmoved = {i: weight.detach() for i, weight in tensors.items()}
        # The state of the weights is recorded before values are computed: a write in between makes
        # the values stale.
        started = STORE.start(tuple(unmoved.values()))
        aliases = constants_for(unmoved)
    # oneDNN's kernels round what follows a product at the end only. Inductor's lowering patterns,
    # which put it there, are controlled by this setting, and the passes of its freezing are not.
    settings = {"pattern_matcher": False} if is_strict(caching.options) else {}
    with packing(detect_fake_mode(graph.example_inputs)), config.patch(settings):
        constants, planned, layout_opt = pack_graph(graph, caching.options, candidates, aliases)
        packed, values = compile_packed(
            graph.gm,
            [graph.example_inputs[i] for i in planned.passed],
            planned.passed,
            constants,
            compile_graph,
            **graph.kwargs_with_values(planned.passed),
            layout_opt=layout_opt,
        )
    call = caching.call(
        packed.values,
        packed.passed,
        compiled=packed.code,
        constants=packed.constants,
        bind=packed.bind if packed.constants else None,
    )
    if started is not None:
        with unset_fake_temporarily():
            call.adopt(values, started, tensors)
    return call


def _forget_output_strides() -> None:
    """Prepares to compile a graph again: inductor asserts that it is the first to note strides."""
    context = TracingContext.try_get()
    if context is not None and context.output_strides:
        context.output_strides.clear()


class Partitioner(CustomPartitionerFn):
    """Inductor's ``custom_partitioner_fn`` that calls ``Caching.partition``."""

    def __init__(self, caching: Caching) -> None:
        self._caching = caching

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Returns the forward graph and the backward graph."""
        return self._caching.partition(gm, joint_inputs, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Partitioner:
        """Returns itself: inductor copies its settings for logs, and weights must not be copied."""
        return self

    def __getstate__(self) -> Any:
        """Returns ``uuid()``: inductor's keys contain its settings pickled, besides ``uuid()``."""
        return self.uuid()

    def uuid(self) -> Any:
        """Returns a constant: ``disk_caches.keyed`` adds amp_fx's version to the keys."""
        return "amp_fx"


def _outputs_of(gm: fx.GraphModule) -> list[Any]:
    outputs = gm.graph.output_node().args[0]
    assert isinstance(outputs, (list, tuple))
    return list(outputs)


def _add_outputs(gm: fx.GraphModule, position: int, added: Sequence[fx.Node]) -> None:
    """Adds nodes to the outputs of a graph; ``"desc"`` says of each output where it comes from."""
    node, outputs = gm.graph.output_node(), _outputs_of(gm)
    described = list(node.meta.get("desc", [None] * len(outputs)))
    node.args = ((*outputs[:position], *added, *outputs[position:]),)
    node.meta["desc"] = [*described[:position], *[None] * len(added), *described[position:]]


def _remove_outputs(gm: fx.GraphModule, start: int, stop: int) -> None:
    """Removes a range of outputs of a graph, and what only they need."""
    node, outputs = gm.graph.output_node(), _outputs_of(gm)
    described = list(node.meta.get("desc", [None] * len(outputs)))
    del outputs[start:stop], described[start:stop]
    node.args, node.meta["desc"] = (tuple(outputs),), described
    gm.graph.eliminate_dead_code()
    gm.recompile()


def constants_for(weights: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Returns aliases of detached weights: their memory, in storages of their own."""
    with computing_values():
        return {i: engine().alias(weight) for i, weight in weights.items()}


def may_pack(options: Options, inputs: Inputs) -> bool:
    """Returns True if values may be constants of the code that inductor generates.

    On the CPU they may, unless ``freezing`` is off; on accelerators if ``freezing`` is on.
    """
    if not uses_inductor(inputs.device_types, options) or options.freezing is False:
        return False
    settings = inductor_config(options)
    device_type = inputs.device_type
    if device_type in ACCELERATORS:
        is_wanted = options.freezing is True or _is_any_on(settings, "freezing")
        return is_wanted and not _is_any_on(settings, *_OPAQUE, *_OPAQUE_ON_ACCELERATORS)
    return device_type == "cpu" and not _is_any_on(settings, *_OPAQUE)


def has_cudagraphs(settings: Mapping[str, Any]) -> bool:
    """Returns True if calls replay CUDA graphs of code that is compiled with some settings.

    Code that is compiled ahead of time replays none: it cannot be saved with the wrapper that
    ``separate_inputs`` needs, and has no cached values to protect.
    """
    return not is_ahead_of_time() and _is_any_on(settings, "triton.cudagraphs")


ACCELERATORS = ("cuda", "xpu")
"""Devices for which inductor compiles with Triton, and every write to a weight is noticed."""

_OPAQUE = ("cpp_wrapper",)
"""Settings of inductor whose code holds constants where they cannot be replaced."""

_OPAQUE_ON_ACCELERATORS = ("max_autotune", "max_autotune_gemm", "triton.cudagraphs")


def _is_any_on(given: Mapping[str, Any], *names: str) -> bool:
    """Returns True if a setting of inductor is on: here, or for the process."""
    from amp_fx.torch_private.inductor_config import config

    return any(given.get(name, operator.attrgetter(name)(config)) for name in names)
