"""Compiles rewritten graphs with TorchInductor."""

from __future__ import annotations

import contextlib
import copy
import logging
from typing import TYPE_CHECKING, Any

from torch import fx

from amp_fx.backend.collectives import narrowing, narrowing_in_keys
from amp_fx.backend.cuda_graphs import separate_inputs, settled
from amp_fx.backend.disk_caches import region_markers_cacheable, without_autograd_cache
from amp_fx.backend.fallback import warn_eager
from amp_fx.backend.inductor_repair import repaired
from amp_fx.backend.numerics import is_strict, numerics_config, whole_ops
from amp_fx.graphs.decomposed_kernels import decompose_products
from amp_fx.passes.keep_eager_kernels import exact_decompositions
from amp_fx.policies.float8 import float8_product
from amp_fx.policies.rounding import lower_rounded
from amp_fx.progress import working
from amp_fx.regions.state import called_without_autocast, left_on_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amp_fx.backend.after_autograd import AfterAutograd
    from amp_fx.backend.backward import RefuseMixedDtypes
    from amp_fx.backend.caching import Caching
    from amp_fx.options import Options

    Compiled = Callable[..., Any]

log = logging.getLogger("amp_fx.inner")


def compile_cached_with_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    cache: Caching | None,
    joint_pass: type[RefuseMixedDtypes] | None,
) -> Compiled:
    """Compiles a rewritten graph, and caches what it computes from weights."""
    compile_inside = _backward_or_eager if options.fallback else compile_graph
    with contextlib.ExitStack() as stack:
        stack.enter_context(_joint_pass_added(joint_pass))
        if cache is not None:
            compile_inside = cache.wrap(compile_inside)
            stack.enter_context(without_autograd_cache())  # that cache lacks the call wrapper
            stack.enter_context(cache.partitioning())
        return compile_with_inductor(gm, example_inputs, options, compile_inside)


def _joint_pass_added(
    joint_pass: type[RefuseMixedDtypes] | None,
) -> contextlib.AbstractContextManager[None]:
    """Makes inductor run a pass over joint graphs, before the user's own pass."""
    from amp_fx.torch_private.inductor_config import config

    if joint_pass is None:
        return contextlib.nullcontext()
    patch: contextlib.AbstractContextManager[None] = config.patch(
        joint_custom_pre_pass=joint_pass(config.joint_custom_pre_pass)
    )
    return patch


def compile_with_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    compile_inside: Callable[..., Any],
) -> Compiled:
    """Compiles a rewritten graph with AOTAutograd and inductor.

    Args:
        gm: The graph; it is edited.
        example_inputs: Its inputs.
        options: The options of the backend.
        compile_inside: Compiles each graph of AOTAutograd; has the signature of inductor's
            ``compile_fx_inner``.
    """
    from amp_fx.torch_private.inductor import compile_fx_module
    from amp_fx.torch_private.inductor_config import config

    settings = {**_float8_config(gm), **inductor_config(options)}
    lower_rounded()
    if not is_strict(options):
        decompose_products(gm)
    with contextlib.ExitStack() as stack:
        stack.enter_context(left_on_error())  # tracing runs the graph
        # Kernels write to buffers of fixed dtypes, also if backward() is called in a region.
        stack.enter_context(called_without_autocast())
        # Inductor's own freezing would treat cached values and weights as constants.
        stack.enter_context(config.patch(freezing=False))
        stack.enter_context(region_markers_cacheable())
        stack.enter_context(repaired())
        stack.enter_context(narrowing_in_keys(options))
        stack.enter_context(settled(settings))
        stack.enter_context(whole_ops(options))
        return compile_fx_module.compile_fx(  # type: ignore[return-value]
            gm,
            example_inputs,
            inner_compile=narrowing(compile_inside, options),
            config_patches=settings,
            decompositions=_decompositions(options),
        )


def inductor_config(options: Options) -> dict[str, Any]:
    """Returns the settings of inductor for the options of the backend."""
    from amp_fx.torch_private.inductor_config import TorchCompileInductorWrapper, config

    wrapper = TorchCompileInductorWrapper(options.mode, dict(options.inductor), None)  # type: ignore[no-untyped-call]
    settings = {**numerics_config(options), **wrapper.config}
    name = "post_grad_custom_pre_pass"
    settings[name] = after_autograd(options, settings.get(name, getattr(config, name)))
    return settings


def after_autograd(options: Options, following: Any = None) -> AfterAutograd:
    """Returns the pass that inductor runs on AOTAutograd's graphs before it lowers them."""
    from amp_fx.backend.after_autograd import AfterAutograd

    return AfterAutograd(
        has_wide_grads=options.has_wide_weight_grads,
        chooses_kernels=not is_strict(options),
        keeps_kernels=options.has_eager_kernels,
        following=following,
    )


def _float8_config(gm: fx.GraphModule) -> dict[str, Any]:
    """Returns settings that let inductor fuse as many ops on GPUs as on CPUs, for float8 products.

    By default, inductor ends a GPU kernel after 30 ops. Scaling and unscaling take 20 of them, so
    the backward of a norm would be split and float32 tensors written between its parts.
    """
    from amp_fx.torch_private.inductor_config import config

    name = "realize_opcount_threshold"
    nodes = gm.graph.find_nodes(op="call_function", target=float8_product)
    is_unset = getattr(config, name, 0) is None
    return {name: config.realize_cpu_opcount_threshold} if nodes and is_unset else {}


def _decompositions(options: Options) -> dict[Any, Any] | None:
    """Returns decompositions that keep ops of ATen's kernels whole; None means inductor's."""
    from amp_fx.torch_private.inductor import select_decomp_table
    from amp_fx.torch_private.inductor_config import config

    if not options.has_eager_kernels:
        return None
    with config.patch(fallback_random=True):  # which decides whether dropout is among them
        return exact_decompositions(select_decomp_table())


def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compiles one graph of AOTAutograd.

    A backward may be compiled long after its forward, so the context is entered here.
    """
    from amp_fx.torch_private.inductor import compile_fx_module

    separated = separate_inputs(gm, kwargs.get("static_input_idxs") or ())
    stage = "backward" if kwargs.get("is_backward") else "forward"
    with working(f"inductor's {stage}"), repaired():
        compiled = compile_fx_module.compile_fx_inner(gm, example_inputs, **kwargs)
    if hasattr(compiled, "current_callable"):
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
        return run
