"""The inner compilers that a rewritten graph is handed to.

``repaired`` repairs a fault of TorchInductor's CPU scheduler that gives wrong gradients.

When the scheduler recomputes a loop body, it forgets that a buffer which is scattered into
goes by another name afterwards; a kernel that reads the sum may then run before the scatter.
Interpolation and max pooling scatter in their backward, and casts around them are enough to
bring it about. See pytorch#185509; the repair is that of pytorch#185873, which torch 2.13
lacks and which does nothing where torch has it.

``apart`` keeps inductor's CUDA graphs from asking for weights, and from holding kept copies.

The store makes values again in the same memory unless somebody may be reading them. A recording is
valid as long as its static inputs stay where they are. Two habits of recordings would break that:

- They ask all static inputs for their addresses in each replay, also those that the graph does not
  read. Asking for a weight's address looks like a write. Such inputs are replaced by dummies.
- They hold outputs that are static inputs: what a forward returns for its backward. The store would
  take them for readers. Such outputs are taken out of the graph and given back around it.

Relies on ``torch._inductor.cudagraph_trees``: ``CUDAGraphNode`` compares ``static_input_data_ptrs``
where ``graph_partition`` is off, and holds ``static_output_tensors``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import inspect
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.amp.autocast_mode import _enter_autocast

from amp_fx.backend.ahead import is_ahead_of_time
from amp_fx.backend.fallback import warn_eager
from amp_fx.errors import UnsupportedError
from amp_fx.passes.isolate_rows import composites, isolate_rows
from amp_fx.passes.keep_eager_kernels import keeping_whole
from amp_fx.passes.narrow_gathers import NarrowGathers, wire_bytes
from amp_fx.policies import float8 as policies_float8
from amp_fx.policies.float8 import float8_product
from amp_fx.progress import working
from amp_fx.regions.policy_codes import CARRIERS
from amp_fx.regions.state import called_without_autocast, left_on_error
from amp_fx.stats import record
from amp_fx.tables import float8 as tables_float8
from amp_fx.weights.spread import is_distributed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from amp_fx.backend.after_autograd import AfterAutograd
    from amp_fx.backend.backward import RefuseMixedDtypes
    from amp_fx.backend.caching import Caching
    from amp_fx.options import Options

    Compiled = Callable[..., Any]

log = logging.getLogger("amp_fx.inner")


def without_autograd_cache(**more: Any) -> contextlib.AbstractContextManager[None]:
    """Compile inside it: AOTAutograd takes nothing from its caches; more of its settings."""
    patch: contextlib.AbstractContextManager[None] = functorch_config.patch(
        enable_autograd_cache=False, enable_remote_autograd_cache=False, **more
    )
    return patch


def settled(settings: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Compiles graphs anew where ``apart`` changes them; AOTAutograd's cache lacks the change."""
    if is_ahead_of_time() or not _is_on(settings):
        return contextlib.nullcontext()
    return without_autograd_cache()


def _is_on(settings: Mapping[str, Any]) -> bool:
    from torch._inductor import config

    return bool(settings.get("triton.cudagraphs", config.triton.cudagraphs))


@dataclasses.dataclass(frozen=True)
class Apart:
    """What a graph of AOTAutograd leaves to those who call it.

    Attributes:
        dummies: By position, what is passed in the place of inputs.
        returned: By the position of an output, that of the input which it is.
    """

    dummies: Mapping[int, torch.Tensor]
    returned: Mapping[int, int]

    def wrap(self, compiled: Compiled) -> Compiled:
        """The compiled graph, as a boxed callable with the inputs and outputs of AOTAutograd's."""

        def call(inputs: list[Any]) -> Any:
            given = {k: inputs[i] for k, i in self.returned.items()}
            for i, dummy in self.dummies.items():
                inputs[i] = dummy
            outputs = compiled(inputs)
            return [given.get(k, out) for k, out in enumerate(outputs)] if given else outputs

        return call if self.dummies or self.returned else compiled


def apart(gm: fx.GraphModule, static: Iterable[int]) -> Apart:
    """Takes out of a graph what a recording of it would ask or hold, where CUDA graphs are on."""
    if not _is_on({}):
        return Apart({}, {})
    returned = {} if is_ahead_of_time() else _taken_out(gm, static)
    unused = _unused_inputs(gm)
    with unset_fake_temporarily():
        return Apart({i: torch.empty(1, device=d) for i, d in unused.items()}, returned)


def _taken_out(gm: fx.GraphModule, static: Iterable[int]) -> dict[int, int]:
    """Removes outputs that are static inputs; the inputs by the positions of the outputs."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    sources = {placeholders[i]: i for i in static}
    output = gm.graph.output_node()
    outputs: Any = output.args[0]
    found = {k: sources[node] for k, node in enumerate(outputs) if node in sources}
    if found:
        output.args = (type(outputs)(None if k in found else o for k, o in enumerate(outputs)),)
        gm.recompile()
    return found


def _unused_inputs(gm: fx.GraphModule) -> dict[int, torch.device]:
    """The inputs of a graph that nothing reads, with their devices; not those on the CPU."""
    values = {
        i: node.meta.get("val")
        for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))
        if not node.users
    }
    return {
        i: value.device
        for i, value in values.items()
        if isinstance(value, torch.Tensor) and value.device.type != "cpu"
    }


@functools.cache
def _tag() -> str:
    """What keys of caches lack: the repair, and the code of ops that compilers trace through."""
    code = ""
    with contextlib.suppress(OSError):  # where only compiled files are installed
        code = "".join(map(inspect.getsource, (policies_float8, tables_float8)))
    return f"amp_fx: pytorch#185873, {hashlib.sha256(code.encode()).hexdigest()[:16]}"


def repaired() -> contextlib.AbstractContextManager[None]:
    """Compile inside it; on-disk caches then keep apart what was compiled without.

    The repair stays for the process: another thread may be compiling.

    Relies on ``SchedulerNode.recompute_size_and_body`` and ``mutation_renames``, and on
    ``cache_key_tag`` being part of the keys of inductor's and AOTAutograd's caches.
    """
    _repair()
    tags = (torch.compiler.config.cache_key_tag, _tag())
    patch: contextlib.AbstractContextManager[None] = torch.compiler.config.patch(  # type: ignore[attr-defined]
        cache_key_tag=tags[0] if tags[1] in tags[0] else " ".join(filter(None, tags))
    )
    return patch


@functools.cache
def _repair() -> None:
    from torch._inductor.scheduler import SchedulerNode

    recompute = SchedulerNode.recompute_size_and_body

    @functools.wraps(recompute)
    def recompute_and_rename(self: SchedulerNode, *args: Any, **kwargs: Any) -> None:
        recompute(self, *args, **kwargs)
        if self.mutation_renames:
            self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    SchedulerNode.recompute_size_and_body = recompute_and_rename  # type: ignore[method-assign]


def compile_inner(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    cache: Caching | None = None,
    *,
    joint_pass: type[RefuseMixedDtypes] | None = None,
) -> Compiled:
    """Compiles a rewritten graph; call it with autocast off.

    Args:
        gm: The graph; it is edited.
        example_inputs: Its inputs.
        options: The options of the backend.
        cache: Decides which values of weights are cached; None caches nothing.
        joint_pass: Runs over joint graphs of forward and backward.
    """
    if options.compiler == "eager":
        return gm.forward
    if options.has_eager_kernels:
        devices = {t.device.type for t in example_inputs if isinstance(t, torch.Tensor)}
        _warn_of_devices(devices, options.numerics)
    if uses_inductor(example_inputs, options):
        with _running(joint_pass):
            return _inductor(gm, example_inputs, options, cache)
    return _aot_eager(gm, example_inputs, options, cache, joint_pass)


def _running(joint_pass: type[RefuseMixedDtypes] | None) -> contextlib.AbstractContextManager[None]:
    """Makes inductor run a pass over joint graphs, before one of the user's own."""
    from torch._inductor import config

    if joint_pass is None:
        return contextlib.nullcontext()
    patch: contextlib.AbstractContextManager[None] = config.patch(
        joint_custom_pre_pass=joint_pass(config.joint_custom_pre_pass)
    )
    return patch


def uses_inductor(example_inputs: Sequence[Any], options: Options) -> bool:
    """Whether a graph with such inputs is compiled by inductor."""
    return options.compiler == "inductor" and _can_use_inductor(example_inputs)


def inductor_config(options: Options) -> dict[str, Any]:
    """The settings of inductor that graphs are compiled with."""
    from torch._inductor import config

    wrapper = torch._TorchCompileInductorWrapper(options.mode, dict(options.inductor), None)  # type: ignore[no-untyped-call]
    settings = {**numerics_config(options), **wrapper.config}
    name = "post_grad_custom_pre_pass"
    settings[name] = after_autograd(options, settings.get(name, getattr(config, name)))
    return settings


def after_autograd(options: Options, following: Any = None) -> AfterAutograd:
    """Rewrites graphs of AOTAutograd before inductor lowers them."""
    from amp_fx.backend.after_autograd import AfterAutograd

    return AfterAutograd(
        has_wide_grads=options.has_wide_weight_grads,
        widens_products=not is_strict(options),
        raises_casts=options.raise_casts,
        keeps_kernels=options.has_eager_kernels,
        following=following,
    )


def numerics_config(options: Options) -> dict[str, Any]:
    """The settings of inductor that the option ``numerics`` stands for.

    ``numerics`` of inductor is there since torch 2.15; before, ``emulate_precision_casts`` rounds
    where eager code does. Patterns are off under ``"eager"``: they make other ops of several, as
    attention of its parts; so are other layouts, in which kernels add up in another order. Random
    numbers are those of eager code.
    """
    from torch._inductor import config

    if options.numerics is None:
        return {}
    is_eager = options.has_eager_kernels
    mode = "strict" if is_eager else options.numerics
    settings: dict[str, Any] = {"numerics": mode}
    if not hasattr(config, "numerics"):
        settings = {"emulate_precision_casts": mode in ("strict", "strict_pointwise")}
    if is_eager:
        names = ("layout_optimization", "pattern_matcher")
        settings |= {**dict.fromkeys(names, False), "fallback_random": True}
    return settings


def is_strict(options: Options) -> bool:
    """Whether generated code is to round as eager code does: here, or for all of a process."""
    from torch._inductor import config

    if options.numerics is not None:
        return options.numerics != "default"
    given = dict(options.inductor)
    names = ("numerics", "emulate_precision_casts")
    return any(given.get(n, getattr(config, n, False)) not in (False, "default") for n in names)


def _inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, cache: Caching | None
) -> Compiled:
    compile_inside = _backward_or_eager if options.fallback else compile_graph
    if cache is not None and cache.is_on():
        compile_inside = cache.wrap(compile_inside)
        with without_autograd_cache(), cache.partitioning():  # that cache lacks the call wrapper
            return compile_with_inductor(gm, example_inputs, options, compile_inside)
    return compile_with_inductor(gm, example_inputs, options, compile_inside)


def compile_with_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    compile_inside: Callable[..., Any],
) -> Compiled:
    """Compiles a rewritten graph, and the graphs that AOTAutograd makes of it."""
    if is_distributed():
        compile_inside = _narrowing(compile_inside, options)
    if options.numerics == "invariant":
        compile_inside = isolating(compile_inside)
        with without_autograd_cache(), composites():  # that cache knows the captured graph only
            return through_inductor(gm, example_inputs, options, compile_inside)
    return through_inductor(gm, example_inputs, options, compile_inside)


def through_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    compile_inside: Callable[..., Any],
) -> Compiled:
    """The same, with collectives left as they are."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    settings = {**_float8_config(gm), **inductor_config(options)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(left_on_error())  # tracing runs the graph
        # Kernels get buffers of fixed dtypes, also where backward() is called in a region.
        stack.enter_context(called_without_autocast())
        # Inductor's own freezing would take kept copies for constant, and weights.
        stack.enter_context(config.patch(freezing=False))
        stack.enter_context(_region_markers_cacheable(gm))
        stack.enter_context(repaired())
        stack.enter_context(_in_keys(options))
        stack.enter_context(settled(settings))
        return compile_fx(  # type: ignore[return-value]
            gm,
            example_inputs,
            inner_compile=compile_inside,
            config_patches=settings,
            decompositions=_whole_ops(options),
        )


def _float8_config(gm: fx.GraphModule) -> dict[str, Any]:
    """Lets kernels of graphs with float8 products be as long as inductor allows on a CPU.

    On GPUs it ends a kernel after 30 ops. Scales, and what undoes them, are 20 of those: it then
    writes float32 tensors in the midst of a norm's backward, which others read again.
    """
    from torch._inductor import config

    name = "realize_opcount_threshold"
    nodes = gm.graph.find_nodes(op="call_function", target=float8_product)
    is_unset = getattr(config, name, 0) is None
    return {name: config.realize_cpu_opcount_threshold} if nodes and is_unset else {}


def _whole_ops(options: Options) -> dict[Any, Any] | None:
    """The decompositions that leave ops whole whose kernels are needed; None for inductor's own."""
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    if not options.has_eager_kernels:
        return None
    with config.patch(fallback_random=True):  # which decides whether dropout is among them
        return keeping_whole(select_decomp_table())


def _in_keys(options: Options) -> contextlib.AbstractContextManager[None]:
    """Tells on-disk caches whether what a graph gathers was narrowed.

    Relies on ``cache_key_tag`` being part of the keys of inductor's and AOTAutograd's caches.
    """
    if not is_distributed():
        return contextlib.nullcontext()
    config: Any = torch.compiler.config
    tag = f"{config.cache_key_tag} amp_fx: narrow_gathers={options.narrow_gathers}"
    patch: contextlib.AbstractContextManager[None] = config.patch(cache_key_tag=tag.strip())
    return patch


def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compiles one graph of AOTAutograd: a backward at any later time, hence the context."""
    from torch._inductor.compile_fx import compile_fx_inner

    parts = apart(gm, kwargs.get("static_input_idxs") or ())
    stage = "backward" if kwargs.get("is_backward") else "forward"
    with working(f"inductor's {stage}"), repaired():
        compiled = compile_fx_inner(gm, example_inputs, **kwargs)
    if hasattr(compiled, "current_callable"):
        compiled.current_callable = parts.wrap(compiled.current_callable)
    return compiled


def _backward_or_eager(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compiles one graph of AOTAutograd; if that fails for a backward, runs it op by op.

    A backward is compiled when it is first run, where nobody could fall back from it. What
    fails in a forward is left to the caller, who has the graph before differentiation.
    """
    if not kwargs.get("is_backward"):
        return compile_graph(gm, example_inputs, **kwargs)
    ours = fx.GraphModule(gm, copy.copy(gm.graph))  # inductor edits the graph it gets
    try:
        return compile_graph(gm, example_inputs, **kwargs)
    except Exception as error:
        log.debug("falling back", exc_info=True)
        warn_eager(error, "inductor", ours.graph, "backward graph")

        def run(inputs: list[Any]) -> Any:
            args = list(inputs)
            inputs.clear()
            return ours(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def _region_markers_cacheable(gm: fx.GraphModule) -> contextlib.AbstractContextManager[None]:
    """Lets AOTAutograd's on-disk cache take graphs with opaque regions, with exceptions.

    Before torch 2.15 it passes over ``_enter_autocast`` because the ambient state is not in its
    key; ours spell out device and dtype as constant arguments, which are. Those that carry a
    policy mean another one in another process, and keep the graph out of the cache, which would
    take it since 2.15.

    Relies on ``torch._inductor.config.unsafe_marked_cacheable_functions``, and on
    ``torch._functorch.config.enable_autograd_cache`` and ``enable_remote_autograd_cache``.
    """
    from torch._inductor import config

    graphs = [child.graph for child in gm.modules() if isinstance(child, torch.fx.GraphModule)]
    regions = [g.find_nodes(op="call_function", target=_enter_autocast) for g in graphs]
    if any(node.args[0] in CARRIERS for nodes in regions for node in nodes):
        return without_autograd_cache()
    marked = dict(config.unsafe_marked_cacheable_functions)
    for name in ("_enter_autocast", "_exit_autocast"):
        marked[f"torch.amp.autocast_mode.{name}"] = "amp_fx"
    patch: contextlib.AbstractContextManager[None] = config.patch(
        unsafe_marked_cacheable_functions=marked
    )
    return patch


def _aot_eager(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    cache: Caching | None,
    joint_pass: type[RefuseMixedDtypes] | None,
) -> Compiled:
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def partition(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if joint_pass is not None:
            joint_pass()(gm.graph)
        into = min_cut_rematerialization_partition if cache is None else cache.partition
        return into(gm, *args, **kwargs)

    def compile_inside(graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
        return boxed_nop(graph, list(inputs))

    if cache is not None:
        compile_inside = cache.wrap(compile_inside)
    if is_distributed():
        compile_inside = _narrowing(compile_inside, options)
    is_invariant = options.numerics == "invariant"
    if is_invariant:
        compile_inside = isolating(compile_inside)
    compiler = aot_autograd(
        fw_compiler=functools.partial(compile_inside, is_inference=False),
        bw_compiler=functools.partial(compile_inside, is_backward=True),
        inference_compiler=functools.partial(compile_inside, is_inference=True),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    forms = composites() if is_invariant else contextlib.nullcontext()
    with left_on_error(), forms:  # tracing runs the graph
        return compiler(gm, list(example_inputs))


def _narrowing(compile_inside: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """A compiler of AOTAutograd's graphs that looks after their collectives first."""

    def compile_narrowed(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        look_after_collectives(gm, narrows=options.narrow_gathers)
        return compile_inside(gm, example_inputs, **kwargs)

    return compile_narrowed


def isolating(compile_inside: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler of AOTAutograd's graphs that keeps rows apart, but in a backward."""

    def compile_isolated(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        if not kwargs.get("is_backward"):
            record(isolate_rows(gm.graph, _static_inputs()))
            gm.recompile()
        return compile_inside(gm, example_inputs, **kwargs)

    return compile_isolated


def _static_inputs() -> list[int]:
    """Returns the positions of the inputs of AOTAutograd's graphs that are weights.

    Relies on ``TracingContext.fw_metadata`` and its ``static_input_indices``, as inductor does.
    """
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    return [] if metadata is None else list(metadata.static_input_indices)


def look_after_collectives(gm: fx.GraphModule, *, narrows: bool) -> None:
    """Narrows what a graph of AOTAutograd gathers, and counts what goes over the wire."""
    before = wire_bytes(gm.graph)
    if not before:
        return
    counts = Counter(bytes_sent=before, bytes_sent_before=before)
    if narrows:
        result = NarrowGathers().call(gm)
        if result.modified:
            gm.graph.lint()
            gm.recompile()
        counts = Counter(bytes_sent=wire_bytes(gm.graph), bytes_sent_before=before)
        counts.update(result.counts)
    log.info("collectives: %s", dict(counts))
    record(counts)


def _can_use_inductor(example_inputs: Sequence[Any]) -> bool:
    """Inductor builds C++ for CPU tensors; without a compiler the graph runs by AOTAutograd."""
    has_cpu = any(isinstance(t, torch.Tensor) and t.device.type == "cpu" for t in example_inputs)
    if not has_cpu or has_cpp_compiler():
        return True
    _warn_no_compiler()
    return False


@functools.cache
def has_cpp_compiler() -> bool:
    """Whether inductor finds the C++ compiler that it needs for CPU kernels.

    Relies on ``torch._inductor.cpp_builder.get_cpp_compiler`` raising if there is none.
    """
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError, OSError):
        return False
    return True


def _warn_of_devices(device_types: set[str], numerics: str | None = "eager") -> None:
    for name in sorted(device_types - {"cpu", "meta"}):
        if numerics == "invariant":
            raise UnsupportedError(
                f"on {name}, numerics='invariant' cannot be promised: whether kernels give a row "
                "the same bits in every batch is measured for the CPU only. Use numerics='eager'"
            )
        _warn_strict(name)


@functools.cache
def _warn_strict(device_type: str) -> None:
    log.warning(
        "on %s, numerics='eager' means inductor's 'strict': which generated code has the bits of "
        "eager autocast is known for the CPU only",
        device_type,
    )


@functools.cache
def _warn_no_compiler() -> None:
    log.warning("no C++ compiler found, which inductor needs on CPU: continuing with 'aot_eager'")
