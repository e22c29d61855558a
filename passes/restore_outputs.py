"""Casts graph outputs back to the dtypes that they have in the uncompiled program.

Before:
    %y = aten.linear(%x_bfloat16, %weight_bfloat16)     # captured as float32
    return (%y,)
After:
    %y_float32 = aten._to_copy(%y, dtype=torch.float32)
    return (%y_float32,)

Used if the program itself has no autocast region. Left unchanged: outputs that are low because of
regions or casts in the user's code; outputs that were captured in float8, because capture accepts
products of float32 with weights stored in float8, which eager code rejects.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from amp_fx.graphs.casts import add_cast
from amp_fx.graphs.conditions import SITES_KNOWN, VALUES_KNOWN
from amp_fx.graphs.metadata import CAPTURED, SITE, VALUE
from amp_fx.graphs.values import captured_dtype, detect_fake_mode, update_value
from amp_fx.passes.base import PassResult

if TYPE_CHECKING:
    from torch import fx

    from amp_fx.graphs.conditions import Condition


@dataclasses.dataclass(frozen=True)
class RestoreOutputs:
    """Casts outputs whose dtype the rewrite changed.

    An output that is returned twice is cast once, so that both results stay the same tensor.

    Attributes:
        dtypes: The expected dtype of each output; None in the tuple leaves an output unchanged. By
            default, the captured dtypes.
    """

    name: ClassVar[str] = "restore_outputs"
    requires: ClassVar[tuple[Condition, ...]] = (SITES_KNOWN, VALUES_KNOWN)
    ensures: ClassVar[tuple[Condition, ...]] = (SITES_KNOWN, VALUES_KNOWN)
    is_needed: ClassVar[bool] = True
    dtypes: tuple[torch.dtype | None, ...] | None = None

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``outputs_restored``."""
        counts: Counter[str] = Counter()
        output = gm.graph.output_node()
        fake_mode = detect_fake_mode(gm.graph)
        for node, dtype in self._expected_dtypes(output).items():
            value = VALUE.get(node)
            if not isinstance(value, torch.Tensor) or dtype in (None, value.dtype):
                continue
            with gm.graph.inserting_before(output):
                cast = add_cast(gm.graph, node, dtype, "output")
            update_value(cast, fake_mode, is_grad_enabled=SITE.of(output).is_grad_enabled)
            CAPTURED.put(cast, CAPTURED.get(node))
            output.replace_input_with(node, cast)
            counts["outputs_restored"] += 1
        return PassResult(counts)

    def _expected_dtypes(self, output: fx.Node) -> dict[fx.Node, torch.dtype | None]:
        if self.dtypes is None:
            return {node: captured_dtype(node) for node in output.all_input_nodes}
        outputs: Any = output.args[0]
        pairs = zip(outputs, self.dtypes, strict=True)
        return {node: dtype for node, dtype in pairs if hasattr(node, "users")}
