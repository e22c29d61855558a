"""Inductor's compilers of graphs, its lowerings, and its freezing."""

from __future__ import annotations

import types
from typing import Any

import torch

from torch._inductor import aoti_compile_and_package, freezing
from torch._inductor import compile_fx as compile_fx_module
from torch._inductor import ir
from torch._inductor.codecache import CacheabilityValidator, FxGraphCachePickler
from torch._inductor.codegen.cpp_gemm_template import CppGemmTemplate, expand_bias
from torch._inductor.codegen.cpp_micro_gemm import CppMicroGemmFP32Vec, create_micro_gemm
from torch._inductor.constant_folding import replace_node_with_constant
from torch._inductor.decomposition import decompositions, select_decomp_table
from torch._inductor.freezing_utils import enter_freezing, is_frozen_param, record_has_frozen_params
from torch._inductor.fx_passes import freezing_patterns
from torch._inductor.fx_passes.freezing_patterns import freezing_passes
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.kernel.bmm import tuned_bmm
from torch._inductor.lowering import (
    constrain_to_fx_strides,
    lowerings,
    make_fallback,
    make_pointwise,
    register_lowering,
)
from torch._inductor.pattern_matcher import PatternMatcherPass
from torch._inductor.scheduler import SchedulerNode
from torch._inductor.select_algorithm import DataProcessorChoiceCallerWrapper
from torch._inductor.utils import fresh_cache
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.utils import parallel_num_threads
from torch._inductor.virtualized import V, ops
from torch.utils._triton import has_triton

__all__ = (
    "CacheabilityValidator",
    "DataProcessorChoiceCallerWrapper",
    "FxGraphCachePickler",
    "GraphLowering",
    "PatternMatcherPass",
    "SchedulerNode",
    "aoti_compile_and_package",
    "compile_fx_module",
    "constrain_to_fx_strides",
    "decompositions",
    "enter_freezing",
    "freezing",
    "freezing_passes",
    "freezing_patterns",
    "fresh_cache",
    "has_triton",
    "is_frozen_param",
    "lowerings",
    "make_fallback",
    "make_pointwise",
    "ops",
    "record_has_frozen_params",
    "register_lowering",
    "replace_node_with_constant",
    "select_decomp_table",
    "tuned_bmm",
    "view_to_reshape",
)


def few_rows_block(rows: int, columns: int, depth: int) -> int | None:
    """Returns the columns of a block of the C++ template's weight, if it computes in float32.

    Relies on ``create_micro_gemm``, by which the template chooses its kernel, reading nothing of the
    graph but ``sizevars``.
    """
    with V.set_graph_handler(types.SimpleNamespace(sizevars=SizeVarAllocator())):
        kernel = _micro_gemm(rows, columns, depth)
    is_plain = type(kernel) is CppMicroGemmFP32Vec
    return kernel.register_blocking.block_n if is_plain else None  # type: ignore[union-attr]


def _micro_gemm(rows: int, columns: int, depth: int) -> Any:
    dtypes = {
        "input_dtype": torch.bfloat16,
        "input2_dtype": torch.bfloat16,
        "output_dtype": torch.float32,
        "compute_dtype": torch.float32,
    }
    threads = parallel_num_threads()
    return create_micro_gemm("", rows, columns, depth, **dtypes, num_threads=threads)


def lower_few_rows_product(op: Any) -> None:
    """Makes inductor lower an op to its C++ template with a weight that is blocked already.

    Relies on ``CppGemmTemplate``, which calls itself with blocked weights under ``max_autotune``.

    Args:
        op: Takes rows, the blocked weight, a bias or None, and the number of columns.
    """

    @register_lowering(op, type_promotion_kind=None)
    def lower(x: Any, blocked: Any, bias: Any, columns: int) -> Any:
        x = ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x))
        rows, depth = x.get_size()
        inputs = [x, blocked]
        if bias is not None:
            inputs.append(expand_bias(ir.ExternKernel.realize_input(bias), x))
        layout = ir.FixedLayout(x.get_device(), x.get_dtype(), [rows, columns])
        kernel = _micro_gemm(rows, columns, depth)
        template = CppGemmTemplate(
            inputs,
            layout,
            parallel_num_threads(),
            kernel.register_blocking,
            has_bias=bias is not None,
            name=type(kernel).__name__,
        )
        return template.generate().output_node()
