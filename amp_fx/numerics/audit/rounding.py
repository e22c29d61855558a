"""Findings about values that are rounded before a loss, a choice or any other use.

The function of torch that the program called distinguishes a cast in the program text
(``x.bfloat16()``) from a cast of autocast (``linear(x, w)``).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import torch

from amp_fx.dtypes import dtype_name
from amp_fx.graphs.locations import short_path
from amp_fx.numerics.audit.recording import Rule, is_below_float32
from amp_fx.numerics.audit.report import new_finding
from amp_fx.observe.ops import MOVES
from amp_fx.observe.storages import Marks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amp_fx.graphs.locations import NodeLocation
    from amp_fx.numerics.audit.report import Finding
    from amp_fx.observe.recorder import Event

CASTS = frozenset(
    ("to", "type", "type_as", "float", "double", "half", "bfloat16", "copy_", "_to_copy")
)
"""Functions by which a program casts; autocast casts inside of other functions."""

NORMS = frozenset(
    (
        "layer_norm",
        "group_norm",
        "batch_norm",
        "instance_norm",
        "rms_norm",
        "normalize",
        "norm",
        "linalg_norm",
        "linalg_vector_norm",
        "cosine_similarity",
    )
)
LOSSES = frozenset(
    (
        "cross_entropy",
        "log_softmax",
        "logsumexp",
        "kl_div",
        "logsigmoid",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
    )
)
"""Functions of losses whose names do not end in ``_loss``."""


PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "mv", "dot", "mul", "convolution", "linear"))
"""Ops in which a rounded position becomes a wrong angle."""


def is_move(event: Event) -> bool:
    """Returns True if an op passes on the values of its first input."""
    return event.name == "_to_copy" or f"aten::{event.name}" in MOVES


@dataclasses.dataclass(frozen=True)
class Rounded:
    """The reason why a tensor has no more precision than a low dtype.

    Attributes:
        dtype: The low dtype.
        cast: The line that cast a float32 value to it; None if an op computed in it.
    """

    dtype: torch.dtype
    cast: NodeLocation | None = None


class Roundings(Rule):
    """Follows rounded values through casts, moves and pointwise ops.

    Constants, integers and random numbers are exact in any dtype.
    """

    def __init__(self) -> None:
        self._marks: Marks[Rounded | None] = Marks()

    def of(self, tensor: torch.Tensor) -> Rounded | None:
        """Returns the rounding of a tensor; None if it is exact or has full precision."""
        return self._marks.get(
            tensor, Rounded(tensor.dtype) if is_below_float32(tensor.dtype) else None
        )

    def forward(self, event: Event) -> None:
        """Notes the rounding of the result of an op."""
        result = event.results[0] if event.results else None
        if result is None or not result.is_floating_point():
            return
        floats = [tensor for tensor in event.floats if tensor.dim() or len(event.floats) == 1]
        found = [self.of(tensor) for tensor in floats]
        rounding = next(filter(None, found), None)
        is_random = torch.Tag.nondeterministic_seeded in event.op.tags
        is_made = is_random or event.name.startswith(_CONSTANTS)
        is_cast = event.name == "_to_copy" and is_below_float32(result.dtype) and not any(found)
        self._marks.pop(result)
        if not floats or (is_made and "dropout" not in event.name):
            self._marks.put(result, None)
        elif is_cast and event.function in CASTS and not self._marks.has(floats[0]):
            self._marks.put(result, Rounded(result.dtype, event.location))
        elif is_move(event) or torch.Tag.pointwise in event.op.tags or "softmax" in event.name:
            is_exact = not is_below_float32(result.dtype) or all(map(self._marks.has, floats))
            if rounding is not None:
                self._marks.put(result, rounding if len(floats) == 1 else Rounded(rounding.dtype))
            elif is_exact and any(map(self._marks.has, floats)):
                self._marks.put(result, None)


_CONSTANTS = ("zeros", "ones", "full", "empty", "new_", "arange", "eye", "scalar_tensor")
"""Beginnings of the names of ops that read no values."""


class _LowPart(NamedTuple):
    """Part of a loss that was computed in low precision.

    Attributes:
        site: The line.
        what: The function, or ``"the loss"`` for a scalar.
        dtype: The low dtype.
        is_in_region: Whether an autocast region was active.
    """

    site: NodeLocation
    what: str
    dtype: torch.dtype
    is_in_region: bool


_LOSS = "the loss"
_LOGARITHMS = frozenset(("log", "log2", "log10", "log1p"))


class LossRule(Rule):
    """Finds ``loss_low``."""

    def __init__(self, roundings: Roundings) -> None:
        self._roundings = roundings
        self._parts: Marks[_LowPart] = Marks()

    def forward(self, event: Event) -> None:
        """Examines the inputs of losses and norms."""
        # A norm by hand ends in a reciprocal root.
        name = event.function
        is_loss = name in LOSSES or name.endswith("_loss") or name == "rsqrt"
        is_off = event.region is None or not event.region.is_enabled
        for tensor in event.floats if is_loss or event.function in NORMS else ():
            rounding = self._roundings.of(tensor)
            if rounding is not None and rounding.cast is not None and tensor.dim():
                self._add(event.location, event.function, rounding.dtype, rounding.cast)
            elif is_loss and is_off and is_below_float32(tensor.dtype):
                self._add(event.location, event.function, tensor.dtype)
        self._see_part(event, is_in_region=not is_off)

    def _see_part(self, event: Event, *, is_in_region: bool) -> None:
        """Notes scalars and logarithms of low precision, and what is computed from them."""
        parts = [self._parts.get(tensor) for tensor in event.floats]
        earlier = next(filter(None, parts), None)
        is_log = event.function in _LOGARITHMS and any(
            is_below_float32(t.dtype) for t in event.floats
        )
        for result in event.results:
            if not result.is_floating_point():
                continue
            is_scalar = result.numel() == 1
            self._parts.pop(result)
            if is_log or (is_scalar and is_below_float32(result.dtype) and earlier is None):
                what = event.function if is_log else _LOSS
                dtype = event.floats[0].dtype if is_log else result.dtype
                self._parts.put(result, _LowPart(event.location, what, dtype, is_in_region))
            elif earlier is not None and not event.flops and (is_scalar or earlier.what != _LOSS):
                self._parts.put(result, earlier)

    def root(self, root: torch.Tensor) -> None:
        """Examines the tensor that a backward begins with."""
        part = self._parts.get(root)
        if part is not None:
            self._add(part.site, part.what, part.dtype, is_in_region=part.is_in_region)

    def _add(
        self,
        site: NodeLocation,
        what: str,
        dtype: torch.dtype,
        cast: NodeLocation | None = None,
        *,
        is_in_region: bool = False,
    ) -> None:
        name, eps = dtype_name(dtype), torch.finfo(dtype).eps / 2
        if cast is None and is_in_region:
            how = f"is computed in {name} by ops that autocast does not cast on this device"
        elif cast is None:
            how = f"is computed in {name}, outside of an autocast region"
        else:
            how = f"takes values that {_line(cast)} rounded from float32 to {name}"
        message = f"{what} {how}: each value is off by up to {eps:.2%}."
        self.found.append(new_finding("loss_low", site, message))


def _line(site: NodeLocation) -> str:
    return f"{short_path(site.file)}:{site.line}" if site.file else "a cast"


class IntegerRule(Rule):
    """Finds ``integer_low``."""

    def __init__(self) -> None:
        self._rounded: Marks[tuple[float, torch.dtype, NodeLocation]] = Marks()

    def forward(self, event: Event) -> None:
        """Examines casts of integers, and the products that they enter."""
        if not event.results:
            return
        result = event.results[0]
        largest = 0.0
        if event.name == "_to_copy" and is_below_float32(result.dtype):
            largest = _rounded(result, event.tensors[0])
        elif event.name == "arange" and is_below_float32(result.dtype) and result.numel():
            last = float(result.abs().max())
            largest = last if last > 2 / torch.finfo(result.dtype).eps else 0.0
        if largest:
            self._rounded.put(result, (largest, result.dtype, event.location))
        for tensor in event.tensors:
            rounded = self._rounded.get(tensor)
            is_back = event.name == "_to_copy" and not result.is_floating_point()
            if rounded is None:
                continue
            if event.name in PRODUCTS or is_back:
                self._add(event, *rounded)
            elif is_move(event):
                self._rounded.put(result, rounded)

    def _add(self, event: Event, largest: float, dtype: torch.dtype, cast: NodeLocation) -> None:
        exact = int(2 / torch.finfo(dtype).eps)
        message = (
            f"Integers up to {largest:.0f} are rounded to {dtype_name(dtype)} ({_line(cast)}), "
            f"which holds integers up to {exact} exactly; {event.name} gets the same number for "
            "several."
        )
        self.found.append(new_finding("integer_low", event.location, message))


_LARGEST = 2.0**24
"""The largest value that counts as an integer; the values in masks are larger."""


def _rounded(low: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns the largest of integers that a cast changed; 0 if there are none."""
    is_exact = exact.dtype.is_floating_point and not is_below_float32(exact.dtype)
    if not exact.numel() or not (is_exact or exact.dtype in _INTEGERS):
        return 0.0
    is_changed = (low.to(exact.dtype) != exact).any()
    is_whole = (exact == exact.round()).all() if is_exact else True
    largest = float(exact.abs().max()) if is_changed and is_whole else 0.0
    return largest if largest <= _LARGEST else 0.0


_INTEGERS = (torch.int64, torch.int32, torch.int16)


@dataclasses.dataclass
class Upcast:
    """A cast to float32 in the program text.

    Attributes:
        site: Its line.
        dtype: The dtype that it cast from.
        rounded: The line that rounded the value again.
        is_used: Whether an op computed with it.
    """

    site: NodeLocation
    dtype: torch.dtype
    rounded: NodeLocation | None = None
    is_used: bool = False


class UpcastRule(Rule):
    """Finds ``upcast_lost``.

    A cast to the dtype of another tensor does not ask for float32: code for weights of any dtype
    casts so, and autocast takes it back without a loss.
    """

    def __init__(self, roundings: Roundings) -> None:
        self._roundings = roundings
        self._marks: Marks[Upcast] = Marks()
        self._upcasts: list[Upcast] = []

    def forward(self, event: Event) -> None:
        """Notes casts to float32, and the ops that use their results."""
        if not event.results:
            return
        result = event.results[0]
        for tensor in event.tensors:
            upcast = self._marks.get(tensor)
            if upcast is None:
                continue
            if event.name == "_to_copy" and is_below_float32(result.dtype):
                upcast.rounded = upcast.rounded or event.location
            elif is_move(event):
                self._marks.put(result, upcast)
            else:
                upcast.is_used = True
        is_up = event.name == "_to_copy" and result.dtype == torch.float32
        is_up = is_up and is_below_float32(event.tensors[0].dtype) and event.function in CASTS
        is_general = event.function == "type_as" or ".dtype" in event.location.code
        if is_up and not is_general and self._roundings.of(event.tensors[0]) is not None:
            upcast = Upcast(event.location, event.tensors[0].dtype)
            self._upcasts.append(upcast)
            self._marks.put(result, upcast)

    def findings(self) -> Iterator[Finding]:
        """Yields casts to float32 whose results were only rounded again."""
        for upcast in self._upcasts:
            if upcast.rounded is not None and not upcast.is_used:
                message = (
                    f"The cast from {dtype_name(upcast.dtype)} to float32 has no effect: "
                    f"{_line(upcast.rounded)} rounds the value again before an op computes with it."
                )
                yield new_finding("upcast_lost", upcast.site, message)
