"""Turns constants into inputs of the graph, except those that kernels look up.

Before:
    graph(x):
        %frozen = get_attr[_frozen_param0]
        %y      = aten.mm(%x, %frozen)
After:
    graph(x, frozen_cached):
        %y = aten.mm(%x, %frozen_cached)

Inductor protects the memory of inputs, but not that of constants: see
Note [Cached values are read-only] in ``amp_fx.weights.pack``.

Left unchanged: constants of oneDNN's kernels, which look up contents and names of packed weights
and only read them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, ClassVar

import torch

from amp_fx.passes.base import PassResult
from amp_fx.weights.pack import specs_of, values_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from amp_fx.weights.pack import Constants


@dataclasses.dataclass(frozen=True)
class ConstantsToInputs:
    """Replaces constants by placeholders after the other inputs.

    Attributes:
        constants: The constants; receives the descriptions and the values of the new inputs.
    """

    name: ClassVar[str] = "constants_to_inputs"
    is_needed: ClassVar[bool] = True
    constants: Constants = dataclasses.field(repr=False)

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``constants_to_inputs``."""
        count = move_to_inputs(gm, self.constants, lambda user: not _looks_up_constants(user))
        # What is still a constant here is one of the code.
        self.constants.check_addresses(gm)
        return PassResult(Counter(constants_to_inputs=count))


def move_to_inputs(
    gm: fx.GraphModule, constants: Constants, reads_input: Callable[[fx.Node], bool]
) -> int:
    """Makes some nodes read inputs of the graph, where they read constants.

    Args:
        gm: The graph.
        constants: The constants; receives the descriptions and the values of the new inputs.
        reads_input: Returns True for a node that shall read inputs.

    Returns:
        The number of new inputs.
    """
    graph, by_copy = gm.graph, _read_by(gm, constants, reads_input)
    # What other nodes read as an input since an earlier call has one.
    specs = specs_of(constants.prepare, [copy for copy in by_copy if copy not in constants.inputs])
    inputs = graph.find_nodes(op="placeholder")
    num_inputs = len(inputs)
    first = next(iter(graph.nodes))
    tensors = {}
    for copy in [output for spec in specs for output in spec.outputs]:
        node = by_copy[copy][0]
        tensors[copy] = getattr(gm, str(node.target))
        with graph.inserting_before(first):
            constants.inputs[copy] = graph.placeholder(f"{node.name}_cached")
        constants.inputs[copy].meta = dict(node.meta)
        inputs.append(constants.inputs[copy])
    for copy, nodes in by_copy.items():
        for node in nodes:
            node.replace_all_uses_with(constants.inputs[copy], reads_input)
    if inputs and inputs[0] is not first:  # passes put other nodes before and between them
        first.prepend(inputs[0])
    for previous, node in itertools.pairwise(inputs):
        previous.append(node)
    constants.drop_unused(gm)
    constants.specs.extend(specs)
    constants.values.extend(values_of(specs, tensors))
    return len(inputs) - num_inputs


def _read_by(
    gm: fx.GraphModule, constants: Constants, reads_input: Callable[[fx.Node], bool]
) -> dict[fx.Node, list[fx.Node]]:
    """Returns the constants that some nodes read, by the nodes that compute them."""
    read: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in gm.graph.find_nodes(op="get_attr"):
        copy = constants.copies.get(str(node.target))
        if copy is None or not any(map(reads_input, node.users)):
            continue
        if getattr(gm, str(node.target)).layout is torch.strided:
            read[copy].append(node)
    return read


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def _looks_up_constants(user: fx.Node) -> bool:
    """Returns True if inductor's lowering of a node needs weights that are constants.

    It looks up contents and names of quantized weights, and of weights that a C++ template may
    block with ``max_autotune``. All of these only read them.
    """
    from amp_fx.torch_private.inductor_config import config

    if str(user.target).startswith("onednn."):  # an op, or an op without its overload
        return True
    return user.target in PRODUCTS and (config.max_autotune or config.max_autotune_gemm)
