"""Names of parameters, for messages and reports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from amp_fx.errors import ScalerTypeError

NamedParameters: TypeAlias = Iterable[tuple[str, Tensor]]


class ParameterNames:
    """What the parameters are called; holds them weakly."""

    def __init__(self) -> None:
        """Know no names."""
        self._names = WeakTensorKeyDictionary()

    def add(self, named_parameters: NamedParameters) -> None:
        """Learn names from pairs of name and parameter, or nothing if one is no such pair."""
        if not isinstance(named_parameters, Iterable):
            raise _wrong_names(named_parameters)
        pairs = list(named_parameters)
        for pair in pairs:
            if not (_is_pair(pair) and isinstance(pair[0], str) and isinstance(pair[1], Tensor)):
                raise _wrong_names(pair)
        for name, param in pairs:
            self._names[param] = name

    def of(self, optimizer: Any) -> list[tuple[str, Tensor]]:
        """All parameters of an optimizer, in order, with the best name there is for each."""
        return [
            (self._known(param) or _name_in_group(optimizer, i, j), param)
            for i, group in enumerate(optimizer.param_groups)
            for j, param in enumerate(group["params"])
        ]

    def _known(self, param: Tensor) -> str | None:
        return self._names.get(param, None)  # type: ignore[no-untyped-call,no-any-return]


def _is_pair(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def _wrong_names(value: object) -> ScalerTypeError:
    return ScalerTypeError(
        "named_parameters must give pairs of name and parameter, as model.named_parameters() does; "
        f"got {type(value).__name__!r}."
    )


def _name_in_group(optimizer: Any, group: int, index: int) -> str:
    """The name that the optimizer was given, or else the parameter's place in it."""
    names = optimizer.param_groups[group].get("param_names")
    return names[index] if names else f"param_groups[{group}]['params'][{index}]"
