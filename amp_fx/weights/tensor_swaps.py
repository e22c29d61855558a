"""Lets ``torch.utils.swap_tensors`` take tensors that are watched weakly.

It refuses a tensor that anything refers to weakly, as it cannot tell who would be misled;
``Module.to`` and ``load_state_dict`` swap too, where the program asks them to. Whoever
watches tensors is told first here, and lets go of them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    LetGo = Callable[[torch.Tensor], Callable[[], None] | None]

_let_go: list[LetGo] = []


def before_swaps(let_go: LetGo) -> None:
    """Calls a function with each tensor that is about to be swapped.

    What it returns, unless that is None, is called once the tensors are swapped.

    Replaces ``torch.utils.swap_tensors`` once; a reference to it that was taken before
    still refuses.
    """
    if not _let_go:
        torch.utils.swap_tensors = _telling(torch.utils.swap_tensors)
    _let_go.append(let_go)


def _telling(
    swap: Callable[[torch.Tensor, torch.Tensor], None],
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    @functools.wraps(swap)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        behind = [let_go(tensor) for let_go in _let_go for tensor in (t1, t2)]
        try:
            swap(t1, t2)
        finally:
            for act in filter(None, behind):
                act()

    return swap_tensors
