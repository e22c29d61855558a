"""``python -m tests.traffic float8``: what training in float8 moves, beside compiled torchao.

Counted as ``bytes`` counts, with all kernels that quantize weights. Nothing is measured.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from amp_fx.tables.float8 import RECIPES
from tests.traffic.models import CASES, TINY
from tests.traffic.totals import Totals
from tests.traffic.worker import NATIVE, counted_in_process

if TYPE_CHECKING:
    from collections.abc import Sequence

SHOWN = ("gpt2", "llama", "vit", "dit")
BATCHES = (1, 4)
TITLE = "bfloat16, 1 | torchao, 1 | amp_fx, 1 | torchao, 4 | amp_fx, 4"

Calls = tuple[Totals, Totals]
"""The first call after an update, which quantizes weights, and each further one."""


def contenders(recipe: str) -> tuple[str, str]:
    """Returns the names of torchao and amp_fx with a recipe."""
    return f"torchao-{recipe}", f"float8-{recipe}"


def count(name: str, ways: Sequence[str], *, device: str, is_tiny: bool) -> dict[str, Calls]:
    """Counts one model by each contender, in a separate process.

    Raises:
        RuntimeError: A contender failed.
    """
    answers = counted_in_process(name, ways, device, "bfloat16", trains=True, tiny=is_tiny)
    for way, answer in answers.items():
        if "error" in answer:
            raise RuntimeError(f"{name}, {way}: {answer['error']}")
    return {
        way: (Totals(**answer["first"]), Totals(**answer["further"]))
        for way, answer in answers.items()
    }


def print_tables(cases: Sequence[str], *, device: str, is_tiny: bool) -> int:
    """Prints a table; returns the exit code."""
    sys.stdout.write(f"| GB (kernels) per update | {TITLE} |\n{'|---' * 6}|\n")
    for name in cases:
        ways = [NATIVE, *(way for recipe in RECIPES for way in contenders(recipe))]
        found = count(name, ways, device=device, is_tiny=is_tiny)
        about = (TINY if is_tiny else CASES)[name].about
        for recipe in RECIPES:
            both = [found[way] for way in contenders(recipe)]
            moved = [_update(found[NATIVE], 1), *(_update(c, n) for n in BATCHES for c in both)]
            cells = " | ".join(f"{num_bytes / 1e9:.2f} ({count})" for num_bytes, count in moved)
            sys.stdout.write(f"| {about}, {recipe} | {cells} |\n")
    return 0


def _update(calls: Calls, num_batches: int) -> tuple[int, int]:
    """Returns the bytes and launches of all micro-batches of an update, without its step."""
    first, further = calls
    totals = [first, *[further] * (num_batches - 1)]
    num_launches = sum(t.num_launches + t.num_extern for t in totals)
    return sum(t.num_bytes for t in totals), num_launches
