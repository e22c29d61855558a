"""Recurrent networks that an exported program contains as one op each.

Eager autocast casts for the ops inside: a kernel for a whole network, or one for each time step. A
program with an op per time step has one size of sequences, and other runtimes have kernels for
whole networks only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_CELLS = {
    "aten::gru.input": "aten::gru_cell",
    "aten::lstm.input": "aten::lstm_cell",
    "aten::rnn_relu.input": "aten::rnn_relu_cell",
    "aten::rnn_tanh.input": "aten::rnn_tanh_cell",
}

WHOLE_NETWORKS: Mapping[str, Mapping[str, str]] = {
    # On the CPU, states and gates of other networks have different dtypes.
    "cpu": {"aten::lstm.input": "aten::mkldnn_rnn_layer"},
    "cuda": _CELLS,
    "xpu": _CELLS,
}
"""For each device type, the ops of whole networks, with the op whose cast policy applies to it."""
