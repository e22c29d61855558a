"""The inner compilers that a rewritten graph is handed to."""

from __future__ import annotations

import copy
import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.amp.autocast_mode import _enter_autocast

from amp_fx.fallback import warn_eager
from amp_fx.inductor_repair import repaired
from amp_fx.regions.policy_codes import CARRIERS

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Sequence

    from amp_fx.options import Options

    Compiled = Callable[..., Any]

log = logging.getLogger(__name__)


def compile_inner(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Compiled:
    """Compiles a rewritten graph; call it with autocast off."""
    if options.compiler == "eager":
        return gm.forward
    if not uses_inductor(example_inputs, options):
        return _aot_eager(gm, example_inputs)
    return _inductor(gm, example_inputs, options)


def uses_inductor(example_inputs: Sequence[Any], options: Options) -> bool:
    """Whether a graph with such inputs is compiled by inductor."""
    return options.compiler == "inductor" and _can_use_inductor(example_inputs)


def inductor_config(options: Options) -> dict[str, Any]:
    """The settings of inductor that graphs are compiled with."""
    wrapper = torch._TorchCompileInductorWrapper(options.mode, dict(options.inductor), None)  # type: ignore[no-untyped-call]
    return dict(wrapper.config)


def _inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Compiled:
    compile_inside = _backward_or_eager if options.fallback else compile_graph
    return compile_with_inductor(gm, example_inputs, options, compile_inside)


def compile_with_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    compile_inside: Callable[..., Any],
) -> Compiled:
    """Compiles a rewritten graph, and the graphs that AOTAutograd makes of it.

    Args:
        gm: The graph.
        example_inputs: Its inputs.
        options: The options of the backend.
        compile_inside: Compiles a graph of AOTAutograd, as ``compile_graph`` does.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    # Inductor's own freezing would take kept copies for constant, and weights.
    with _region_markers_cacheable(gm), repaired(), config.patch(freezing=False):
        return compile_fx(  # type: ignore[return-value]
            gm,
            example_inputs,
            inner_compile=compile_inside,
            config_patches=inductor_config(options),
        )


def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compiles one graph of AOTAutograd: a backward at any later time, hence the context."""
    from torch._inductor.compile_fx import compile_fx_inner

    with repaired():
        return compile_fx_inner(gm, example_inputs, **kwargs)


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
    """Lets AOTAutograd's on-disk cache take graphs with islands in them, but for some.

    Before torch 2.15 it passes over ``_enter_autocast`` because the ambient state is not in its
    key; ours spell out device and dtype as constant arguments, which are. Those that carry a
    policy mean another one in another process, and keep the graph out of the cache, which would
    take it since 2.15.

    Relies on ``torch._inductor.config.unsafe_marked_cacheable_functions``, and on
    ``torch._functorch.config.enable_autograd_cache`` and ``enable_remote_autograd_cache``.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    graphs = [child.graph for child in gm.modules() if isinstance(child, torch.fx.GraphModule)]
    regions = [g.find_nodes(op="call_function", target=_enter_autocast) for g in graphs]
    patch: contextlib.AbstractContextManager[None]
    if any(node.args[0] in CARRIERS for nodes in regions for node in nodes):
        patch = functorch_config.patch(
            enable_autograd_cache=False, enable_remote_autograd_cache=False
        )
        return patch
    marked = dict(config.unsafe_marked_cacheable_functions)
    for name in ("_enter_autocast", "_exit_autocast"):
        marked[f"torch.amp.autocast_mode.{name}"] = "amp_fx"
    patch = config.patch(unsafe_marked_cacheable_functions=marked)
    return patch


def _aot_eager(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager(gm, list(example_inputs))


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


@functools.cache
def _warn_no_compiler() -> None:
    log.warning("no C++ compiler found, which inductor needs on CPU: going on with 'aot_eager'")
