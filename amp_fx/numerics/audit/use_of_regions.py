"""Findings about autocast regions: products that they do not cast, and a backward inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amp_fx.dtypes import dtype_name
from amp_fx.graphs.policy_mode import ambient_policy
from amp_fx.numerics.audit.recording import Rule, is_below_float32
from amp_fx.numerics.audit.report import new_finding
from amp_fx.numerics.audit.rounding import CASTS
from amp_fx.observe.ops import is_custom
from amp_fx.observe.recorder import is_in_checkpoint
from amp_fx.observe.storages import address_of
from amp_fx.policies.policy import preset
from amp_fx.reports import human
from amp_fx.tables.cast_policy import CastPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amp_fx.graphs.locations import NodeLocation
    from amp_fx.numerics.audit.regions import Region, Regions
    from amp_fx.numerics.audit.report import Finding
    from amp_fx.observe.recorder import Event

LEAST_FLOPS = 1e5
LEAST_SHARE = 0.05
"""The size of a product that has to run in low precision: this many operations, and this share of
all products of the forward."""


class RegionRule(Rule):
    """Finds ``float32_product``, ``region_without_effect`` and ``backward_in_region``."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._casting: set[Region] = set()
        self._products: dict[Region, Event] = {}
        """The first product of each region."""
        self._float32: list[Event] = []
        self._flops = 0
        self._backward: tuple[NodeLocation, Region] | None = None

    def backward(self, event: Event) -> None:
        """Notes the first op of a backward in a region."""
        region = event.region
        if self._backward is not None or region is None or not region.is_enabled:
            return
        if not is_custom(event.node) and not is_in_checkpoint():
            self._backward = self.recorder.here(), region

    def forward(self, event: Event) -> None:
        """Notes products by region."""
        region = event.region
        is_cast = event.name == "_to_copy" and event.function not in CASTS
        if is_cast and region is not None and is_below_float32(event.results[0].dtype):
            self._casting.add(region)
        if not event.flops or not event.floats:
            return
        self._flops += event.flops
        is_float32 = all(tensor.dtype == torch.float32 for tensor in event.floats)
        if region is not None and not region.is_asked:
            # Small ops in float32 are what such regions are for.
            if is_float32 and self._regions.outer(region) is not None and _is_large(event):
                self._float32.append(event)
            return
        has_low = any(is_below_float32(tensor.dtype) for tensor in event.floats)
        for outer in self._regions.entered:
            self._casting |= {outer} if has_low else set()
            self._products.setdefault(outer, event)
        if region is not None and region.is_enabled and is_float32 and not _is_by_policy(event):
            self._float32.append(event)

    def findings(self) -> Iterator[Finding]:
        """Yields products that the regions do not cast, and the backward."""
        yield from self._without_effect()
        least = max(LEAST_FLOPS, LEAST_SHARE * self._flops)
        for event in self._float32:
            assert event.region is not None
            if event.flops < least:
                continue
            message = (
                f"{event.name} with {human(event.flops, '')} operations runs in float32 inside a "
                f"region {_described(event.region)}, so no tensor core is used."
            )
            yield new_finding("float32_product", event.location, message)
        if self._backward is not None:
            location, region = self._backward
            message = (
                f"The backward runs under autocast to {dtype_name(region.dtype)}, which casts ops "
                "of the backward for a second time; PyTorch does not support that."
            )
            yield new_finding("backward_in_region", location, message)

    def _without_effect(self) -> Iterator[Finding]:
        """Yields the lines whose regions cast nothing in any entry."""
        effective = {region.site for region in self._casting}
        for region, event in self._products.items():
            if not region.is_asked or region.site in effective:
                continue
            dtypes = ", ".join(sorted({dtype_name(tensor.dtype) for tensor in event.floats}))
            device = event.floats[0].device.type
            message = (
                f"The region for {region.device_type} and {dtype_name(region.dtype)} casts "
                f"nothing: the products inside run in {dtypes} on {device}."
            )
            site = region.site if region.site.file else event.location
            yield new_finding("region_without_effect", site, message)


def _described(region: Region) -> str:
    return f"of {dtype_name(region.dtype)}" if region.is_asked else "that turns autocast off"


def _is_large(event: Event) -> bool:
    """Returns True if autocast would cast a product that is large in its inner and outer size.

    The products of routers, which regions that are off often surround, have a small outer size.
    """
    result = event.results[0]
    table = preset("torch").tables.get(result.device.type, {})
    if table.get(f"aten::{event.location.op}") is CastPolicy.FP32:  # such as cdist
        return False
    inner = event.flops // (2 * max(1, result.numel()))
    return result.dim() > 0 and min(inner, result.shape[-1]) >= _LARGE


_LARGE = 512


def _is_by_policy(event: Event) -> bool:
    """Returns True if a policy says in which precision the call computes."""
    policy = ambient_policy() or preset("torch")
    table = policy.tables.get(event.tensors[0].device.type, {})
    names = {name.partition(".")[0] for name in table}
    has_policy = f"aten::{event.location.op}" in names and not event.op._schema.is_mutable
    return has_policy or policy != preset("torch")


class LowWeightRule(Rule):
    """Finds ``weights_low``: weights of low precision in products of a region."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self._weights = {
            address_of(weight): weight
            for weight in weights
            if weight.requires_grad and is_below_float32(weight.dtype)
        }
        self._found: dict[str, tuple[torch.dtype, Event]] = {}

    def forward(self, event: Event) -> None:
        """Notes the weights of a product in a region."""
        is_on = event.region is not None and event.region.is_enabled
        if not event.flops or not is_on:
            return
        for tensor in event.floats:
            weight = self._weights.get(address_of(tensor))
            if weight is not None:
                name = self.recorder.places.path_of(weight)
                self._found.setdefault(name, (tensor.dtype, event))

    def findings(self) -> Iterator[Finding]:
        """Yields one finding for all weights."""
        if not self._found:
            return
        dtype, event = next(iter(self._found.values()))
        assert event.region is not None
        names = list(self._found)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        site = event.region.site if event.region.site.file else event.location
        message = (
            f"{len(names)} trained weights of products are stored in "
            f"{dtype_name(dtype)} ({', '.join(names[:3])}{more}): autocast casts no "
            "weight, and the optimizer rounds each update to that dtype."
        )
        yield new_finding("weights_low", site, message, event.location.module)
