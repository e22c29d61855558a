"""Keys and settings of the on-disk caches of AOTAutograd and inductor.

AOTAutograd's key contains the graph before it is differentiated, so ``keyed`` adds all that decides
how amp_fx rewrites the graphs after that. Inductor's key contains the code of a rewritten graph;
``keyed_graph`` adds the metadata that its lowerings read. Both rely on ``cache_key_tag`` being part
of the keys.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from amp_fx import __version__, passes
from amp_fx.backend.added_passes import passes_of_users
from amp_fx.backend.numerics import is_strict
from amp_fx.devices.wide_products import units
from amp_fx.passes.keep_eager_kernels import FALLBACK
from amp_fx.torch_private.aot_autograd import config as functorch_config
from amp_fx.torch_private.inductor_passes import ROUNDED, STORED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import fx

    from amp_fx.options import Options


@contextlib.contextmanager
def keyed(options: Options) -> Iterator[None]:
    """Context in which AOTAutograd's keys contain what decides how its graphs are rewritten.

    Machines share caches, so the key contains the dtypes for which this CPU has units. Graphs that
    a user's pass without a ``cache_key`` rewrites are not cached.
    """
    users = passes_of_users(options)
    chosen = (
        units(),
        is_strict(options),
        options.has_wide_weight_grads,
        options.has_eager_kernels,
        options.narrow_gathers,
        options.disable_passes,
        [f"{each.name}={getattr(each, 'cache_key', '')}" for each in users],
    )
    with contextlib.ExitStack() as stack:
        # The options are in this key only. Inductor's key comes from the graph that they led to,
        # so graphs that come out alike share code.
        stack.enter_context(_tagged(f"{version()} {chosen}"))
        if not all(hasattr(each, "cache_key") for each in users):
            stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        yield


def keyed_graph(gm: fx.GraphModule) -> contextlib.AbstractContextManager[None]:
    """Context in which inductor's key contains the metadata of a graph that lowerings read."""
    # ``node.meta`` is not part of the code of a graph, and strides are not in it: two programs can
    # differ in these alone.
    marks = [
        (index, key)
        for index, node in enumerate(gm.graph.nodes)
        for key in (FALLBACK, ROUNDED, STORED)
        if node.meta.get(key)
    ]
    strides = gm.graph.output_node().meta.get("original_output_strides")
    return _tagged(f"{version()} {marks} {strides}")


def _tagged(tag: str) -> contextlib.AbstractContextManager[None]:
    config: Any = torch.compiler.config
    joined = f"{config.cache_key_tag} amp_fx: {tag}".strip()
    patch: contextlib.AbstractContextManager[None] = config.patch(cache_key_tag=joined)
    return patch


@functools.cache
def version() -> str:
    """Returns a digest of amp_fx's sources, which contain its passes, its ops and its lowerings."""
    folders = [Path(__file__).parents[1], Path(passes.__path__[0])]
    files = sorted({path for folder in folders for path in folder.rglob("*.py")})
    digest = hashlib.sha256(__version__.encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def without_autograd_cache(**more: Any) -> contextlib.AbstractContextManager[None]:
    """Turns AOTAutograd's caches off and patches ``more`` of its settings, in a context."""
    patch: contextlib.AbstractContextManager[None] = functorch_config.patch(
        enable_autograd_cache=False, enable_remote_autograd_cache=False, **more
    )
    return patch


def region_markers_cacheable() -> contextlib.AbstractContextManager[None]:
    """Makes AOTAutograd's on-disk cache store graphs with opaque regions, in a context.

    Before torch 2.15, the cache rejects graphs with ``_enter_autocast``, because its key lacks the
    ambient state. The calls that amp_fx inserts have the device and the dtype as constant
    arguments, which are in the key.

    Relies on ``torch._inductor.config.unsafe_marked_cacheable_functions``, and on
    ``torch._functorch.config.enable_autograd_cache`` and ``enable_remote_autograd_cache``.
    """
    from amp_fx.torch_private.inductor_config import config

    marked = dict(config.unsafe_marked_cacheable_functions)
    for name in ("_enter_autocast", "_exit_autocast"):
        marked[f"torch.amp.autocast_mode.{name}"] = "amp_fx"
    patch: contextlib.AbstractContextManager[None] = config.patch(
        unsafe_marked_cacheable_functions=marked
    )
    return patch
