"""Small arguments for each op of autocast's lists, with which its kernels compute numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.policies.calls import qualified_name
from amp_fx.torch_private.pytree import tree_map_only

if TYPE_CHECKING:
    from amp_fx.torch_private.ops import OpOverload


_GOLDEN = 0.6180339887
"""Multiples of this number spread evenly over the remainders of 1."""


class Floats:
    """Shape of a float32 tensor of numbers between 0 and 1.

    Square matrices are symmetric and positive definite.
    """

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def tensor(self) -> torch.Tensor:
        """Returns the tensor, which has the same numbers in each call."""
        numbers = torch.arange(math.prod(self.shape), dtype=torch.float32)
        values = (numbers * _GOLDEN % 1 * 0.75 + 0.125).reshape(self.shape)
        if len(self.shape) != 2 or self.shape[0] != self.shape[1]:
            return values
        diagonal = torch.eye(self.shape[0], dtype=torch.float32) / 2
        return (values + values.T) / 8 + diagonal


@dataclasses.dataclass(frozen=True)
class Integers:
    """Values of an integer tensor."""

    values: list[Any]
    dtype: torch.dtype = torch.int64

    def tensor(self) -> torch.Tensor:
        """Returns the tensor."""
        return torch.tensor(self.values, dtype=self.dtype)


def sample_arguments(op: OpOverload) -> tuple[Any, ...]:
    """Returns positional arguments of an op, with float32 and int64 tensors on the CPU."""
    arguments = _SAMPLES.get(qualified_name(op).removeprefix("aten::"))
    if arguments is None:
        arguments = tuple(
            _FILLERS.get(str(argument.type))
            for argument in op._schema.arguments
            if not argument.has_default_value() and not argument.kwarg_only
        )
    made: tuple[Any, ...] = tree_map_only((Floats, Integers), lambda spec: spec.tensor(), arguments)
    return made


_SQUARE = Floats(4, 4)
_FILLERS: dict[str, Any] = {
    "Tensor": _SQUARE,
    "List[Tensor]": [_SQUARE, _SQUARE],
    "int": 1,
    "SymInt": 1,
    "float": 1.0,
    "bool": False,
    "number": 2,
    "List[int]": [1],
    "List[SymInt]": [1],
}
"""Values of required arguments, by type; None for others."""

_BATCH, _HEADS = Floats(2, 3, 4), Floats(1, 2, 4, 8)
_PLANE, _VOLUME = Floats(1, 2, 5, 5), Floats(1, 2, 5, 5, 5)
_CLASSES = Integers([0, 2, 1, 3])


def _convolution(num_dims: int, *, bias: bool = True) -> tuple[Any, ...]:
    """Input, weight and bias of a convolution."""
    sizes = (5,) * num_dims, (3,) * num_dims
    return Floats(1, 2, *sizes[0]), Floats(2, 2, *sizes[1]), Floats(2) if bias else None


def _gates(size: int) -> tuple[Floats, ...]:
    """Two weights and two biases of a recurrent cell."""
    return Floats(size, 4), Floats(size, 4), Floats(size), Floats(size)


_CONVOLVED = (*_convolution(2), [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
_STATE = Floats(2, 4)
_GRID = Floats(1, 3, 3, 2), 0, 0, False
_GRID_3D = Floats(1, 3, 3, 3, 3), 0, 0, False

_SAMPLES: dict[str, tuple[Any, ...]] = {
    # products
    "_convolution": (*_CONVOLVED, False, False, False, False),
    "_convolution.deprecated": (*_CONVOLVED, False, False, False),
    "convolution": _CONVOLVED,
    **{f"conv{n}d": _convolution(n) for n in (1, 2, 3)},
    **{f"conv{n}d.padding": (*_convolution(n), [1] * n, "valid") for n in (1, 2, 3)},
    "conv_tbc": (Floats(5, 1, 2), Floats(3, 2, 2), Floats(2)),
    "conv_transpose1d": _convolution(1),
    "conv_transpose2d.input": _convolution(2),
    "conv_transpose3d.input": _convolution(3),
    "cudnn_convolution": (*_convolution(2)[:2], [0, 0], [1, 1], [1, 1], 1, False, False, False),
    "bmm": (Floats(2, 4, 4), Floats(2, 4, 4)),
    "addbmm": (_SQUARE, Floats(2, 4, 4), Floats(2, 4, 4)),
    "baddbmm": (Floats(2, 4, 4), Floats(2, 4, 4), Floats(2, 4, 4)),
    "addmv": (Floats(4), _SQUARE, Floats(4)),
    "addr": (_SQUARE, Floats(4), Floats(4)),
    "mv": (_SQUARE, Floats(4)),
    "dot": (Floats(4), Floats(4)),
    "vdot": (Floats(4), Floats(4)),
    "einsum": ("ij,jk->ik", [_SQUARE, _SQUARE]),
    "prelu": (_SQUARE, Floats(4)),
    "bilinear": (Floats(2, 4), Floats(2, 3), Floats(5, 4, 3)),
    "scaled_dot_product_attention": (_HEADS, _HEADS, _HEADS),
    "_scaled_dot_product_flash_attention": (_HEADS, _HEADS, _HEADS),
    "_native_multi_head_attention": (
        *(_BATCH,) * 3,
        *(4, 2),
        *(Floats(12, 4), Floats(12), _SQUARE, Floats(4)),
    ),
    "rnn_tanh_cell": (_STATE, _STATE, *_gates(4)),
    "rnn_relu_cell": (_STATE, _STATE, *_gates(4)),
    "gru_cell": (_STATE, _STATE, *_gates(12)),
    "lstm_cell": (_STATE, [_STATE, _STATE], *_gates(16)),
    "_thnn_fused_gru_cell": (Floats(2, 12), Floats(2, 12), _STATE, Floats(12), Floats(12)),
    "_thnn_fused_lstm_cell": (Floats(2, 16), Floats(2, 16), _STATE, Floats(16), Floats(16)),
    "mkldnn_rnn_layer": (
        *(Floats(3, 2, 4), Floats(16, 4), Floats(16, 4), Floats(16), Floats(16)),
        *(Floats(1, 2, 4), Floats(1, 2, 4)),
        *(False, [], 2, 4, 1, True, False, False, False),
    ),
    # losses and normalizations
    "cosine_embedding_loss": (_SQUARE, _SQUARE, Integers([1, -1, 1, -1])),
    "cross_entropy_loss": (_SQUARE, _CLASSES),
    "multi_margin_loss": (_SQUARE, _CLASSES),
    "nll_loss": (_SQUARE, _CLASSES),
    "nll_loss2d": (Floats(2, 3, 2, 2), Integers([[[0, 1], [2, 0]]] * 2)),
    "multilabel_margin_loss": (_SQUARE, Integers([[3, 0, -1, 1]] * 4)),
    "multilabel_margin_loss_forward": (_SQUARE, Integers([[3, 0, -1, 1]] * 4), 1),
    "margin_ranking_loss": (Floats(4), Floats(4), Floats(4)),
    "ctc_loss.IntList": (Floats(5, 1, 4), Integers([[1, 2]]), [5], [2]),
    "ctc_loss.Tensor": (Floats(5, 1, 4), Integers([[1, 2]]), Integers([5]), Integers([2])),
    "layer_norm": (_SQUARE, [4], Floats(4), Floats(4)),
    "native_layer_norm": (_SQUARE, [4], Floats(4), Floats(4), 1e-5),
    "rms_norm": (_SQUARE, [4], Floats(4)),
    "batch_norm": (_SQUARE, None, None, None, None, True, 0.1, 1e-5, False),
    # sampling, pooling and padding
    **{
        name.format(n): (Floats(1, 2, *(3,) * n), [5] * n, *flags)
        for name, flags, dims in (
            ("_upsample_nearest_exact{}d", (), (1, 2, 3)),
            ("upsample_nearest{}d", (), (1, 2, 3)),
            ("upsample_linear{}d", (False,), (1,)),
            ("upsample_bilinear{}d", (False,), (2,)),
            ("_upsample_bilinear{}d_aa", (False,), (2,)),
            ("upsample_bicubic{}d", (False,), (2,)),
            ("_upsample_bicubic{}d_aa", (False,), (2,)),
            ("upsample_trilinear{}d", (False,), (3,)),
        )
        for n in dims
    },
    "grid_sampler": (_PLANE, *_GRID),
    "grid_sampler_2d": (_PLANE, *_GRID),
    "_grid_sampler_2d_cpu_fallback": (_PLANE, *_GRID),
    "grid_sampler_3d": (_VOLUME, *_GRID_3D),
    "adaptive_avg_pool3d": (_VOLUME, [2, 2, 2]),
    "adaptive_max_pool3d": (_VOLUME, [2, 2, 2]),
    "avg_pool3d": (_VOLUME, [2, 2, 2]),
    "max_pool3d": (_VOLUME, [2, 2, 2]),
    "max_unpool2d": (Floats(1, 2, 2), Integers([[[0, 3], [5, 10]]]), [4, 4]),
    "max_unpool3d": (
        *(Floats(1, 1, 2, 2), Integers([[[[0, 2], [3, 1]]]])),
        *([2, 2, 2], [1, 1, 1], [0, 0, 0]),
    ),
    "fractional_max_pool2d": (_PLANE, [2, 2], [2, 2], Floats(1, 2, 2)),
    "fractional_max_pool3d": (_VOLUME, [2, 2, 2], [2, 2, 2], Floats(1, 2, 3)),
    "reflection_pad1d": (Floats(2, 5), [1, 1]),
    "reflection_pad2d": (Floats(2, 5, 5), [1, 1, 1, 1]),
    "replication_pad1d": (Floats(2, 5), [1, 1]),
    "replication_pad2d": (Floats(2, 5, 5), [1, 1, 1, 1]),
    "replication_pad3d": (Floats(2, 5, 5, 5), [1, 1, 1, 1, 1, 1]),
    # others
    "nuclear_norm.dim": (_SQUARE, [0, 1]),
    "cross": (Floats(4, 3), Floats(4, 3), 1),
    "index_put": (_SQUARE, [Integers([0, 2])], Floats(2, 4)),
    "index_copy": (_SQUARE, 0, Integers([1, 0]), Floats(2, 4)),
    "scatter_add": (_SQUARE, 0, Integers([[0, 1, 2, 3]]), Floats(1, 4)),
    "tensordot": (_SQUARE, _SQUARE, [1], [0]),
    "quantile": (_SQUARE, Floats(2)),
    "nanquantile": (_SQUARE, Floats(2)),
    "lu_solve": (_SQUARE, _SQUARE, Integers([1, 2, 3, 4], torch.int32)),
    "linalg_cond.p_str": (_SQUARE, "fro"),
    "linalg_householder_product": (_SQUARE, Floats(4)),
    "orgqr": (_SQUARE, Floats(4)),
    "ormqr": (_SQUARE, Floats(4), _SQUARE),
    "linalg_tensorinv": (Floats(2, 2, 4), 2),
    "linalg_tensorsolve": (_SQUARE, Floats(4)),
    "stft": (Floats(16), 4, 2, 4, None, False, True, True),
    "stft.center": (Floats(16), 4, 2, 4, None, True, "reflect", False, True, True),
    "view_as_complex": (Floats(4, 2),),
}
"""Arguments of ops for which ``_FILLERS`` has no valid ones."""
