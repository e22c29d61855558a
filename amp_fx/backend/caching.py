"""Compiles the graphs of AOTAutograd so that values computed from weights are cached.

- Values are inputs of the code (``weights.split``).
- Without gradients on the CPU, inductor packs weights for its kernels; oneDNN's packed weights are
  constants of the code (``weights.packed``).
- With gradients, values of weights that get gradients are computed in every call: with one call
  per update, caching would move more memory than it saves. ``options={"weight_cache": "training"}``
  caches them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.checkpoint import CheckpointPolicy

from amp_fx.backend.disk_caches import without_autograd_cache
from amp_fx.backend.inductor import after_autograd, compile_with_inductor, inductor_config
from amp_fx.backend.inductor_repair import record_output_strides
from amp_fx.backend.inner import uses_inductor
from amp_fx.backend.numerics import is_strict
from amp_fx.graphs.bodies import copy_graph_module
from amp_fx.graphs.collectives import op_name
from amp_fx.graphs.metadata import SITE, VALUE
from amp_fx.graphs.values import tensors_in
from amp_fx.stats import record
from amp_fx.torch_private.aot_autograd import (
    keep_saved,
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from amp_fx.torch_private.fake_tensors import FakeTensor, unset_fake_temporarily
from amp_fx.torch_private.inductor_passes import CustomPartitionerFn, get_hash_for_files
from amp_fx.torch_private.tracing import TracingContext
from amp_fx.weights.cacheable import cacheable_weights, owner_of, verify_level
from amp_fx.weights.call import CachedCall
from amp_fx.weights.conv_layouts import lay_out_convolutions
from amp_fx.weights.engine import engine, is_available
from amp_fx.weights.entry import computing_values
from amp_fx.weights.packed import CannotPackError, compile_packed, pack, run_fake, specs_of
from amp_fx.weights.read_only import checked_backward, checked_results, is_checking
from amp_fx.weights.split import (
    Prepare,
    Split,
    cached_nodes,
    computed_outputs,
    convolution_biases,
    copy_returned_inputs,
    read_whole,
    saved_inputs,
    split,
    weights_in,
)
from amp_fx.weights.store import STORE
from amp_fx.weights.stored_low import stored_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import fx

    from amp_fx.backend.rewrite import Rewritten
    from amp_fx.options import Options
    from amp_fx.weights.cacheable import Weight
    from amp_fx.weights.split import CachedValueSpec

    Compile = Callable[..., Any]

log = logging.getLogger("amp_fx.caching")


class CachedValue(NamedTuple):
    """A value that would be cached, with fake tensors for its results."""

    spec: CachedValueSpec
    results: tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Caching:
    """Decides what the graphs of one captured graph cache.

    Attributes:
        weights: The weights that can be cached, by position; emptied after the compilation, because
            what is compiled must not hold weights.
        tensors: Positions of the tensors among the inputs of the captured graph.
        trained: Positions of the inputs that get gradients.
        options: The options of the backend.
        owner: Name under which ``stats`` counts the values.
        is_packable: Whether values may be constants of generated code.
        can_watch: Returns True if writes to weights can be detected. The first call on a machine
            waits for a C++ compiler.
        is_counted: Whether ``amp_fx.stats`` counts the casts; those of an explanation are not.
    """

    weights: dict[int, Weight]
    tensors: tuple[int, ...]
    trained: frozenset[int]
    options: Options
    owner: str
    is_packable: bool
    can_watch: Callable[[], bool] = is_available
    is_counted: bool = True

    def is_on(self) -> bool:
        """Returns True if the forward graph may cache anything."""
        is_inference = not (torch.is_grad_enabled() and self.trained)
        chosen = self.weights if is_inference else self._chosen_in_training()
        return bool(chosen) and self.can_watch()

    def release(self) -> None:
        """Drops the weights when the compilation ends."""
        self.weights.clear()

    def wrap(self, compile_graph: Compile) -> Compile:
        """Returns an inner compiler that caches what a graph computes from weights alone.

        Args:
            compile_graph: Inductor's ``compile_fx_inner``, or a function like it.
        """

        def compile_cached(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
            if kwargs.get("is_backward"):
                copy_returned_inputs(gm)
            record_output_strides(gm)  # before weights have other layouts
            if kwargs.get("is_backward") and is_checking():
                return checked_backward(compile_graph(gm, inputs, **kwargs), self.owner)
            chosen = self._chosen_in(gm, kwargs)
            if not chosen:
                return compile_graph(gm, inputs, **kwargs)
            computed = computed_outputs(gm, _num_returned(gm, kwargs))
            call = self._compile(gm, inputs, chosen, compile_graph, kwargs)
            is_cached = isinstance(call, CachedCall)
            return checked_results(call, computed) if is_cached and is_checking() else call

        return compile_cached

    def _compile(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        weights: Mapping[int, Weight],
        compile_graph: Compile,
        kwargs: dict[str, Any],
    ) -> Any:
        """Compiles a forward graph that computes values from weights."""
        has_data = not any(type(w.tensor) is FakeTensor for w in weights.values())
        if kwargs.get("is_inference") and self.is_packable and has_data:
            try:
                return self._pack(copy_graph_module(gm), inputs, weights, compile_graph, kwargs)
            except CannotPackError as error:
                log.debug("not packed: %s", error)
                _forget_output_strides()
        return self._split(gm, inputs, weights, compile_graph, kwargs)

    def values(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[CachedValue, ...]:
        """Lists what a rewritten graph caches; computes and compiles nothing.

        Args:
            gm: The rewritten graph; it is edited.
            inputs: Its inputs, fake.
        """
        found: list[CachedValue] = []

        def note(graph: fx.GraphModule, given: Sequence[Any], **kwargs: Any) -> Any:
            is_inference = bool(kwargs.get("is_inference"))
            chosen = self._chosen_in(graph, kwargs)
            if chosen and is_inference and self.is_packable:
                try:
                    found.extend(self._packed_values(copy_graph_module(graph), given, chosen))
                except CannotPackError:
                    found.extend(self._split_values(copy_graph_module(graph), chosen, kwargs))
            elif chosen:
                found.extend(self._split_values(copy_graph_module(graph), chosen, kwargs))
            return make_boxed_func(graph.forward)

        with without_autograd_cache(), self.partitioning():
            compile_with_inductor(gm, inputs, self.options, note)
        return tuple(value for value in found if not value.spec.is_alias)

    def _split_values(
        self, gm: fx.GraphModule, weights: Mapping[int, Weight], kwargs: Mapping[str, Any]
    ) -> list[CachedValue]:
        split_graph = self._split_graph(gm, weights, kwargs)
        specs = split_graph.values if split_graph is not None else ()
        return [CachedValue(spec, tuple(map(VALUE.of, spec.outputs))) for spec in specs]

    def _packed_values(
        self, gm: fx.GraphModule, inputs: Sequence[Any], weights: Mapping[int, Weight]
    ) -> list[CachedValue]:
        passes = after_autograd(self.options)
        passes.prepare_packing(gm.graph)
        fakes = {i: inputs[i] for i in weights}
        constants, _, _ = pack(
            gm,
            inputs,
            fakes,
            {i: weight.name for i, weight in weights.items()},
            folds_batch_norm=self.options.fold_batch_norm,
            check=self._check_packed,
            chooses_kernels=not is_strict(self.options),
            widen=passes.widen_products,
            run=run_fake,
        )
        targets = [str(node.target) for node in gm.graph.find_nodes(op="get_attr")]
        tensors = {constants.copies[t]: getattr(gm, t) for t in targets if t in constants.copies}
        specs = specs_of(constants.prepare, tensors)
        return [CachedValue(s, tuple(tensors[n] for n in s.outputs)) for s in specs]

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
        saved = self._saved(gm)
        _add_outputs(gm, num_fwd_outputs, saved)
        num_outputs = num_fwd_outputs + len(saved)
        forward, backward = min_cut_rematerialization_partition(
            gm, joint_inputs, num_fwd_outputs=num_outputs, **kwargs
        )
        _remove_outputs(forward, num_fwd_outputs, num_outputs)
        return forward, backward

    @contextlib.contextmanager
    def partitioning(self) -> Iterator[None]:
        """Makes inductor call ``partition``, unless the user has a partitioner of their own."""
        from amp_fx.torch_private.inductor_config import config

        partitioner = config.custom_partitioner_fn or Partitioner(self)
        with config.patch(custom_partitioner_fn=partitioner):
            yield

    def _saved(self, gm: fx.GraphModule) -> list[fx.Node]:
        """Marks the values that are cached in a joint graph of forward and backward."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        primals = [node for node in placeholders if node.name.startswith("primals")]
        chosen = self._chosen(primals, is_inference=False)
        if not chosen:
            return []
        num_outputs = len(_outputs_of(gm))  # results and gradients are both for the caller
        saved = self._cast_layout(gm, chosen, num_outputs, is_inference=False)
        for node in saved:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return saved

    def _cast_layout(
        self,
        gm: fx.GraphModule,
        weights: Mapping[int, Weight],
        num_returned: int,
        *,
        is_inference: bool,
    ) -> list[fx.Node]:
        """Returns the nodes that are cached, laid out as inductor's kernels read them."""
        values = self._cached(gm, weights, num_returned)
        is_compiled = self.options.compiler == "inductor"
        if is_compiled and lay_out_convolutions(gm, values, is_inference=is_inference):
            values = self._cached(gm, weights, num_returned)
        return values

    def _cached(
        self, gm: fx.GraphModule, weights: Mapping[int, Weight], num_returned: int
    ) -> list[fx.Node]:
        prepare = Prepare({i: weight.name for i, weight in weights.items()})
        sources = weights_in(gm, weights, prepare)
        return list(cached_nodes(gm, sources, prepare, num_returned))

    def _chosen_in(self, gm: fx.GraphModule, kwargs: Mapping[str, Any]) -> Mapping[int, Weight]:
        """Returns ``_chosen`` for a graph that the inner compiler gets with some arguments."""
        if kwargs.get("is_backward"):
            return {}
        placeholders = gm.graph.find_nodes(op="placeholder")
        return self._chosen(placeholders, is_inference=bool(kwargs.get("is_inference")))

    def _chosen(
        self, placeholders: Sequence[fx.Node], *, is_inference: bool
    ) -> Mapping[int, Weight]:
        """Returns the weights whose values a graph caches, by their positions in it.

        There are none if the graph has other tensors than the captured one as inputs: AOTAutograd
        adds states of random numbers, and replaces views of one another. Of a DTensor it passes the
        local part and its mesh.

        Args:
            placeholders: The inputs of the graph.
            is_inference: Whether the graph has no backward.
        """
        tensors = [
            i for i, node in enumerate(placeholders) if isinstance(VALUE.get(node), torch.Tensor)
        ]
        if len(tensors) != len(self.tensors):
            return {}
        position_of = dict(zip(self.tensors, tensors, strict=True))
        chosen = self.weights if is_inference else self._chosen_in_training()
        found = {position_of[i]: weight for i, weight in chosen.items()}
        on_accelerators = [n for n in map(placeholders.__getitem__, found) if not _is_on_cpu(n)]
        is_packed = is_inference and self.is_packable
        cast_in_kernels = set() if is_packed else convolution_biases(on_accelerators)
        if not is_inference:
            cast_in_kernels |= read_whole(on_accelerators)
        found = {i: w for i, w in found.items() if placeholders[i] not in cast_in_kernels}
        pairs = [(VALUE.of(placeholders[i]), weight.tensor) for i, weight in found.items()]
        is_aligned = all(_layout(value) == _layout(weight) for value, weight in pairs)
        return found if is_aligned else {}

    def _chosen_in_training(self) -> Mapping[int, Weight]:
        is_asked_for = self.options.weight_cache == "training"
        return {
            i: weight for i, weight in self.weights.items() if is_asked_for or i not in self.trained
        }

    def _split_graph(
        self, gm: fx.GraphModule, weights: Mapping[int, Weight], kwargs: Mapping[str, Any]
    ) -> Split | None:
        num_returned = _num_returned(gm, kwargs)
        if kwargs.get("is_inference"):  # else ``partition`` did
            self._cast_layout(gm, weights, num_returned, is_inference=True)
        return split(gm, {i: weight.name for i, weight in weights.items()}, num_returned)

    def _split(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        weights: Mapping[int, Weight],
        compile_graph: Compile,
        kwargs: dict[str, Any],
    ) -> Any:
        """Compiles a graph whose cached values are inputs."""
        found = self._split_graph(gm, weights, kwargs)
        if found is None:
            return compile_graph(gm, inputs, **kwargs)
        if not kwargs.get("is_inference"):
            # See Note [Cached values are read-only].
            keep_saved(saved_inputs(gm, _num_returned(gm, kwargs)))
        values = gm.graph.find_nodes(op="placeholder")[len(found.passed) :]
        examples = [*(inputs[i] for i in found.passed), *map(VALUE.of, values)]
        if "static_input_idxs" in kwargs:
            given = kwargs["static_input_idxs"]
            static = [new for new, old in enumerate(found.passed) if old in given]
            static += range(len(found.passed), len(examples))
            kwargs = {**kwargs, "static_input_idxs": static}
        compiled = compile_graph(gm, examples, **kwargs)
        return self._call(found.values, found.passed, compiled=compiled)

    def _pack(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        weights: Mapping[int, Weight],
        compile_graph: Compile,
        kwargs: dict[str, Any],
    ) -> CachedCall:
        """Compiles a graph whose packed weights are constants; other values are inputs."""
        tensors = {i: weight.tensor for i, weight in weights.items()}
        with unset_fake_temporarily():
            started = STORE.start(tuple(tensors.values()))
            aliases = constants_for(tensors)
        passes = after_autograd(self.options)
        passes.prepare_packing(gm.graph)
        with _plain_epilogues(self.options):
            packed, values = compile_packed(
                gm,
                inputs,
                aliases,
                {i: weight.name for i, weight in weights.items()},
                compile_graph,
                folds_batch_norm=self.options.fold_batch_norm,
                check=self._check_packed,
                chooses_kernels=not is_strict(self.options),
                widen=passes.widen_products,
                **kwargs,
            )
        call = self._call(
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

    def _check_packed(self, graph: fx.Graph) -> None:
        """Raises ``CannotPackError`` if packed kernels may break the promise of ``numerics``."""
        if is_strict(self.options) and _has_other_sums(graph):
            raise CannotPackError("a packed float32 kernel adds up in another order than ATen's")

    def _call(self, *args: Any, **code: Any) -> CachedCall:
        verify = verify_level(self.options.verify)
        call = CachedCall(*args, owner=self.owner, verify=verify, **code)
        if self.is_counted:
            specs: Any = {spec.key(()): spec for spec in call.specs if not spec.is_alias}.values()
            record({"weight_casts_kept": sum(len({*spec.casts()}) for spec in specs)})
        return call


def _has_other_sums(graph: fx.Graph) -> bool:
    """Returns True if a float32 kernel of oneDNN may have other bits than ATen's.

    These are convolutions, which differ for some sizes. Float32 products are not packed.
    """
    packed = [node for node in graph.nodes if op_name(node).startswith("mkldnn::")]
    return any(VALUE.of(node.all_input_nodes[0]).dtype is torch.float32 for node in packed)


def _forget_output_strides() -> None:
    """Prepares to compile a graph again: inductor asserts that it is the first to note strides."""
    context = TracingContext.try_get()
    if context is not None and context.output_strides:
        context.output_strides.clear()


def _is_on_cpu(node: fx.Node) -> bool:
    device: torch.device = VALUE.of(node).device
    return device.type == "cpu"


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _plain_epilogues(options: Options) -> contextlib.AbstractContextManager[None]:
    """Keeps what follows a product out of oneDNN's kernels, which round at the end only.

    Relies on inductor's lowering patterns being controlled by ``pattern_matcher``, and on the
    passes of its freezing not being.
    """
    from amp_fx.torch_private.inductor_config import config

    if not is_strict(options):
        return contextlib.nullcontext()
    patch: contextlib.AbstractContextManager[None] = config.patch(pattern_matcher=False)
    return patch


class Partitioner(CustomPartitionerFn):
    """Inductor's ``custom_partitioner_fn`` that calls ``Caching.partition``."""

    def __init__(self, cache: Caching) -> None:
        self._cache = cache

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Returns the forward graph and the backward graph."""
        return self._cache.partition(gm, joint_inputs, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Partitioner:
        """Returns itself: inductor copies its settings for logs, and weights must not be copied."""
        return self

    def __getstate__(self) -> Any:
        """Returns ``uuid()``: inductor's keys contain its settings pickled, besides ``uuid()``."""
        return self.uuid()

    def uuid(self) -> Any:
        """Returns its part of the keys of inductor's caches."""
        return get_hash_for_files((__file__,))


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


def _num_returned(gm: fx.GraphModule, kwargs: Mapping[str, Any]) -> int:
    """Returns how many outputs the caller gets; what follows is saved for the backward."""
    context = TracingContext.try_get()
    if not kwargs.get("is_inference") and context is not None and context.fw_metadata is not None:
        return int(context.fw_metadata.num_forward_returns)
    outputs = gm.graph.output_node().args[0]
    assert isinstance(outputs, (list, tuple))
    return len(outputs)


def constants_for(weights: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Returns aliases of weights: their memory, in storages of their own."""
    with computing_values():
        return {i: engine().alias(weight.detach()) for i, weight in weights.items()}


def caching(
    captured: fx.GraphModule,
    found: Rewritten,
    example_inputs: Sequence[Any],
    options: Options,
    *,
    can_watch: Callable[[], bool] = is_available,
) -> Caching:
    """Finds out what the graphs of a rewritten graph can cache.

    Args:
        captured: The graph as Dynamo captured it.
        found: The same, rewritten.
        example_inputs: Its inputs.
        options: The options of the backend.
        can_watch: Returns True if writes to weights can be detected.
    """
    weights: dict[int, Weight] = {}
    is_allowed = options.weight_cache and found.state.cache_enabled
    if is_allowed and options.uses_aot_autograd:
        stored = set() if options.freezing else stored_tensors(found.frame.modules())
        weights = cacheable_weights(
            captured, found.gm, example_inputs, frame=found.frame, stored=stored
        )
    trained = {
        i
        for i, example in enumerate(example_inputs)
        if isinstance(example, torch.Tensor) and example.requires_grad
    }
    return Caching(
        weights,
        tuple(i for i, x in enumerate(example_inputs) if isinstance(x, torch.Tensor)),
        frozenset(trained),
        options,
        owner_of(found.gm, found.root),
        _is_on(found.gm.graph) and may_pack(options, example_inputs),
        can_watch,
    )


def may_pack(options: Options, example_inputs: Sequence[Any]) -> bool:
    """Returns True if values may be constants of the code that inductor generates.

    On the CPU they may, unless ``freezing`` is off; on accelerators if ``freezing`` is on.
    """
    if not uses_inductor(example_inputs, options) or options.freezing is False:
        return False
    device_type = _device_type_of(tensors_in(example_inputs))
    is_any_on = functools.partial(_is_any_on, inductor_config(options))
    if device_type in ACCELERATORS:
        is_wanted = options.freezing is True or is_any_on("freezing")
        return is_wanted and not is_any_on(*_OPAQUE, *_OPAQUE_ON_ACCELERATORS)
    return device_type == "cpu" and not is_any_on(*_OPAQUE)


ACCELERATORS = ("cuda", "xpu")
"""Devices for which inductor compiles with Triton, and every write to a weight is noticed."""

_OPAQUE = ("cpp_wrapper",)
"""Settings of inductor whose code holds constants where they cannot be replaced."""

_OPAQUE_ON_ACCELERATORS = ("max_autotune", "max_autotune_gemm", "triton.cudagraphs")


def _is_any_on(given: Mapping[str, Any], *names: str) -> bool:
    """Returns True if a setting of inductor is on: here, or for the process."""
    from amp_fx.torch_private.inductor_config import config

    return any(given.get(name, operator.attrgetter(name)(config)) for name in names)


def _device_type_of(tensors: Sequence[torch.Tensor]) -> str | None:
    """Returns the type of a graph's only device, numbers on the CPU aside; None for several."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        devices = {t.device for t in tensors if t.device.type != "cpu" or t.dim() > 0}
    return devices.pop().type if len(devices) == 1 else "cpu" if not devices else None


def _is_on(graph: fx.Graph) -> bool:
    """Returns True if autocast is on anywhere in a graph."""
    ops = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    return any(SITE.is_on(node) and SITE.of(node).state.enabled for node in ops)
