"""The Dynamo backend: ``torch.compile(model, backend="amp_fx")``."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.capture import Site
from amp_fx.errors import PassError
from amp_fx.fallback import run_under_native_autocast, warn_fallback
from amp_fx.inner import compile_inner
from amp_fx.options import Options, check_device_dtype
from amp_fx.pipeline import default_passes, run_passes
from amp_fx.regions import AutocastState, no_autocast
from amp_fx.snapshot import Snapshot
from amp_fx.stats import record_graph
from amp_fx.values import captured_value, remember_captured, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import fx

log = logging.getLogger(__name__)


def amp_fx(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles one captured graph in automatic mixed precision.

    Args:
        gm: The graph that Dynamo captured.
        example_inputs: Its inputs.
        mode: A mode of inductor, as in ``torch.compile(mode=...)``.
        options: See ``amp_fx.options.Options``; inductor's own options may be among them.

    Returns:
        What Dynamo calls with the graph's inputs.

    Raises:
        OptionError: An option is unknown or has a value that is not allowed.
        BannedOpError: The graph makes an op that autocast bans on its device.
    """
    parsed = Options.parse(options)
    ambient = AutocastState.ambient()
    remember_captured(gm.graph)
    state = ambient if ambient.enabled else bare_state(gm, ambient, parsed)
    site = Site(state, torch.is_grad_enabled())
    restores_outputs = not ambient.enabled and parsed.output_dtype == "original"
    with no_autocast():
        _rewrite(gm, site, parsed, restores_outputs=restores_outputs)
        compiled = compile_inner(gm, example_inputs, parsed, mode)
    return _without_autocast(compiled) if ambient.enabled else compiled


def bare_state(gm: fx.GraphModule, ambient: AutocastState, options: Options) -> AutocastState:
    """The region that a whole graph is, where no ambient autocast is on.

    It is one for the device that the graph's tensors are on: an accelerator, if any is
    among them, else the CPU, as a user of ``torch.autocast`` would choose.

    Raises:
        OptionError: The device cannot autocast to the dtype that was asked for.
    """
    device_type = graph_device_type(gm)
    if device_type is None:
        return ambient
    dtype = options.dtype or ambient.low_dtype(device_type)
    check_device_dtype(device_type, dtype)
    return ambient.turned(device_type, enabled=True, dtype=dtype)


def graph_device_type(gm: fx.GraphModule) -> str | None:
    """The device type of a graph's tensors; None if autocast knows none of them."""
    values = [captured_value(node) for node in gm.graph.nodes]
    present = {tensor.device.type for tensor in tensors_in(values)}
    known = [device for device, _ in AutocastState.ambient().low_dtypes if device in present]
    return known[0] if known else None


def _rewrite(gm: fx.GraphModule, site: Site, options: Options, *, restores_outputs: bool) -> None:
    """Runs the passes; a graph that they cannot rewrite becomes one island."""
    snapshot = Snapshot.take(gm)
    passes = default_passes(options.policy, site, restores_outputs=restores_outputs)
    try:
        record_graph(run_passes(gm, passes))
    except PassError as error:
        if not options.fallback:
            raise
        log.debug("falling back", exc_info=True)
        warn_fallback(error)
        snapshot.restore()
        run_under_native_autocast(gm, site.state, restores_outputs=restores_outputs)


def _without_autocast(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Calls with autocast off: the casts are in the graph already."""

    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        with no_autocast():
            return compiled(*args)

    return call
