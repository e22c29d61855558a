"""AOTAutograd, its partitioner and its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import compile_utils, config
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = (
    "aot_autograd",
    "boxed_nop",
    "compile_utils",
    "config",
    "keep_saved",
    "make_boxed_func",
    "min_cut_rematerialization_partition",
)


def keep_saved(outputs: Collection[int]) -> None:
    """Prevents the backward graph from writing to tensors that the forward graph saves.

    AOTAutograd lists the saved tensors whose memory the backward may reuse ("donated buffers")
    before it compiles the forward, and the backward after it. The list is edited in place, because
    several objects refer to it.

    Relies on ``fw_metadata.bw_donated_idxs``: positions among the inputs of the backward, where
    saved sizes precede saved tensors.

    Args:
        outputs: Positions of the tensors among the outputs of the forward that is compiled now.
    """
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None or not metadata.bw_donated_idxs:
        return
    first = (metadata.num_symints_saved_for_bw or 0) - metadata.num_forward
    kept = {first + position for position in outputs}
    metadata.bw_donated_idxs[:] = [i for i in metadata.bw_donated_idxs if i not in kept]
