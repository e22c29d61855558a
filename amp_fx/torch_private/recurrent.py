"""Recurrent networks as ops per time step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._decomp.decompositions import _rnn_helper, gather_params, one_layer_lstm

if TYPE_CHECKING:
    from collections.abc import Sequence


def lstm(
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Version of ``aten::lstm.input`` without oneDNN's fused kernel.

    Same as the decomposition that AOTAutograd uses for inputs that require gradients, but for the
    dtype of the results: ``dtype``, unless it is None.
    """
    has_projections = states[0].size(2) != states[1].size(2)
    layers = gather_params(weights, has_biases, has_projections)  # type: ignore[no-untyped-call]
    result, last = _rnn_helper(  # type: ignore[no-untyped-call]
        x,
        list(zip(*states, strict=True)),
        layers,
        has_biases,
        num_layers,
        dropout,
        train,
        bidirectional,
        batch_first,
        one_layer_lstm,
    )
    hidden, cells = zip(*last, strict=True)
    results = result, torch.stack(hidden), torch.stack(cells)
    return results if dtype is None else tuple(value.to(dtype) for value in results)  # type: ignore[return-value]
