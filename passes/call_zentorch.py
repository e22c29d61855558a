"""Calls zentorch's kernel for attention if the program imported zentorch.

Before:
    %attended = aten._scaled_dot_product_flash_attention_for_cpu(%query, %key, %value)
After:
    %attended = zentorch.zentorch_sdpa(%query, %key, %value)

zentorch is AMD's plugin for PyTorch. Its kernel is as exact as ATen's and takes half to three
quarters of its time on AVX512 with bfloat16 units (``docs/benchmarks.md``). It reads no weights, so
zentorch's reordering of weights in place cannot touch any.

Left alone: products of many rows, which take as long in oneDNN; float16 and float32, in which the
kernel is not faster; processors with AMX units, which ATen's kernel uses; dropout; attention whose
sums are read, as for gradients; inputs whose last dimension is not contiguous, which the kernel
refuses.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, cast

import torch

from amp_fx.devices.low_dtypes import bfloat16_units
from amp_fx.graphs.metadata import VALUE
from amp_fx.passes.open_attention import ATTENTION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx


def zentorch_version() -> str | None:
    """Returns the version of zentorch if the program imported it and this CPU gains from it."""
    zentorch = sys.modules.get("zentorch")
    has_kernel = hasattr(torch.ops.zentorch, "zentorch_sdpa")
    is_faster = bfloat16_units() == ["avx512_bf16"]
    return zentorch.__version__ if zentorch and has_kernel and is_faster else None


def call_zentorch(graph: fx.Graph) -> int:
    """Replaces kernels of a graph in place.

    Args:
        graph: A graph of AOTAutograd whose nodes have their values in ``meta["val"]``.

    Returns:
        The number of kernels that were replaced.
    """
    if zentorch_version() is None:
        return 0
    attentions = graph.find_nodes(op="call_function", target=ATTENTION)
    replaced = [node for node in attentions if _is_replaced(node)]
    for node in replaced:
        node.target = torch.ops.zentorch.zentorch_sdpa.default
    return len(replaced)


def _is_replaced(node: fx.Node) -> bool:
    tensors = [VALUE.of(operand) for operand in cast("Sequence[fx.Node]", node.args[:3])]
    is_low = all(tensor.dtype is torch.bfloat16 for tensor in tensors)
    is_contiguous = all(tensor.stride(-1) == 1 for tensor in tensors)
    has_dropout = len(node.args) > 3 and node.args[3] != 0
    is_summed = any(user.args[1] != 0 and user.users for user in node.users)
    return is_low and is_contiguous and not has_dropout and not is_summed
