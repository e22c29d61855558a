"""Ops, recipes and sizes of float8 products.

Sources: ``Float8LinearConfig.from_recipe_name`` in torchao 0.18 for the recipes, and the
requirements of ``torch._scaled_mm`` on CUDA for the sizes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import torch

from amp_fx.errors import PolicyError, did_you_mean
from amp_fx.tables.cast_policy import CastPolicy

if TYPE_CHECKING:
    from amp_fx.tables.cast_policy import Table

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

MULTIPLE = 16
"""Both sizes of a weight must be multiples of this number."""


class Operands(NamedTuple):
    """Names of a product's arguments.

    Attributes:
        input: The input, whose last dimension is summed.
        weight: A matrix or a batch of matrices.
        bias: The tensor that is added; empty if there is none.
        has_rows_of_outputs: Whether the weight has the shape ``[outputs, inputs]``, like that of a
            linear layer.
    """

    input: str
    weight: str
    bias: str = ""
    has_rows_of_outputs: bool = False


PRODUCTS = {
    "aten::linear": Operands("input", "weight", "bias", has_rows_of_outputs=True),
    "aten::matmul": Operands("self", "other"),
    "aten::mm": Operands("self", "mat2"),
    "aten::addmm": Operands("mat1", "mat2", "self"),
    "aten::bmm": Operands("self", "mat2"),
    "aten::baddbmm": Operands("batch1", "batch2", "self"),
}
"""Products of two matrices or batches of matrices."""

FLOAT8_PRODUCTS = ("aten::linear", "aten::matmul", "aten::mm", "aten::addmm")
"""Products that can run in float8 if one operand is a matrix of weights."""


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Quantization of one operand.

    Attributes:
        dtype: The float8 dtype.
        is_by_row: Whether there is a scale for each row along the summed dimension, instead of one
            for the tensor.
    """

    dtype: torch.dtype
    is_by_row: bool

    def __str__(self) -> str:
        name = {E4M3: "e4m3", E5M2: "e5m2"}[self.dtype]
        return f"{name} with {'a scale per row' if self.is_by_row else 'one scale'}"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Quantization of the three products of a layer.

    Attributes:
        forward: Input and weight in the forward, and the input in the weight gradient.
        grad: The incoming gradient.
        weight_back: The weight in the input gradient.
        has_float8_weight_grads: Whether weight gradients are computed in float8.
        has_power_of_two_scales: Whether scales are rounded down to powers of two.
    """

    forward: Scaling
    grad: Scaling
    weight_back: Scaling
    has_float8_weight_grads: bool
    has_power_of_two_scales: bool

    def __str__(self) -> str:
        grads = "float8" if self.has_float8_weight_grads else "the low dtype"
        return f"input and weight {self.forward}, gradient {self.grad}, weight gradients in {grads}"


_BY_TENSOR, BY_ROW = Scaling(E4M3, is_by_row=False), Scaling(E4M3, is_by_row=True)

RECIPES = {
    "tensorwise": Recipe(
        _BY_TENSOR,
        Scaling(E5M2, is_by_row=False),
        _BY_TENSOR,
        has_float8_weight_grads=True,
        has_power_of_two_scales=False,
    ),
    "rowwise": Recipe(
        BY_ROW, BY_ROW, BY_ROW, has_float8_weight_grads=True, has_power_of_two_scales=True
    ),
    "rowwise-gw-hp": Recipe(
        BY_ROW, BY_ROW, _BY_TENSOR, has_float8_weight_grads=False, has_power_of_two_scales=True
    ),
}
"""Recipes by name; ``gw-hp`` means weight gradients in high precision."""

LIMITS = {E4M3: 448, E5M2: 57344}
"""Largest numbers of the float8 dtypes, to which the largest element of a tensor is scaled."""


@dataclasses.dataclass(frozen=True)
class Float8:
    """Settings of a policy for float8 products.

    Attributes:
        recipe: A name of ``RECIPES``.
        least_in: Products that sum over fewer elements run in the low dtype.
        least_out: Products with fewer outputs run in the low dtype.
        source: A name of ``SOURCES``: the numbers that are quantized.

    Raises:
        PolicyError: The recipe or source is unknown, or a size is not a positive integer.
    """

    recipe: str = "tensorwise"
    least_in: int = MULTIPLE
    least_out: int = MULTIPLE
    source: str = "stored"

    def __post_init__(self) -> None:
        """Checks the settings."""
        for name, allowed in (("recipe", [*RECIPES]), ("source", [*SOURCES])):
            value = getattr(self, name)
            if value not in allowed:
                meant = did_you_mean(value, allowed)
                expected = ", ".join(allowed)
                raise PolicyError(f"expected {name} to be one of {expected}, got {value!r}{meant}")
        for name in ("least_in", "least_out"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise PolicyError(f"expected {name} to be a positive integer, got {size!r}")


SOURCES = {"stored": None, "bfloat16": torch.bfloat16}
"""The dtypes that weights are rounded to before they are quantized, by name; None for none."""


FLOAT8_PRESETS = {f"float8-{name}": Float8(name) for name in RECIPES}
"""Settings of presets by name."""


def float8_table(table: Table) -> dict[str, CastPolicy]:
    """Returns a table whose products run in float8 instead of the low dtype."""
    low = CastPolicy.LOWER_PRECISION_FP
    return {
        op: CastPolicy.FLOAT8 if op in FLOAT8_PRODUCTS and policy is low else policy
        for op, policy in table.items()
    }
