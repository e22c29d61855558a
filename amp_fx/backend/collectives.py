"""Narrows the collectives in AOTAutograd's graphs, and counts the bytes that they send."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.graphs.collectives import collective_bytes
from amp_fx.passes.narrow_gathers import NarrowGathers
from amp_fx.stats import record
from amp_fx.weights.spread import is_distributed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

    from amp_fx.options import Options

log = logging.getLogger("amp_fx.inner")


def narrowing(compile_inside: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """Wraps an inner compiler so that it narrows collectives first."""
    if not is_distributed():
        return compile_inside

    def compile_narrowed(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        narrow_and_count(gm, narrows=options.narrow_gathers)
        return compile_inside(gm, example_inputs, **kwargs)

    return compile_narrowed


def narrow_and_count(gm: fx.GraphModule, *, narrows: bool) -> None:
    """Narrows gathers in a graph if ``narrows`` is True, and counts the bytes that it sends."""
    before = collective_bytes(gm.graph)
    if not before:
        return
    counts = Counter(bytes_sent=before, bytes_sent_before=before)
    if narrows:
        result = NarrowGathers().call(gm)
        if result.modified:
            gm.graph.lint()
            gm.recompile()
        counts = Counter(bytes_sent=collective_bytes(gm.graph), bytes_sent_before=before)
        counts.update(result.counts)
    log.info("collectives: %s", dict(counts))
    record(counts)


def narrowing_in_keys(options: Options) -> contextlib.AbstractContextManager[None]:
    """Adds the option ``narrow_gathers`` to the keys of on-disk caches.

    Relies on ``cache_key_tag`` being part of the keys of inductor's and AOTAutograd's caches.
    """
    if not is_distributed():
        return contextlib.nullcontext()
    config: Any = torch.compiler.config
    tag = f"{config.cache_key_tag} amp_fx: narrow_gathers={options.narrow_gathers}"
    patch: contextlib.AbstractContextManager[None] = config.patch(cache_key_tag=tag.strip())
    return patch
