"""Classifies the inputs of graphs: weights, weights whose values can be cached, and others."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.dtypes import is_dtensor
from amp_fx.graphs.locations import input_path, lines_of
from amp_fx.graphs.metadata import VALUE
from amp_fx.graphs.values import is_symbolic, is_written
from amp_fx.regions.module_stack import NO_FRAME
from amp_fx.torch_private.fake_tensors import FakeTensor
from amp_fx.weights.kernel_reads import convolution_biases, read_whole
from amp_fx.weights.spread import is_distributed, is_of_plain_module, part_of
from amp_fx.weights.watch import engine, foreign, is_available
from amp_fx.weights.write_signals import DEVICES, is_watchable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import fx

    from amp_fx.regions.module_stack import CompileFrame

TRAINED = "it gets a gradient, and options={'weight_cache': 'training'} is not set"
STORED = "amp_fx.store_low stored it in the low dtype"
WRITTEN = "the graph writes to its memory"
SYMBOLIC = "its sizes are symbolic"
UNWATCHED = "writes to it cannot be detected"
FOREIGN = "its memory is shared, mapped or NumPy's, where writes cannot be detected"
OTHER_INPUTS = "AOTAutograd changed the inputs of the graph"
OTHER_LAYOUT = "AOTAutograd passes it in another layout"
READ_BY_KERNEL = "a generated kernel reads all of it and casts it at no cost"


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Inputs of a captured graph.

    Attributes:
        nodes: The placeholders.
        tensors: The inputs that are tensors, by position.
        weights: Positions of the parameters and buffers of modules.
        trained: Positions of the inputs that require gradients.
    """

    nodes: tuple[fx.Node, ...]
    tensors: Mapping[int, torch.Tensor]
    weights: tuple[int, ...]
    trained: frozenset[int]

    @classmethod
    def of(cls, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Inputs:
        """Returns the inputs of a graph that Dynamo captured."""
        nodes = tuple(gm.graph.find_nodes(op="placeholder"))
        pairs = enumerate(zip(nodes, example_inputs, strict=True))
        tensors = {i: x for i, (_, x) in pairs if isinstance(x, torch.Tensor)}
        return cls(
            nodes,
            tensors,
            tuple(
                i
                for i, x in tensors.items()
                if isinstance(x, torch.nn.Parameter) or _is_module_buffer(nodes[i])
            ),
            frozenset(i for i, x in tensors.items() if x.requires_grad),
        )

    @property
    def has_backward(self) -> bool:
        """True if AOTAutograd differentiates the graph, which is compiled now."""
        return torch.is_grad_enabled() and bool(self.trained)

    @property
    def device_types(self) -> set[str]:
        """The types of the devices of all tensors."""
        return {tensor.device.type for tensor in self.tensors.values()}

    @property
    def device_type(self) -> str | None:
        """The type of the only device, numbers on the CPU aside; None for several devices."""
        tensors = self.tensors.values()
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            devices = {t.device for t in tensors if t.device.type != "cpu" or t.dim() > 0}
        return devices.pop().type if len(devices) == 1 else "cpu" if not devices else None


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight among the inputs of a graph.

    Attributes:
        name: Name in the user's program.
        tensor: The weight; for a DTensor, its local tensor.
    """

    name: str
    tensor: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Weights whose values the graphs of one captured graph may cache.

    Attributes:
        weights: The weights by position; emptied after the compilation, because what is compiled
            must not hold weights.
        rejected: For the names of other weights, the reason why nothing is cached.
        tensors: Positions of the tensors among the inputs of the captured graph.
        trained: Positions of the weights that get gradients.
        is_training_cached: Whether values of trained weights are cached. With one call per update,
            caching would move more memory than it saves.
    """

    weights: dict[int, Weight]
    rejected: dict[str, str]
    tensors: tuple[int, ...]
    trained: frozenset[int]
    is_training_cached: bool

    def chosen(self, *, is_inference: bool) -> dict[int, Weight]:
        """Returns the weights that a graph with or without gradients caches."""
        is_any = is_inference or self.is_training_cached
        return {i: w for i, w in self.weights.items() if is_any or i not in self.trained}

    def in_graph(
        self, placeholders: Sequence[fx.Node], *, is_inference: bool, is_packed: bool
    ) -> Candidates:
        """Returns the weights by their positions in a graph of AOTAutograd.

        There are none if the graph has other tensors than the captured one as inputs: AOTAutograd
        adds states of random numbers, and replaces views of one another. Of a DTensor it passes the
        local part and its mesh.

        Args:
            placeholders: The inputs of the graph.
            is_inference: Whether the graph has no backward.
            is_packed: Whether values become constants of the code.
        """
        tensors = [
            i for i, node in enumerate(placeholders) if isinstance(VALUE.get(node), torch.Tensor)
        ]
        chosen = self.chosen(is_inference=is_inference)
        rejected = dict(self.rejected)
        rejected |= {w.name: TRAINED for i, w in self.weights.items() if i not in chosen}
        if len(tensors) != len(self.tensors):
            rejected |= {weight.name: OTHER_INPUTS for weight in chosen.values()}
            return dataclasses.replace(self, weights={}, rejected=rejected)
        # AOTAutograd adds and removes inputs that are numbers, but keeps the order of the tensors.
        position_of = dict(zip(self.tensors, tensors, strict=True))
        weights = {position_of[i]: weight for i, weight in chosen.items()}
        nodes = [placeholders[i] for i in weights]
        on_accelerators = [node for node in nodes if VALUE.of(node).device.type != "cpu"]
        in_kernels = set() if is_packed else convolution_biases(on_accelerators)
        if not is_inference:
            in_kernels |= read_whole(on_accelerators)
        for i in [i for i in weights if placeholders[i] in in_kernels]:
            rejected[weights.pop(i).name] = READ_BY_KERNEL
        # The store would refuse it in every call, and compute its values outside of generated code.
        real = {i: w.tensor for i, w in weights.items() if is_watchable(w.tensor)}
        for i in foreign(real):
            rejected[weights.pop(i).name] = FOREIGN
        # A last check that the positions belong to the weights: a wrong position would be a wrong
        # number.
        pairs = [(VALUE.of(placeholders[i]), weight.tensor) for i, weight in weights.items()]
        if any(_layout(value) != _layout(weight) for value, weight in pairs):
            rejected |= {weight.name: OTHER_LAYOUT for weight in weights.values()}
            weights = {}
        return dataclasses.replace(self, weights=weights, rejected=rejected)


def find_candidates(
    inputs: Inputs,
    rewritten: fx.GraphModule,
    *,
    frame: CompileFrame = NO_FRAME,
    stored: Collection[int] = (),
    foreign_ids: Collection[int] = (),
    is_training_cached: bool = False,
) -> Candidates:
    """Finds the weights whose values can be cached.

    Rejects weights with symbolic sizes, weights whose writes would not be detected, and weights
    that share storage with an input that the graph writes.

    Args:
        inputs: The inputs of the captured graph.
        rewritten: The same graph with its casts, and with values and versions in its metadata.
        frame: The modules around the graph.
        stored: Identities of weights that ``store_low`` converted.
        foreign_ids: Identities of fake copies of weights whose memory torch did not allocate.
            ``Candidates.in_graph`` finds real ones.
        is_training_cached: See ``Candidates``.
    """
    values = rewritten.graph.find_nodes(op="placeholder")
    sharing: defaultdict[int, set[int]] = defaultdict(set)
    for i, tensor in inputs.tensors.items():
        if tensor.layout is torch.strided:
            sharing[_storage_of(tensor)].add(i)
    # Versions of the rewritten graph's values, because its evaluation ran all writes.
    written = {i for i, node in enumerate(values) if is_written(node)}
    weights: dict[int, Weight] = {}
    rejected: dict[str, str] = {}
    for i in inputs.weights:
        node, tensor = inputs.nodes[i], inputs.tensors[i]
        name, part = input_path(node, frame), part_of(tensor)
        if id(tensor) in stored:
            rejected[name] = STORED
        elif id(tensor) in foreign_ids:
            rejected[name] = FOREIGN
        elif not _is_of_kind(node, tensor):
            rejected[name] = UNWATCHED
        elif not sharing[_storage_of(tensor)].isdisjoint(written):
            rejected[name] = WRITTEN
        elif is_symbolic(VALUE.get(values[i])):
            rejected[name] = SYMBOLIC
        elif not (part.is_meta or type(part) is FakeTensor or is_watchable(part)):
            rejected[name] = UNWATCHED
        else:
            weights[i] = Weight(name, part)
            is_sharded = part is not tensor and part.device.type not in ("cpu", "meta")
            if is_sharded and is_available():
                # On accelerators, list ops request no pointer from the storage of the local
                # tensor: their writes are only recorded for the DTensor.
                engine().share_record(tensor, part)
    return Candidates(weights, rejected, tuple(inputs.tensors), inputs.trained, is_training_cached)


def _storage_of(example: torch.Tensor) -> int:
    return int(part_of(example).untyped_storage()._cdata)


def _is_of_kind(node: fx.Node, example: torch.Tensor) -> bool:
    """Returns True for plain parameters and buffers of modules on supported devices.

    Returns False for weights of modules that FSDP manages, and for subclasses other than DTensor,
    such as quantized weights, because their storage is not plain. A tensor on ``meta`` represents
    a weight on a device that this machine lacks.
    """
    if example.device.type not in (*DEVICES, "meta"):
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


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def owner_of(gm: fx.GraphModule, root: str | None) -> str:
    """Returns the root module's class, or the function, of a graph, followed by its file name."""
    for node in gm.graph.nodes:
        for line in lines_of(node):
            return f"{root or line.function} ({Path(line.file).name})"
    return root or "unknown"
