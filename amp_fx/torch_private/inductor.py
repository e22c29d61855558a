"""Inductor's graph compilers, lowerings and freezing."""

from __future__ import annotations

from torch._inductor import aoti_compile_and_package, freezing
from torch._inductor import compile_fx as compile_fx_module
from torch._inductor.codecache import CacheabilityValidator, FxGraphCachePickler
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
from torch._inductor.virtualized import ops
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
