"""Programs for a device type other than that of the model, which this machine may lack.

ATen's kernels for autocast on CUDA also act on fake CUDA tensors, in every build of torch. A model
on the CPU is therefore captured with fake tensors on the other device, where Python code of the
model sees the dtypes of that device, and the graph is moved back when it has its casts.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from amp_fx.dtypes import dtype_name
from amp_fx.errors import OptionError
from amp_fx.graphs.bodies import graphs_in
from amp_fx.graphs.markers import region_arguments
from amp_fx.graphs.metadata import VALUE
from amp_fx.graphs.values import recorded_value, tensors_in
from amp_fx.regions.state import AutocastState, in_disabled_region
from amp_fx.torch_private.autocast import enter_autocast, entered_devices
from amp_fx.torch_private.fake_tensors import detect_fake_mode, fake_tensors_on

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from amp_fx.options import Options


def captured_on(device: torch.device | None) -> AbstractContextManager[None]:
    """Context in which ``torch.export`` captures a program on a device; None changes nothing."""
    return contextlib.nullcontext() if device is None else fake_tensors_on(device)


def move(gm: fx.GraphModule, device: torch.device) -> None:
    """Moves a graph to another device, in place."""
    values = [recorded_value(node) for node in gm.graph.nodes]
    fake_mode = detect_fake_mode(tensors_in(values))
    moved: dict[int, Any] = {}  # two nodes may have the same tensor as value

    def move_leaf(leaf: Any) -> Any:
        return device if isinstance(leaf, torch.device) else leaf

    def move_value(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in moved:
            moved[id(leaf)] = leaf.to(device)
        return moved[id(leaf)]

    with fake_mode or contextlib.nullcontext(), torch.no_grad():
        for graph in graphs_in(gm):
            for node in graph.nodes:
                node.args = map_aggregate(node.args, move_leaf)
                node.kwargs = map_aggregate(node.kwargs, move_leaf)
                if VALUE.is_on(node):
                    VALUE.put(node, map_aggregate(VALUE.of(node), move_value))
    gm.recompile()


def check_region(devices: set[torch.device], options: Options, *, is_chosen: bool) -> None:
    """Raises an error if the region or the dtype of an export is for another device type.

    Args:
        devices: The devices of the program.
        options: The options of the export.
        is_chosen: Whether the argument ``device_type`` chose the device.
    """
    types = {device.type for device in devices}
    if not types:
        return
    where, advice = " and ".join(sorted(types)), _advice(types, is_chosen=is_chosen)
    enabled = set(AutocastState.ambient().enabled)
    if enabled and enabled.isdisjoint(types):
        regions = " and ".join(sorted(enabled))
        raise OptionError(
            f"the region around the call is for {regions}, but the program is for {where}: {advice}"
        )
    if in_disabled_region() and not torch.cuda.is_available() and "cuda" in entered_devices():
        raise OptionError(
            'torch.autocast("cuda") disables itself on a machine without CUDA, so the region '
            "around the call is disabled: call amp_fx.export outside of it, with "
            'device_type="cuda" and dtype'
        )
    dtypes = dict(options.policy.dtypes)
    if options.dtype is None and not enabled and dtypes and types.isdisjoint(dtypes):
        names = " and ".join(f"{dtype_name(dtype)} on {name}" for name, dtype in dtypes.items())
        raise OptionError(
            f"the policy has the low dtype {names}, but the program is for {where}: {advice}"
        )


def check_inner_regions(gm: fx.GraphModule, devices: set[torch.device]) -> None:
    """Raises an error if an enabled region inside a program is for a device that it does not use.

    Args:
        gm: The captured graph.
        devices: The devices of the program.
    """
    types = {device.type for device in devices}
    region = torch.ops.higher_order.wrap_with_autocast
    for graph in graphs_in(gm):
        for node in graph.nodes:
            if node.target not in (region, enter_autocast) or not types:
                continue
            device_type, _, is_enabled, _ = region_arguments(node)
            if is_enabled and device_type not in types:
                where = " and ".join(sorted(types))
                raise OptionError(
                    f"the model enters torch.autocast({device_type!r}), but it is on {where}, "
                    f"where that has no effect: {_advice(types, is_chosen=False)}"
                )


def _advice(types: set[str], *, is_chosen: bool) -> str:
    if is_chosen:
        return "call amp_fx.export outside of regions, or in one for the same device type"
    here = next(iter(sorted(types)))
    return (
        'pass device_type="cuda" to export it for CUDA'
        if "cuda" not in types
        else f"pass device_type={here!r} to export it for {here}"
    )
