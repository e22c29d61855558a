"""Runs rewritten graphs op by op after AOTAutograd."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from amp_fx.backend.collectives import narrowing
from amp_fx.backend.numerics import whole_ops
from amp_fx.passes.keep_eager_kernels import exact_decompositions
from amp_fx.regions.state import left_on_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

    from amp_fx.backend.backward import RefuseMixedDtypes
    from amp_fx.backend.caching import Caching
    from amp_fx.options import Options

    Compiled = Callable[..., Any]


def compile_with_aot_eager(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    cache: Caching | None,
    joint_pass: type[RefuseMixedDtypes] | None,
) -> Compiled:
    """Returns a rewritten graph that AOTAutograd differentiates and runs op by op."""
    from amp_fx.torch_private.aot_autograd import (
        aot_autograd,
        boxed_nop,
        min_cut_rematerialization_partition,
    )

    def partition(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if joint_pass is not None:
            joint_pass()(gm.graph)
        into = min_cut_rematerialization_partition if cache is None else cache.partition
        return into(gm, *args, **kwargs)

    def compile_inside(graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
        return boxed_nop(graph, list(inputs))

    if cache is not None:
        compile_inside = cache.wrap(compile_inside)
    compile_inside = narrowing(compile_inside, options)
    compiler = aot_autograd(
        fw_compiler=functools.partial(compile_inside, is_inference=False),
        bw_compiler=functools.partial(compile_inside, is_backward=True),
        inference_compiler=functools.partial(compile_inside, is_inference=True),
        partition_fn=partition,
        decompositions=exact_decompositions({}) if options.has_eager_kernels else None,
        keep_inference_input_mutations=True,
    )
    # Tracing runs the graph.
    with left_on_error(), whole_ops(options):
        return compiler(gm, list(example_inputs))
