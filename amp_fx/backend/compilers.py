"""Compiles rewritten graphs: with inductor, op by op after AOTAutograd, or not at all."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from typing import TYPE_CHECKING, Any

from torch import fx

from amp_fx.backend.disk_caches import (
    keyed,
    keyed_graph,
    region_markers_cacheable,
    without_autograd_cache,
)
from amp_fx.backend.fallback import warn_eager
from amp_fx.backend.lower import AotGraph, has_cudagraphs, lower_graph, pack_graph, rewrite_graph
from amp_fx.backend.numerics import (
    check_devices,
    device_types_of,
    inductor_config,
    is_strict,
    uses_inductor,
    whole_ops,
)
from amp_fx.backend.pipeline import joint_passes, run_passes
from amp_fx.graphs.bodies import enters_regions
from amp_fx.graphs.decomposed_kernels import decompose_products
from amp_fx.graphs.shared_bodies import inline_shared_bodies
from amp_fx.passes.keep_eager_kernels import exact_decompositions
from amp_fx.passes.separate_inputs import SEPARATED
from amp_fx.policies.float8 import float8_product
from amp_fx.policies.rounding import lower_rounded
from amp_fx.progress import working
from amp_fx.regions.state import called_without_autocast, left_on_error
from amp_fx.torch_private.aot_autograd import make_boxed_func
from amp_fx.torch_private.fake_tensors import detect_fake_mode
from amp_fx.torch_private.inductor_passes import CustomGraphPass
from amp_fx.torch_private.patches import repaired_inductor
from amp_fx.weights.pack import CannotPackError, packing, run_fake

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amp_fx.backend.lower import Caching
    from amp_fx.options import Options
    from amp_fx.weights.plan import CachePlan

    Compiled = Callable[..., Any]

log = logging.getLogger("amp_fx.inner")


def compile_inner(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    caching: Caching | None = None,
    *,
    refuses_mixtures: bool = False,
) -> Compiled:
    """Compiles a rewritten graph; call it with autocast off.

    Args:
        gm: The graph; it is edited.
        example_inputs: Its inputs.
        options: The options of the backend.
        caching: Values of weights to cache; None caches nothing.
        refuses_mixtures: Whether to raise ``MixedDtypesError`` for a backward whose products have
            inputs of several dtypes.
    """
    if not options.uses_aot_autograd or is_strict(options):
        # Torch differentiates a body only while it traces, and adds up its gradients in another
        # order than eager code.
        inline_shared_bodies(gm)
    if options.compiler == "eager":
        return gm.forward
    if callable(options.compiler):
        compiled: Compiled = options.compiler(gm, example_inputs)
        return compiled
    device_types = device_types_of(example_inputs)
    if options.has_eager_kernels:
        check_devices(device_types)
    if not uses_inductor(device_types, options):
        return compile_with_aot_eager(
            gm, example_inputs, options, caching, refuses_mixtures=refuses_mixtures
        )
    from amp_fx.torch_private.inductor_config import config

    compile_inside = _backward_or_eager if options.fallback else compile_graph
    with contextlib.ExitStack() as stack:
        if refuses_mixtures:
            joint_passes_added = JointPasses(config.joint_custom_pre_pass)
            stack.enter_context(config.patch(joint_custom_pre_pass=joint_passes_added))
        if caching is not None:
            stack.enter_context(without_autograd_cache())  # that cache lacks the call wrapper
            stack.enter_context(caching.partitioning())
        return compile_with_inductor(
            gm,
            example_inputs,
            options,
            functools.partial(
                lower_graph, options=options, caching=caching, compile_graph=compile_inside
            ),
        )


def compile_with_inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, lower: Callable[..., Any]
) -> Compiled:
    """Compiles a rewritten graph with AOTAutograd and inductor.

    Args:
        gm: The graph; it is edited.
        example_inputs: Its inputs.
        options: The options of the backend.
        lower: Compiles each graph of AOTAutograd; has the signature of inductor's
            ``compile_fx_inner``.
    """
    from amp_fx.torch_private.inductor import compile_fx_module, select_decomp_table
    from amp_fx.torch_private.inductor_config import config

    settings = inductor_config(options)
    is_unset = getattr(config, "realize_opcount_threshold", 0) is None
    if is_unset and gm.graph.find_nodes(op="call_function", target=float8_product):
        # Inductor fuses as many ops on GPUs as on CPUs then. By default, it ends a GPU kernel after
        # 30 ops. Scaling and unscaling take 20 of them, so the backward of a norm would be split
        # and float32 tensors written between its parts.
        threshold = config.realize_cpu_opcount_threshold
        settings = {"realize_opcount_threshold": threshold, **settings}
    decompositions = None  # inductor's
    if options.has_eager_kernels:
        with config.patch(fallback_random=True):  # which decides whether dropout is among them
            decompositions = exact_decompositions(select_decomp_table())
    lower_rounded()
    if not is_strict(options):
        decompose_products(gm)
    with contextlib.ExitStack() as stack:
        stack.enter_context(left_on_error())  # tracing runs the graph
        # Kernels write to buffers of fixed dtypes, also if backward() is called in a region.
        stack.enter_context(called_without_autocast())
        # Inductor's own freezing would treat cached values and weights as constants.
        stack.enter_context(config.patch(freezing=False))
        if enters_regions(gm):
            stack.enter_context(region_markers_cacheable())
        stack.enter_context(repaired_inductor())
        stack.enter_context(keyed(options))
        # A hit of AOTAutograd's cache would lack the wrapper of ``SeparatedInputs``.
        if has_cudagraphs(settings):
            stack.enter_context(without_autograd_cache())
        stack.enter_context(whole_ops(options))
        return compile_fx_module.compile_fx(  # type: ignore[return-value]
            gm,
            example_inputs,
            inner_compile=lower,
            config_patches=settings,
            decompositions=decompositions,
        )


def compile_with_aot_eager(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    caching: Caching | None,
    *,
    refuses_mixtures: bool,
) -> Compiled:
    """Returns a rewritten graph that AOTAutograd differentiates and runs op by op."""
    from amp_fx.torch_private.aot_autograd import (
        aot_autograd,
        boxed_nop,
        min_cut_rematerialization_partition,
    )

    def partition(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if refuses_mixtures:
            run_passes(gm, joint_passes())
        into = min_cut_rematerialization_partition if caching is None else caching.partition
        return into(gm, *args, **kwargs)

    lower = functools.partial(
        lower_graph,
        options=options,
        caching=caching,
        compile_graph=lambda graph, inputs, **_: boxed_nop(graph, list(inputs)),
        is_inductor=False,
    )
    compiler = aot_autograd(
        fw_compiler=functools.partial(lower, is_inference=False),
        bw_compiler=functools.partial(lower, is_backward=True),
        inference_compiler=functools.partial(lower, is_inference=True),
        partition_fn=partition,
        decompositions=exact_decompositions({}) if options.has_eager_kernels else None,
        keep_inference_input_mutations=True,
    )
    # Tracing runs the graph.
    with left_on_error(), whole_ops(options):
        return compiler(gm, list(example_inputs))


def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compiles one rewritten graph of AOTAutograd with inductor.

    A backward may be compiled long after its forward, so the context is entered here.
    """
    from amp_fx.torch_private.inductor import compile_fx_module

    separated = gm.meta.pop(SEPARATED, None)  # keys of caches contain ``gm.meta``
    stage = "backward" if kwargs.get("is_backward") else "forward"
    with working(f"inductor's {stage}"), repaired_inductor(), keyed_graph(gm):
        compiled = compile_fx_module.compile_fx_inner(gm, example_inputs, **kwargs)
    if separated is None:
        return compiled
    if not hasattr(compiled, "current_callable"):  # a graph without calls is a plain function
        return separated.wrap(compiled)
    compiled.current_callable = separated.wrap(compiled.current_callable)
    return compiled


def _backward_or_eager(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compiles one graph of AOTAutograd. A backward that cannot be compiled runs op by op.

    A backward is compiled at its first run, when the backend can no longer fall back. Errors of a
    forward are raised: the caller falls back to the graph before differentiation.
    """
    if not kwargs.get("is_backward"):
        return compile_graph(gm, example_inputs, **kwargs)
    uncompiled = fx.GraphModule(gm, copy.copy(gm.graph))  # inductor edits its graph
    separated = gm.meta.get(SEPARATED)
    # The graph is after AOTAutograd, whose casts are nodes: run op by op, it has the same dtypes.
    try:
        return compile_graph(gm, example_inputs, **kwargs)
    except Exception as error:
        log.debug("falling back", exc_info=True)
        warn_eager(error, "inductor", uncompiled.graph, "backward graph")

        def run(inputs: list[Any]) -> Any:
            args = list(inputs)
            inputs.clear()
            return uncompiled(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run if separated is None else separated.wrap(run)


class JointPasses(CustomGraphPass):
    """Runs ``joint_passes`` where inductor runs its ``joint_custom_pre_pass``.

    Args:
        following: The user's own pass, which runs afterwards.
    """

    def __init__(self, following: Any = None) -> None:
        self.following = following

    def __call__(self, graph: fx.Graph) -> None:
        """Runs the passes over a graph of a forward and its backward."""
        assert graph.owning_module is not None
        run_passes(graph.owning_module, joint_passes())
        if self.following is not None:
            self.following(graph)

    def uuid(self) -> Any:
        """Returns the key of the user's pass; amp_fx's own is in the tag (``keyed``)."""
        if self.following is None:
            return "amp_fx"
        return self.following.uuid() if isinstance(self.following, CustomGraphPass) else None


def plan_graphs(
    gm: fx.GraphModule, example_inputs: Sequence[Any], caching: Caching
) -> list[CachePlan]:
    """Returns what the graphs of a rewritten graph cache. Computes and compiles nothing.

    Args:
        gm: The rewritten graph; it is edited.
        example_inputs: Its inputs, fake.
        caching: Values to cache.
    """
    plans: list[CachePlan] = []
    options = caching.options

    def plan_graph(graph: fx.GraphModule, given: Sequence[Any], **kwargs: Any) -> Any:
        aot = AotGraph(graph, given, kwargs, is_counted=False)
        packable = caching.to_pack(aot)
        if packable is not None:
            fakes = {i: given[i] for i in packable.weights}
            try:
                with packing(detect_fake_mode(given)):
                    plans.append(pack_graph(aot.copy(), options, packable, fakes, run_fake)[1])
                return make_boxed_func(graph.forward)
            except CannotPackError:
                pass
        if aot.stage != "backward":
            plans.append(rewrite_graph(aot.copy(), options, caching.in_graph(aot)))
        return make_boxed_func(graph.forward)

    with without_autograd_cache(), caching.partitioning():
        compile_with_inductor(gm, example_inputs, options, plan_graph)
    return plans
