"""Protects the inputs that a forward saves from the backward, which may reuse saved memory.

Before and after: the same graph; AOTAutograd's list of donated buffers changes.

AOTAutograd lists these buffers before passes turn cached values into inputs. It takes a saved value
for an intermediate result of the forward: see Note [Cached values are read-only] in
``amp_fx.weights.pack``.

Left unchanged: saved results of the forward, which no later call reads.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from amp_fx.passes.base import PassResult
from amp_fx.torch_private.aot_autograd import keep_saved
from amp_fx.weights.aliases import saved_inputs

if TYPE_CHECKING:
    from torch import fx


@dataclasses.dataclass(frozen=True)
class ProtectSavedInputs:
    """Removes saved inputs, and views of them, from the donated buffers.

    Attributes:
        num_returned: Number of outputs that are returned to the caller; the others are saved.
    """

    name: ClassVar[str] = "protect_saved_inputs"
    is_needed: ClassVar[bool] = True
    num_returned: int

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts nothing: no node changes."""
        keep_saved(saved_inputs(gm, self.num_returned))
        return PassResult(Counter())
