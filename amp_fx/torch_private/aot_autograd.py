"""AOTAutograd, its partitioner and its settings."""

from __future__ import annotations

from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import compile_utils, config
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

__all__ = (
    "aot_autograd",
    "boxed_nop",
    "compile_utils",
    "config",
    "make_boxed_func",
    "min_cut_rematerialization_partition",
)
