"""Connects a graph whose weight casts were taken out with the cache that fills them in."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor

from amp_fx.dtypes import is_spread
from amp_fx.graphs.metadata import KEPT_INPUT
from amp_fx.graphs.places import lines_of
from amp_fx.weights.kept_call import KeptCall
from amp_fx.weights.kept_float8 import Float8Slot, unpacked
from amp_fx.weights.spread import (
    is_distributed,
    is_managed,
    is_of_plain_module,
    part_of,
    spec_like,
    spread_as,
    spreading,
    with_parts,
)
from amp_fx.weights.write_signals import DEVICES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import fx
    from torch._subclasses.fake_tensor import FakeTensorMode

    from amp_fx.weights.kept_cast import Slot


def keepable_weights(
    gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The placeholders that are weights: parameters, and buffers of modules.

    Subclasses other than DTensor (quantized weights) are left out: their storage is not plain. So
    are weights that a library shards (``amp_fx.weights.spread``).

    Returns:
        For each, its name and the names of all inputs that share its storage.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    pairs = list(zip(placeholders, example_inputs, strict=True))
    sharing: defaultdict[int, list[str]] = defaultdict(list)
    for node, example in pairs:
        if isinstance(example, torch.Tensor) and example.layout is torch.strided:
            sharing[_storage_of(example)].append(node.name)
    return tuple(
        (node.name, tuple(sharing[_storage_of(example)]))
        for node, example in pairs
        if _is_weight(node, example)
    )


def _storage_of(example: torch.Tensor) -> int:
    return int(part_of(example).untyped_storage()._cdata)


def _is_weight(node: fx.Node, example: Any) -> bool:
    """Also on ``meta``, which stands for a device that is not here.

    Where no write would be noticed, as on MPS, casts stay in the graph, which fuses them.
    """
    if not isinstance(example, torch.Tensor) or example.device.type not in (*DEVICES, "meta"):
        return False
    if is_distributed() and not is_of_plain_module(getattr(node, "_dynamo_source", None)):
        return False
    kind = _kind(example)
    if kind is torch.Tensor:
        return _is_module_buffer(node)
    is_plain = kind is torch.nn.Parameter and example.layout is torch.strided
    return is_plain and not is_managed(part_of(example))


def _kind(example: torch.Tensor) -> type[torch.Tensor]:
    """The class of an input; for a DTensor, or a fake one, that of what it stands for.

    Dynamo's ``DDPOptimizer`` compiles a graph in parts, for fake weights.
    """
    is_fake = type(example) is FakeTensor and is_distributed()
    is_dtensor = is_spread(example) and type(part_of(example)) is torch.Tensor
    if not is_fake and not is_dtensor:
        return type(example)
    return torch.nn.Parameter if isinstance(example, torch.nn.Parameter) else torch.Tensor


def _is_module_buffer(node: fx.Node) -> bool:
    """Whether Dynamo took an input for a module's own tensor, which keeps its address."""
    tensor_dict = node.meta.get("tensor_dict") or {}
    return tensor_dict.get("_dynamo_static_input_type") is not None


def is_weight(node: fx.Node, example: Any) -> bool:
    """Whether an input is a parameter, or a buffer of a module."""
    is_tensor = isinstance(example, torch.Tensor)
    return isinstance(example, torch.nn.Parameter) or (is_tensor and _is_module_buffer(node))


class KeptInputs(KeptCall):
    """The kept casts and aliases that a graph takes as inputs.

    Args:
        slots: What to pass, in the order of the graph's added inputs.
        passed: Positions of the inputs that the graph takes besides.
        num_inputs: Number of inputs that Dynamo gives.
        specs: For the slots whose weights are DTensors, by position, how their copies lie.
        more: Values that are not inputs.
        **settings: What else ``KeptCall`` takes.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        passed: Sequence[int],
        *,
        num_inputs: int = 0,
        specs: Mapping[int, Any] | None = None,
        more: Sequence[Any] = (),
        **settings: Any,
    ) -> None:
        self.specs = {len(passed) + i: spec for i, spec in (specs or {}).items()}
        self.spread = tuple(sorted({slots[i].source_index for i in specs or ()}))
        # Behind what Dynamo gives come the parts of DTensors: those are what is watched.
        parts = {index: num_inputs + i for i, index in enumerate(self.spread)}
        self.slots = tuple(
            dataclasses.replace(s, source_index=parts.get(s.source_index, s.source_index))
            for s in slots
        )
        wanted = (*self.slots, *more)
        super().__init__(wanted, passed, num_delivered=len(self.slots), **settings)

    def wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled graph as a function of the inputs that Dynamo knows."""
        taken = spreading(self.specs, unpacked(compiled, self.slots))
        return with_parts(self.spread, super().wrap(taken))


def slots_of(placeholders: Iterable[fx.Node]) -> list[Slot]:
    """What is kept, in order; a quantized weight is one value and two placeholders."""
    return list(dict.fromkeys(KEPT_INPUT.of(n) for n in placeholders if KEPT_INPUT.is_on(n)))


def kept_inputs(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    verify: str,
    root: str | None = None,
    more: Sequence[Any] = (),
    may_give_up: bool = False,
) -> tuple[KeptInputs | None, Sequence[Any]]:
    """The kept inputs of a rewritten graph, None if it has none, and what it is compiled for.

    The inputs that the graph does not need are removed.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    slots = slots_of(placeholders)
    if not slots and not more:
        return None, example_inputs
    weights = [example_inputs[slot.source_index] for slot in slots]
    specs = {
        i: spec_like(weight, slots[i].dtype)
        for i, weight in enumerate(weights)
        if is_spread(weight)
    }
    passed = _passed_inputs(placeholders)
    inputs = [*(example_inputs[i] for i in passed), *example_copies(gm, example_inputs)]
    filled = KeptInputs(
        slots,
        passed,
        owner=owner_of(gm, root),
        verify=verify_level(verify),
        num_inputs=len(example_inputs),
        specs=specs,
        more=more,
        may_give_up=may_give_up,
    )
    _remove_others(gm, passed)
    return filled, inputs


VERIFY_ENVIRONMENT = "AMP_FX_VERIFY"


def verify_level(option: str) -> str:
    """``Options.verify``, unless the environment says otherwise."""
    return _VERIFY.get(os.environ.get(VERIFY_ENVIRONMENT, ""), option)


_VERIFY = {"1": "full", "full": "full", "sample": "sample", "off": "off"}


def _passed_inputs(placeholders: Sequence[fx.Node]) -> tuple[int, ...]:
    """Positions of the inputs that Dynamo gives and the graph needs.

    Where no gradient flows, a weight is only there for its copy to be made of.
    """
    given = [node for node in placeholders if not KEPT_INPUT.is_on(node)]
    replaced = {KEPT_INPUT.of(n).source_index for n in placeholders if KEPT_INPUT.is_on(n)}
    return tuple(i for i, node in enumerate(given) if node.users or i not in replaced)


def _remove_others(gm: fx.GraphModule, passed: Sequence[int]) -> None:
    needed = frozenset(passed)
    for index, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if not KEPT_INPUT.is_on(node) and index not in needed:
            gm.graph.erase_node(node)
    gm.recompile()


def owner_of(gm: fx.GraphModule, root: str | None) -> str:
    """Names the owner of a graph: the class of the outermost module or function, and its file."""
    for node in gm.graph.nodes:
        for line in lines_of(node):
            return f"{root or line.function} ({Path(line.file).name})"
    return root or "unknown"


def example_copies(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Example values of the added inputs, for the inner compiler.

    They are fake, with the weights' own sizes: making a real copy fake would invent
    symbolic sizes that no guard knows the source of.
    """
    context = TracingContext.try_get()
    fake_mode: FakeTensorMode | None = context.fake_mode if context is not None else None
    copies = []
    for slot in slots_of(gm.graph.find_nodes(op="placeholder")):
        weight = example_inputs[slot.source_index]
        if isinstance(slot, Float8Slot):
            with fake_mode or contextlib.nullcontext(), torch.no_grad():
                empty = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
                copies += slot.make((empty,))
        else:
            copies.append(_example_copy(weight, slot, fake_mode))
    return copies


def _example_copy(
    weight: torch.Tensor, slot: Slot, fake_mode: FakeTensorMode | None
) -> torch.Tensor:
    part = part_of(weight)
    dtype, strides = slot.laid_out(part)
    with fake_mode or contextlib.nullcontext():
        copy = torch.empty_strided(part.size(), strides, dtype=dtype, device=weight.device)
    return spread_as(spec_like(weight, slot.dtype), copy) if is_spread(weight) else copy
