"""Measures a product in float8 as one op of the forward and two of the backward.

In the reference it is the plain product of the shadows of both operands. Its own error is compared
with the plain product of the same operands.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from amp_fx.numerics.twin import ShadowedCall, Twin
from amp_fx.observe.ops import OpFacts, below_everything, is_tracked
from amp_fx.observe.recorder import Event, Place
from amp_fx.policies.float8 import quantize
from amp_fx.tables.float8 import RECIPES

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from amp_fx.numerics.records import OpRecord
    from amp_fx.tables.float8 import Scaling

KERNEL = "amp_fx::float8_product"
_FACTS = OpFacts(KERNEL, (), is_view=False, is_random=False, is_empty=False, saves=False)


class Float8Twin(Twin):
    """A twin that measures products in float8, each as one op."""

    def run_float8(
        self,
        run: Callable[[], torch.Tensor],
        x: torch.Tensor,
        weight: torch.Tensor,
        recipe: str,
        has_rows_of_outputs: bool,
    ) -> torch.Tensor:
        """Runs a product and measures it; its backward is measured when it runs.

        Args:
            run: Runs the product in float8.
            x: The input in the low dtype.
            weight: The weight as it is stored.
            recipe: A name of ``RECIPES``.
            has_rows_of_outputs: True if the weight is ``[outputs, inputs]``.
        """
        recorder = self.recorder
        if recorder.is_paused or not is_tracked(x) or not is_tracked(weight):
            return run()
        recorder.guard.note_inputs([x, weight])
        with recorder.paused():
            result = run()
        if not self.is_wanted(recorder.here()):
            return result
        _Product(self, x, weight, recipe, has_rows_of_outputs).compare_forward(result)
        return result


class _ProductCall(ShadowedCall):
    """One of the products."""

    def compare_product(
        self,
        results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        operands: list[tuple[torch.Tensor, Scaling]],
    ) -> None:
        """Measures a product, and counts the elements of operands that are flushed to zero.

        Args:
            results: The product, that of the reference program, and that of the same operands in
                the reference.
            operands: The operands that are quantized.
        """
        found = self.compare(*results, set())
        for operand, scaling in operands if found is not None else ():
            assert found is not None
            is_rounded = RECIPES[self.recipe].has_power_of_two_scales
            data, _ = quantize(operand, scaling, -1, has_power_of_two_scales=is_rounded)
            is_nonzero = operand != 0
            numbers = (is_nonzero & (data.float() == 0)).sum(), is_nonzero.sum()
            self.twin.readings.add(numbers, functools.partial(_add_flushed, found))


def _add_flushed(record: OpRecord, read: list[float]) -> None:
    record.flushed += int(read[0])
    record.nonzero += int(read[1])


@dataclasses.dataclass
class _Product:
    """One product, from its forward to its backward."""

    twin: Float8Twin
    x: torch.Tensor
    weight: torch.Tensor
    recipe: str
    has_rows_of_outputs: bool

    def __post_init__(self) -> None:
        self.settings = RECIPES[self.recipe]
        self.version = self.x._version

    def compare_forward(self, result: torch.Tensor) -> None:
        """Measures the product, and registers hooks that measure its backward."""
        twin, x, weight = self.twin, self.x, self.weight
        place = twin.recorder.place(KERNEL, [x, weight])
        call = self._call([x, weight], self.settings.forward, place)
        with twin.recorder.paused(), below_everything():
            self.shadow = twin.shadows.of(x), self._matrix(twin.shadows.of(weight))
            shadow, repeated = (x @ matrix for x, matrix in (self.shadow, self._wide()))
            scaling = self.settings.forward
            operands = [(_rows(x), scaling), (self._matrix(weight).mT, scaling)]
            call.compare_product((result, shadow, repeated), operands)
        node, number = result.grad_fn, place.number
        if node is not None and number is not None:
            twin.measured_nodes.add(number)
            node.register_prehook(self._pause)
            node.register_hook(lambda grads, outer: self._compare_backward(grads, outer, number))

    def _pause(self, _: Any) -> None:
        self.twin.recorder.is_paused = True

    def _compare_backward(self, grads: Any, outer: Any, number: int) -> None:
        twin, grad = self.twin, outer[0]
        twin.recorder.is_paused = False
        location = twin.recorder.location_of(number)
        if self.x._version != self.version:
            why = "its input was written to before its backward"
            twin.leave_out(KERNEL, location.module, why)
            return
        with twin.recorder.paused(), below_everything():
            self._compare_gradients(grads, grad, Place("backward", location, None))

    def _compare_gradients(self, grads: Any, grad: torch.Tensor, place: Place) -> None:
        shadow, wide = self.twin.shadows.of(grad), self.twin.shadows.widened(grad)
        pairs = [(shadow, *self.shadow), (wide, *self._wide())]
        scaling = self.settings.grad
        if grads[0] is not None:
            products = [g @ matrix.mT for g, _, matrix in pairs]
            call = self._call([grad, self.weight], scaling, place)
            call.compare_product((grads[0], *products), [(_rows(grad), scaling)])
        if grads[1] is not None:
            products = [_rows(x).mT @ _rows(g) for g, x, _ in pairs]
            products = [p.mT if self.has_rows_of_outputs else p for p in products]
            is_float8 = self.settings.has_float8_weight_grads
            call = self._call([grad, self.x], scaling if is_float8 else None, place)
            operands = [(_rows(grad).mT, scaling)] if is_float8 else []
            call.compare_product((grads[1], *products), operands)

    def _call(
        self, tensors: list[torch.Tensor], scaling: Scaling | None, place: Place
    ) -> _ProductCall:
        """Returns a product at a place, with the scaling of operands in float8."""
        event = Event(self.twin.recorder, None, _FACTS, tuple(tensors), {}, tensors)
        event.known_place = place
        recipe = ("", None) if scaling is None else (self.recipe, scaling.dtype)
        return _ProductCall(self.twin, event, *recipe)

    def _wide(self) -> tuple[torch.Tensor, torch.Tensor]:
        widened = self.twin.shadows.widened
        return widened(self.x), widened(self._matrix(self.weight))

    def _matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns the weight as ``[inputs, outputs]``."""
        return weight.mT if self.has_rows_of_outputs else weight


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
