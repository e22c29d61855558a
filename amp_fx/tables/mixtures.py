"""Mixtures of float32 and one low dtype that ATen's kernels accept, and kernels that lack a dtype.

``measured/mixtures-*.json`` contains one file per torch version, which
``tests/tables/measure_mixtures.py`` writes. A mixture is a string with one letter per
floating-point tensor of a call, in order: ``f`` for float32 and ``l`` for a low dtype.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING

import torch

from amp_fx.dtypes import dtype_name, is_low
from amp_fx.tables.presets import MEASURED, VERSIONS, nearest, torch_version

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from amp_fx.tables.presets import Version

ANY = "*"
"""Entry of an op that accepts every measured mixture."""


def mixtures_file(version: Version) -> Path:
    """Returns the path of a torch version's file."""
    return MEASURED / "mixtures-{}.{}.json".format(*version)


@functools.cache
def _measured() -> Mapping[str, Mapping[str, list[str]]]:
    """Returns the mixtures of each op by what the real kernel returns.

    ``"all"`` lists mixtures for which all results are as the fake kernel promises, ``"first"``
    those for which at least the first result is. ``"raises"`` lists low dtypes that only the fake
    kernel accepts.
    """
    supported = [version for version in VERSIONS if mixtures_file(version).exists()]
    path = mixtures_file(nearest(torch_version(), supported))
    measured: dict[str, dict[str, list[str]]] = json.loads(path.read_text(encoding="utf-8"))
    return measured


def mixture_of(dtypes: Iterable[torch.dtype]) -> str | None:
    """Describes the dtypes of a call's tensors; returns None if they are no mixture.

    Integer and bool tensors do not count. Other dtypes, and two low dtypes in one call, are ``?``:
    no op accepts them.
    """
    relevant = [d for d in dtypes if d.is_floating_point or d.is_complex]
    if len(set(relevant)) < 2:
        return None
    low = {d for d in relevant if is_low(d)}
    letters = {torch.float32: "f", **(dict.fromkeys(low, "l") if len(low) == 1 else {})}
    return "".join(letters.get(d, "?") for d in relevant)


def accepts(op: str, mixture: str, *, needs_all_results: bool) -> bool:
    """Returns True if the real kernel of an op accepts a mixture and returns what is promised.

    Args:
        op: A qualified overload name.
        mixture: The mixture, as from ``mixture_of``.
        needs_all_results: Whether results other than the first are used.
    """
    if "?" in mixture:
        return False
    names = ("all",) if needs_all_results else ("all", "first")
    rows = [_measured()[name].get(op, ()) for name in names]
    return any(mixture in row or ANY in row for row in rows)


def lacks_kernel(op: str, dtype: torch.dtype, device_type: str) -> bool:
    """Returns True if an op has no kernel for a low dtype, although its fake kernel accepts it.

    Args:
        op: A qualified overload name.
        dtype: The dtype of the floating-point tensors of a call.
        device_type: Their device type. Only kernels of the CPU were measured.
    """
    return device_type == "cpu" and dtype_name(dtype) in _measured()["raises"].get(op, ())
