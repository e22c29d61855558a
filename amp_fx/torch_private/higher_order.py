"""Implementations of higher-order ops that call other ops."""

from __future__ import annotations

import functools
from typing import Any

from torch._higher_order_ops.flex_attention import sdpa_dense
from torch._higher_order_ops.map import map_dense
from torch._higher_order_ops.passes.inline_invoke_subgraph import (
    inline_invoke_subgraph,
    inline_single_use_invoke_subgraph,
)
from torch._higher_order_ops.scan import generic_scan
from torch._prims.rng_prims import run_and_save_rng_state
from torch._subclasses.functional_tensor import FunctionalTensorMode

__all__ = (
    "generic_scan",
    "inline_invoke_subgraph",
    "inline_single_use_invoke_subgraph",
    "map_dense",
    "sdpa_dense",
)


@functools.cache
def let_saved_rng_states_be_traced() -> None:
    """Registers the rule by which AOTAutograd traces checkpoints that draw random numbers again.

    Relies on torch having this rule for ``run_with_rng_state``, which reads the state in the
    backward, and none for ``run_and_save_rng_state``, which saves it in the forward.
    """
    if FunctionalTensorMode in run_and_save_rng_state.python_key_table:
        return

    @run_and_save_rng_state.py_functionalize_impl  # type: ignore[untyped-decorator]
    def functionalize(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = ctx.unwrap_tensors(args), ctx.unwrap_tensors(kwargs)
        with ctx.redispatch_to_next():
            return ctx.wrap_tensors(run_and_save_rng_state(op, *args, **kwargs))
