"""A product in float8 under the shadow: one op forward and two backward, not the ops inside.

In the reference it is the plain product of the shadows of both operands. Its own error is that of
quantizing both, against the plain product of the same operands.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from amp_fx.numerics.mode import ShadowedCall, ShadowMode
from amp_fx.numerics.shadow import OpFacts, below_everything, is_tracked, widened
from amp_fx.policies.float8 import quantize
from amp_fx.tables.float8 import RECIPES

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from amp_fx.numerics.places import Site
    from amp_fx.tables.float8 import Scaling

KERNEL = "amp_fx::float8_product"
_FACTS = OpFacts(KERNEL, (), is_view=False, is_random=False, is_empty=False, saves=False)


class Float8ShadowMode(ShadowMode):  # type: ignore[no-untyped-call]
    """A shadow mode that measures products in float8, each as one op."""

    def run_float8(
        self,
        run: Callable[[], torch.Tensor],
        x: torch.Tensor,
        weight: torch.Tensor,
        recipe: str,
        has_rows_of_outputs: bool,
    ) -> torch.Tensor:
        """Runs a product and measures it; its backward is measured when that runs.

        Args:
            run: Runs the product in float8.
            x: The input in the low dtype.
            weight: The weight as it is stored.
            recipe: A name of ``RECIPES``.
            has_rows_of_outputs: Whether the weight is ``[outputs, inputs]``.
        """
        if self.is_paused or not is_tracked(x) or not is_tracked(weight):
            return run()
        self.guard.look_at([x, weight])
        with self.paused():
            result = run()
        _Product(self, x, weight, recipe, has_rows_of_outputs).compare_forward(result)
        return result


class _ProductCall(ShadowedCall):
    """One of the products, with what quantizing its operands flushed to zero."""

    def compare(
        self,
        results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        place: tuple[str, Site, int | None],
        operands: list[tuple[torch.Tensor, Scaling]],
    ) -> None:
        """Compares the result with that in the reference program and on the same operands."""
        result, shadow, repeated = results
        found = self._compare(result, shadow, repeated, place, set())
        for operand, scaling in operands if found is not None else ():
            assert found is not None
            is_rounded = RECIPES[self.recipe].has_power_of_two_scales
            data, _ = quantize(operand, scaling, 1, has_power_of_two_scales=is_rounded)
            is_nonzero = operand != 0
            found.measures.flushed += int((is_nonzero & (data.float() == 0)).sum())
            found.measures.nonzero += int(is_nonzero.sum())


@dataclasses.dataclass
class _Product:
    """One product, from its forward to its backward."""

    mode: Float8ShadowMode
    x: torch.Tensor
    weight: torch.Tensor
    recipe: str
    has_rows_of_outputs: bool

    def __post_init__(self) -> None:
        self.settings = RECIPES[self.recipe]
        self.version = self.x._version

    def compare_forward(self, result: torch.Tensor) -> None:
        """Measures the product, and has its node measure the backward."""
        mode, x, weight = self.mode, self.x, self.weight
        place = mode.begin(KERNEL, [x, weight])
        with mode.paused(), below_everything():
            scaling = self.settings.forward
            call = self._call([x, weight], scaling)
            self.shadow = mode.shadows.of(x), self._matrix(mode.shadows.of(weight))
            shadow, repeated = (left @ right for left, right in (self.shadow, self._wide()))
            operands = [(_rows(x), scaling), (self._matrix(weight).t(), scaling)]
            call.compare((result, shadow, repeated), place, operands)
        node, number = result.grad_fn, place[2]
        if node is not None and number is not None:
            mode.measured_nodes.add(number)
            node.register_prehook(lambda _: mode.pause(True))
            node.register_hook(lambda grads, outer: self._compare_backward(grads, outer, number))

    def _compare_backward(self, grads: Any, outer: Any, number: int) -> None:
        mode, grad = self.mode, outer[0]
        mode.pause(False)
        site = mode.site_of(number)
        if self.x._version != self.version:
            why = "its input was written to before its backward"
            mode.leave_out(KERNEL, site.module, why)
            return
        with mode.paused(), below_everything():
            self._compare_gradients(grads, grad, ("backward", site, None))

    def _compare_gradients(self, grads: Any, grad: torch.Tensor, place: Any) -> None:
        shadow, wide = self.mode.shadows.of(grad), widened(grad, self.mode.reference)
        pairs = [(shadow, *self.shadow), (wide, *self._wide())]
        scaling = self.settings.grad
        if grads[0] is not None:
            products = [g @ matrix.t() for g, _, matrix in pairs]
            call = self._call([grad, self.weight], scaling)
            call.compare((grads[0], *products), place, [(_rows(grad), scaling)])
        if grads[1] is not None:
            products = [_rows(x).t() @ _rows(g) for g, x, _ in pairs]
            products = [p.t() if self.has_rows_of_outputs else p for p in products]
            is_float8 = self.settings.has_float8_weight_grads
            call = self._call([grad, self.x], scaling if is_float8 else None)
            operands = [(_rows(grad).t(), scaling)] if is_float8 else []
            call.compare((grads[1], *products), place, operands)

    def _call(self, tensors: list[torch.Tensor], scaling: Scaling | None) -> _ProductCall:
        call = _ProductCall(self.mode, None, _FACTS, tuple(tensors), {}, tensors)
        if scaling is not None:
            call.recipe, call.rounded_to = self.recipe, scaling.dtype
        return call

    def _wide(self) -> tuple[torch.Tensor, torch.Tensor]:
        reference = self.mode.reference
        return widened(self.x, reference), widened(self._matrix(self.weight), reference)

    def _matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight as ``[inputs, outputs]``."""
        return weight.t() if self.has_rows_of_outputs else weight


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
