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
from torch.utils._pytree import tree_map_only

from amp_fx.devices.processor import kernels_in_use
from amp_fx.passes.widen_products import (
    ATTENTION,
    ATTENTION_BACKWARD,
    BATCHED,
    CONVOLUTION,
    CONVOLUTION_BACKWARD,
    KINDS,
    PRODUCT,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    Table = dict[str, float]

log = logging.getLogger("amp_fx.product_costs")

aten = torch.ops.aten

_ROWS, _POSITIONS = (1, 4, 16, 64), (16, 64, 256, 1024)
SIZES = {
    PRODUCT: _ROWS,
    BATCHED: _ROWS,
    ATTENTION: _POSITIONS,
    ATTENTION_BACKWARD: _POSITIONS,
}
"""Least sizes that are measured, by kind; others go by the next smaller one, or the least."""
MARGIN = 1.5
"""How much faster a wide product has to be."""
_NAMES = sorted(set(KINDS.values()))
_WIDTH = 256
_MAX_ROUNDS, _MAX_SECONDS = 50, 1.5


def pays(kind: str, dtype: torch.dtype, least_size: int) -> bool:
    """Whether a product is clearly faster in float32, casts included, on this CPU.

    Args:
        kind: One of ``widen_products.KINDS``.
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
    sizes = SIZES.get(kind)
    if sizes is None:
        return kind
    return f"{kind} {max((size for size in sizes if size <= least_size), default=sizes[0])}"


def _path(dtype: torch.dtype, num_threads: int) -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    machine = (*kernels_in_use(), os.cpu_count())
    text = f"{torch.__version__} {machine} {num_threads} {dtype} {MARGIN} {SIZES} {_NAMES}"
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
    def low(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype)

    with _disable_current_modes(), torch.no_grad():
        found: dict[str, float | None] = {}
        for size in _ROWS:
            product = low(size, _WIDTH), low(_WIDTH, _WIDTH)
            found[_key(PRODUCT, size)] = _ratio(torch.matmul, *product)
            batch = low(4, size, _WIDTH), low(4, _WIDTH, 64)
            found[_key(BATCHED, size)] = _ratio(torch.matmul, *batch)
        for size in _POSITIONS:
            heads = low(1, _POSITIONS[-1] // size, size, 64)
            given = _attend(heads, heads, heads)
            found[_key(ATTENTION, size)] = _ratio(_attend, heads, heads, heads)
            found[_key(ATTENTION_BACKWARD, size)] = _ratio(_attend_back, *[heads] * 4, *given)
        picture, kernel = low(1, 32, 28, 28), low(32, 32, 3, 3)
        found[CONVOLUTION] = _ratio(_convolve, picture, kernel)
        found[CONVOLUTION_BACKWARD] = _ratio(_convolve_back, picture, picture, kernel)
        return found


_HOW = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
"""Stride, padding and so on of the convolution that is measured."""


def _convolve(picture: torch.Tensor, kernel: torch.Tensor) -> Any:
    return aten.convolution(picture, kernel, None, *_HOW)


def _convolve_back(grad: torch.Tensor, picture: torch.Tensor, kernel: torch.Tensor) -> Any:
    wanted = (True, True, False)
    return aten.convolution_backward(grad, picture, kernel, None, *_HOW, wanted)[:2]


def _attend(*query_key_value: torch.Tensor) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu(*query_key_value)


def _attend_back(grad: torch.Tensor, *given: torch.Tensor) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, *given, 0.0, False)


def _ratio(op: Callable[..., Any], *args: torch.Tensor) -> float | None:
    """The time of a low call, by that of a wide one with its casts; None if it does not settle."""
    dtype = args[0].dtype

    def call_wide() -> Any:
        outputs = op(*(arg.float() for arg in args))
        return tree_map_only(torch.Tensor, lambda out: out.to(dtype), outputs)

    low, wide = _least_times(lambda: op(*args), call_wide)
    return None if low is None or wide is None else low / wide


def _least_times(*calls: Callable[[], Any]) -> list[float | None]:
    """The least time of each call, made in turns until each was that fast three times.

    None for one that never was: other work on the machine stops calls for longer than they take.
    """
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    end = time.perf_counter() + _MAX_SECONDS
    for _ in range(_MAX_ROUNDS):
        for call, own in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            own.append(time.perf_counter() - start)
        if all(map(_is_settled, times)) or time.perf_counter() > end:
            break
    return [min(own) if _is_settled(own) else None for own in times]


def _is_settled(times: list[float]) -> bool:
    fastest = sorted(times)[:3]
    return len(fastest) == 3 and fastest[-1] < 1.15 * fastest[0]
