"""Finds the inputs of a captured graph that are weights whose values can be cached."""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.dtypes import is_dtensor
from amp_fx.graphs.locations import input_path, lines_of
from amp_fx.graphs.values import is_dynamic, is_written, value_of
from amp_fx.regions.module_stack import NO_FRAME
from amp_fx.torch_private.fake_tensors import FakeTensor
from amp_fx.weights.engine import engine, is_available
from amp_fx.weights.spread import is_distributed, is_of_plain_module, part_of
from amp_fx.weights.write_signals import DEVICES, is_watchable

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import fx

    from amp_fx.regions.module_stack import CompileFrame


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight among the inputs of a graph.

    Attributes:
        name: Name in the user's program.
        tensor: The weight; for a DTensor, its local tensor.
        sharing: Positions of all inputs that share the weight's storage, including the weight.
    """

    name: str
    tensor: torch.Tensor
    sharing: frozenset[int]


def cacheable_weights(
    captured: fx.GraphModule,
    rewritten: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    frame: CompileFrame = NO_FRAME,
    stored: Collection[int] = (),
) -> dict[int, Weight]:
    """Returns the weights of a graph by their positions among its inputs.

    Omits weights with symbolic sizes, weights whose writes would not be detected, and weights that
    share storage with an input that the graph writes.

    Args:
        captured: The graph as Dynamo captured it.
        rewritten: The same graph with its casts, and with values and versions in its metadata.
        example_inputs: The inputs of the graph.
        frame: The modules around the graph.
        stored: Identities of weights that ``store_low`` converted; they are omitted.
    """
    placeholders = captured.graph.find_nodes(op="placeholder")
    values = rewritten.graph.find_nodes(op="placeholder")
    sharing: defaultdict[int, set[int]] = defaultdict(set)
    for i, example in enumerate(example_inputs):
        if isinstance(example, torch.Tensor) and example.layout is torch.strided:
            sharing[_storage_of(example)].add(i)
    written = {i for i, node in enumerate(values) if is_written(node)}
    weights = {}
    for i, (node, example) in enumerate(zip(placeholders, example_inputs, strict=True)):
        if not _is_weight(node, example) or id(example) in stored:
            continue
        aliases = frozenset(sharing[_storage_of(example)])
        part = part_of(example)
        if not aliases.isdisjoint(written) or is_dynamic(value_of(values[i])):
            continue
        if part.is_meta or type(part) is FakeTensor or is_watchable(part):
            weights[i] = Weight(input_path(node, frame), part, aliases)
            is_sharded = part is not example and part.device.type not in ("cpu", "meta")
            if is_sharded and is_available():
                # On accelerators, list ops request no pointer from the storage of the local
                # tensor: their writes are only recorded for the DTensor.
                engine().share_record(example, part)
    return weights


def _storage_of(example: torch.Tensor) -> int:
    return int(part_of(example).untyped_storage()._cdata)


def _is_weight(node: fx.Node, example: Any) -> bool:
    """Returns True for parameters and buffers of modules.

    Returns False for weights of modules that FSDP manages, and for subclasses other than DTensor,
    such as quantized weights, because their storage is not plain. A tensor on ``meta`` represents
    a weight on a device that this machine lacks.
    """
    if not isinstance(example, torch.Tensor) or example.device.type not in (*DEVICES, "meta"):
        return False
    if is_distributed() and not is_of_plain_module(getattr(node, "_dynamo_source", None)):
        return False
    kind = _kind(example)
    if kind is torch.Tensor:
        return _is_module_buffer(node)
    return kind is torch.nn.Parameter and example.layout is torch.strided


def _kind(example: torch.Tensor) -> type[torch.Tensor]:
    """Returns the class of an input; for a DTensor or a fake tensor, the class it represents.

    Inputs are fake if Dynamo's ``DDPOptimizer`` splits a graph into parts.
    """
    is_fake = type(example) is FakeTensor
    has_plain_part = is_dtensor(example) and type(part_of(example)) is torch.Tensor
    if not is_fake and not has_plain_part:
        return type(example)
    return torch.nn.Parameter if isinstance(example, torch.nn.Parameter) else torch.Tensor


def _is_module_buffer(node: fx.Node) -> bool:
    """Returns True if Dynamo marked an input as a static tensor of a module."""
    tensor_dict = node.meta.get("tensor_dict") or {}
    return tensor_dict.get("_dynamo_static_input_type") is not None


def is_weight(node: fx.Node, example: Any) -> bool:
    """Returns True if an input is a parameter or a buffer of a module."""
    is_tensor = isinstance(example, torch.Tensor)
    return isinstance(example, torch.nn.Parameter) or (is_tensor and _is_module_buffer(node))


VERIFY_ENVIRONMENT = "AMP_FX_VERIFY"


def verify_level(option: str) -> str:
    """Returns ``Options.verify``, unless the environment overrides it."""
    return _VERIFY.get(os.environ.get(VERIFY_ENVIRONMENT, ""), option)


_VERIFY = {"1": "full", "full": "full", "sample": "sample", "off": "off"}


def owner_of(gm: fx.GraphModule, root: str | None) -> str:
    """Returns the root module's class, or the function, of a graph, followed by its file name."""
    for node in gm.graph.nodes:
        for line in lines_of(node):
            return f"{root or line.function} ({Path(line.file).name})"
    return root or "unknown"
