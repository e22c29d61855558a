"""Writes down the ops that eager or compiled code runs."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from amp_fx.dtypes import dtype_name

INVISIBLE = ("prim.", "aten._to_copy", "aten.to.", "aten.detach", "aten.alias", "aten.lift_fresh")
"""Ops that casting is made of, or that compute nothing."""


class OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down each op that has floating-point inputs, and their dtypes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[str] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Keeps Dynamo from skipping what runs under the mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        dtypes = [dtype_name(t.dtype) for t in inputs if t.is_floating_point()]
        if dtypes and not str(func).startswith(INVISIBLE):
            self.ops.append(f"{func}({', '.join(dtypes)})")
        return func(*args, **kwargs or {})
