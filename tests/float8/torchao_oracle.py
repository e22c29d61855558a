"""torchao's Float8Linear as the oracle: the same model with its linear layers swapped."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

RECIPES = {"tensorwise": "tensorwise", "rowwise": "rowwise", "rowwise-gw-hp": "rowwise_with_gw_hp"}
"""torchao's name of each recipe."""


def linear_names(model: nn.Module) -> list[str]:
    """Returns the linear layers between the first and the last."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return names[1:-1]


def converted(model: nn.Module, recipe: str, *, whole: bool = False) -> nn.Module:
    """Returns a copy of a model whose linear layers run in float8, but for the first and the last.

    Args:
        model: A model with linear layers.
        recipe: One of ``RECIPES``.
        whole: Has the first and the last in float8, too, and leaves it to the caller to
            ``cast_inputs``.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    names = linear_names(model)
    config = Float8LinearConfig.from_recipe_name(RECIPES[recipe])
    model = convert_to_float8_training(
        copy.deepcopy(model), config=config, module_filter_fn=lambda _, name: whole or name in names
    )
    if not whole:
        cast_inputs(model)
    return model


def cast_inputs(model: nn.Module) -> None:
    """Casts the inputs of layers in float8: torchao asks for the autocast of CUDA alone."""
    for module in model.modules():
        if type(module).__name__ == "Float8Linear":
            module.register_forward_pre_hook(_cast)


def _cast(_: nn.Module, args: Any) -> Any:
    return tuple(a.to(torch.bfloat16) if a.is_floating_point() else a for a in args)


@contextlib.contextmanager
def bfloat16_of_cuda() -> Iterator[None]:
    """Torchao's backward reads the dtype of GPUs, also on the CPU."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_dtype("cuda", before)
