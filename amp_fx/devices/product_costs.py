"""Which low products are sums of float32 on a CPU (``Options.products``): by tables, not by timing.

The bits of a result must not depend on how busy a machine was. So a fixed table decides, by what
oneDNN has kernels for. Another table can be given as a file, which
``python -m amp_fx.bench.products`` measures. Either changes sums within a product, never where
values are rounded.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

from amp_fx.devices.low_dtypes import has_product_kernels
from amp_fx.dtypes import dtype_name
from amp_fx.errors import OptionError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

Sizes: TypeAlias = tuple[tuple[str, str, float, float], ...]
"""Dtype, kind, and the least sizes between which products are wide."""

PRODUCT, BATCHED = "product", "batched"
CONVOLUTION, CONVOLUTION_BACKWARD = "convolution", "convolution backward"
ATTENTION, ATTENTION_BACKWARD = "attention", "attention backward"
KINDS = (PRODUCT, BATCHED, CONVOLUTION, CONVOLUTION_BACKWARD, ATTENTION, ATTENTION_BACKWARD)
"""Kinds of kernels."""

_KINDS_OF = {
    **dict.fromkeys(("linear", "mm", "addmm"), (PRODUCT,)),
    **dict.fromkeys(("bmm", "baddbmm"), (BATCHED,)),
    **dict.fromkeys(("matmul", "einsum"), (PRODUCT, BATCHED)),
    "conv": (CONVOLUTION, CONVOLUTION_BACKWARD),
    "scaled_dot_product_attention": (ATTENTION, ATTENTION_BACKWARD),
}
"""The kinds of kernels that come of ops of a program."""

ANY = (0, math.inf)
_SIZES: dict[tuple[str, bool | None], dict[str, tuple[float, float]]] = {
    ("bfloat16", True): {ATTENTION_BACKWARD: (0, 127)},
    ("bfloat16", False): {
        **dict.fromkeys((PRODUCT, BATCHED, CONVOLUTION, CONVOLUTION_BACKWARD), ANY),
        ATTENTION_BACKWARD: (64, math.inf),
    },
    ("float16", False): dict.fromkeys(KINDS, ANY),
}
"""Where float32 takes two thirds of the time or less, casts included, by dtype and by whether
oneDNN has kernels for it: measured on AMD EPYC with AVX512 and bfloat16 units, and with oneDNN held
to ``AVX512_CORE`` and ``AVX2``, with one thread and two, torch 2.13."""


def sizes(products: str | Sizes) -> Sizes:
    """Returns what ``Options.products`` means on this machine."""
    if not isinstance(products, str):
        return products
    names = ("bfloat16", "float16")
    if products == "wide":
        return tuple((dtype, kind, *ANY) for dtype in names for kind in KINDS)
    if products == "low":
        return ()
    here = ((name, has_product_kernels(getattr(torch, name))) for name in names)
    return tuple((k[0], kind, *span) for k in here for kind, span in _SIZES.get(k, {}).items())


def pays(chosen: Sizes, kind: str, dtype: torch.dtype, least_size: int) -> bool:
    """Whether a product is to be wide."""
    asked = (dtype_name(dtype), kind)
    return any(asked == (d, k) and low <= least_size <= high for d, k, low, high in chosen)


def described(products: str | Sizes, dtype: str, ops: Iterable[str]) -> str:
    """Returns a sentence on the products that are wide here; ``""`` if none are."""
    called = {kind for op in ops for kind in _KINDS_OF.get(op.rstrip("123d"), ())}
    kinds = [kind for name, kind, *_ in sizes(products) if name == dtype and kind in called]
    if not kinds:
        return ""
    how = repr(products) if isinstance(products, str) else "a table of yours"
    return (
        f"inductor's products in {dtype} are sums of float32 on this CPU, rounded once "
        f"({', '.join(kinds)}; products={how}): bits differ from native's"
    )


def read(path: str | os.PathLike[str]) -> Sizes:
    """Reads a table of ``amp_fx.bench.products``."""
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))["wide"]
        found = [(d, k, *span) for d, kinds in given.items() for k, span in kinds.items()]
        return tuple(
            (d, _kind(k), float(low), math.inf if high is None else float(high))
            for d, k, low, high in found
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise OptionError(
            f"products={str(path)!r} is neither 'auto', 'low' or 'wide' nor a file that "
            f"python -m amp_fx.bench.products wrote: {error}"
        ) from error


def _kind(name: str) -> str:
    if name not in KINDS:
        raise ValueError(f"no kind of product is called {name!r}")
    return name
