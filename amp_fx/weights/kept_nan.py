"""Makes packed graphs keep NaN, which activations of oneDNN turn into numbers.

Inductor lets oneDNN's kernels compute the activation after a product or convolution. Four of these
activations bound their input by the processor's minimum and maximum instructions, which return the
bound if the input is NaN. So NaN in an image or a weight would leave the graph as a number.

Here, the kernel leaves these activations out, and generated code computes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from amp_fx.replaced import replaced
from amp_fx.torch_private.inductor import lowerings, mkldnn_fusion

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Sequence

aten = torch.ops.aten
prims = torch.ops.prims

_ALONE: tuple[Any, ...] = ("none", [], "")
_WITH_TENSOR: tuple[Any, ...] = (None, [], None)
_NO_ACTIVATION = {
    "mkldnn._linear_pointwise.default": _ALONE,
    "mkldnn._convolution_pointwise.default": _ALONE,
    "mkldnn._convolution_transpose_pointwise.default": _ALONE,
    "mkldnn._convolution_pointwise.binary": _WITH_TENSOR,
    "mkldnn._convolution_pointwise_.binary": _WITH_TENSOR,
}
"""The last arguments of kernels without an activation, by name: torch may be built without oneDNN.

The binary kernels also add a tensor."""


def keeping_nan() -> contextlib.AbstractContextManager[None]:
    """Context in which inductor lets oneDNN compute only activations that keep NaN.

    Relies on ``mkldnn_fusion`` looking up the kernels in its global ``L``, and on the last three
    arguments of a kernel being the name, scalars and algorithm of its activation.
    """
    return replaced((mkldnn_fusion, "L", _Lowerings()))


class _Lowerings:
    """Inductor's lowerings, in which kernels of oneDNN leave activations out."""

    def __getitem__(self, op: Any) -> Callable[..., Any]:
        lower: Callable[..., Any] = lowerings[op]
        none = _NO_ACTIVATION.get(str(op))
        if none is None:
            return lower

        def lower_without(*args: Any) -> Any:
            *others, name, scalars, _ = args
            # With another slope, oneDNN multiplies instead of bounding.
            if name not in _ACTIVATIONS or (name == "leaky_relu" and scalars != [0]):
                return lower(*args)
            result = lower(*others, *none)
            return _ACTIVATIONS[name](result, scalars)

        return lower_without


def _relu(x: Any, _: Sequence[float]) -> Any:
    return lowerings[aten.relu](x)


def _hardtanh(x: Any, bounds: Sequence[float]) -> Any:
    low, high = bounds
    return lowerings[aten.clamp_max](lowerings[aten.clamp_min](x, low), high)


def _hardsigmoid(x: Any, _: Sequence[float]) -> Any:
    convert = lowerings[prims.convert_element_type.default]
    shifted = lowerings[aten.add](convert(x, torch.float32), 3)
    return convert(lowerings[aten.div](_hardtanh(shifted, (0, 6)), 6), x.get_dtype())


def _leaky_relu(x: Any, slope: Sequence[float]) -> Any:
    return lowerings[aten.where](lowerings[aten.gt](x, 0), x, lowerings[aten.mul](x, *slope))


_ACTIVATIONS: dict[str | None, Callable[..., Any]] = {
    "relu": _relu,
    "hardtanh": _hardtanh,
    "hardsigmoid": _hardsigmoid,
    "leaky_relu": _leaky_relu,
}
