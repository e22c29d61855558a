"""Which products a CPU computes faster in float32 than in a low dtype: measured, once per machine.

A table that takes a second or some, kept in inductor's cache folder by processor, torch and
number of threads. What it decides changes sums within a product, never where values are rounded.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from amp_fx.processor import kernels_in_use
from amp_fx.wide_products import ATTENTION, BATCHED, CONVOLUTION, PRODUCT

if TYPE_CHECKING:
    from collections.abc import Callable

    Table = dict[str, float]

log = logging.getLogger(__name__)

SIZES = (1, 4, 16, 64)
"""Least sizes of products that are measured; others go by the next smaller one."""
MARGIN = 1.5
"""How much faster a wide product has to be."""
_WIDTH = 256
_MAX_ROUNDS = 50


def pays(kind: str, dtype: torch.dtype, least_size: int) -> bool:
    """Whether a product is clearly faster in float32, casts included, on this CPU.

    Args:
        kind: One of ``wide_products.KINDS``.
        dtype: The low dtype.
        least_size: The least of its sizes.
    """
    measured = table(dtype, torch.get_num_threads())
    return measured.get(_key(kind, least_size), 0.0) > MARGIN


@functools.cache
def table(dtype: torch.dtype, num_threads: int) -> Table:
    """How many times as long the low product takes, by kind and size; empty if it cannot be had.

    On a machine that is too busy to tell, what did not settle is left out, and nothing is kept for
    other processes.
    """
    path = _path(dtype, num_threads)
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        pass
    try:
        measured = _measured(dtype)
    except RuntimeError:  # no kernel at all: nobody will call it either
        log.debug("no table of products in %s", dtype, exc_info=True)
        return {}
    log.info("low products in %s against float32 ones: %s", dtype, measured)
    found = {key: ratio for key, ratio in measured.items() if ratio is not None}
    if len(found) == len(measured):
        _write(path, found)
    return found


def _key(kind: str, least_size: int) -> str:
    if kind not in (PRODUCT, BATCHED):
        return kind
    return f"{kind} {max(size for size in SIZES if size <= max(1, least_size))}"


def _path(dtype: torch.dtype, num_threads: int) -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    machine = (*kernels_in_use(), os.cpu_count())
    text = f"{torch.__version__} {machine} {num_threads} {dtype} {MARGIN} {SIZES}"
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Path(cache_dir()) / "amp_fx" / f"products-{key}.json"


def _write(path: Path, found: Table) -> None:
    """Keeps a table for other processes; goes on without if it cannot."""
    own = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(json.dumps(found))
        own.replace(path)
    except OSError:
        log.debug("no table kept", exc_info=True)


def _measured(dtype: torch.dtype) -> dict[str, float | None]:
    with _disable_current_modes(), torch.no_grad():
        found: dict[str, float | None] = {}
        for size in SIZES:
            shape = (size, _WIDTH)
            found[_key(PRODUCT, size)] = _ratio(_mm, dtype, shape, (_WIDTH, _WIDTH))
            found[_key(BATCHED, size)] = _ratio(_mm, dtype, (4, *shape), (4, _WIDTH, 64))
        picture, kernel = (1, 32, 28, 28), (32, 32, 3, 3)
        found[CONVOLUTION] = _ratio(torch.conv2d, dtype, picture, kernel)
        heads = (1, 4, 128, 64)
        attend = torch.nn.functional.scaled_dot_product_attention
        found[ATTENTION] = _ratio(attend, dtype, heads, heads, heads)
        return found


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left @ right


def _ratio(op: Callable[..., Any], dtype: torch.dtype, *shapes: tuple[int, ...]) -> float | None:
    """The time of a low call, by that of a wide one with its casts; None if it does not settle."""
    args = [torch.ones(shape, dtype=dtype) for shape in shapes]
    low, wide = _least_times(
        lambda: op(*args), lambda: op(*(arg.float() for arg in args)).to(dtype)
    )
    return None if low is None or wide is None else low / wide


def _least_times(*calls: Callable[[], Any]) -> list[float | None]:
    """The least time of each call, made in turns until each was that fast three times.

    None for one that never was: other work on the machine stops calls for longer than they take.
    """
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(_MAX_ROUNDS):
        for call, own in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            own.append(time.perf_counter() - start)
        if all(map(_is_settled, times)):
            break
    return [min(own) if _is_settled(own) else None for own in times]


def _is_settled(times: list[float]) -> bool:
    fastest = sorted(times)[:3]
    return len(fastest) == 3 and fastest[-1] < 1.15 * fastest[0]
