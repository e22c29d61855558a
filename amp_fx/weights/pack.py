"""Constants of graphs without gradients, packed for the kernels that read them.

``backend.pipeline`` lists the passes that turn weights into constants, fold what depends on them
alone, let inductor pack them for its kernels, and turn all constants into inputs again, except
those that kernels look up, such as oneDNN's packed weights. ``Constants`` records how each constant
is computed, so that it can be computed again. Compiled code looks up its constants in the globals
of its module, so ``PackedGraph.bind`` can replace them after a write. Inductor's ``freeze`` is not
used: it treats every parameter and buffer as constant and does not record how constants were
computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from amp_fx.errors import AmpFxError
from amp_fx.graphs.casts import op_names
from amp_fx.graphs.metadata import VALUE
from amp_fx.torch_private.fake_tensors import (
    FakeTensor,
    FakeTensorMode,
    detect_fake_mode,
    unset_fake_temporarily,
    with_real_tensors,
)
from amp_fx.torch_private.patches import (
    chosen_templates_in,
    float32_biases,
    packed_in_cache_keys,
    without_input_asserts,
)
from amp_fx.torch_private.tensors import data_address
from amp_fx.weights.aliases import escaping
from amp_fx.weights.call import flattened
from amp_fx.weights.plan import CachePlan, copy_prepared, values_read, without_values
from amp_fx.weights.prepare import Prepare, run_node
from amp_fx.weights.template_constants import TemplateConstants

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from types import CodeType

    from amp_fx.weights.prepare import CachedValueSpec

    Run = Callable[[fx.Node, Mapping[fx.Node, Any]], Any]


# Note [Cached values are read-only]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# A cached value, or an alias of a weight, outlives the call. AOTAutograd and inductor decide in
# many places which memory a graph may write, reuse, merge or return. All of these protect the
# inputs of a graph and none protects its constants or intermediate results. So values are inputs:
#
# - ``get_attr`` constants may be overwritten by oneDNN's in-place sums (``mkldnn_fusion``),
#   returned in place of their copies (``remove_noop_ops``), and merged if their addresses are
#   equal while the graph is compiled (``GraphLowering.allocate_non_dup_const_name``).
#   ``constants_to_inputs`` leaves constants to kernels that look them up and only read them. It
#   rejects constants with one address.
# - Inductor's freezing passes run before. They remove copies that the graph returns;
#   ``pack_for_kernels`` adds these again.
# - AOTAutograd sees a value that the forward saves as an intermediate result, which the backward
#   may overwrite (``bw_donated_idxs``). ``protect_saved_inputs`` removes it from that list. A
#   backward may also return it as a gradient; ``copy_returned_inputs`` adds a copy.
# - Values that the caller gets are not cached (``aliases.escaping``).
#
# ``AMP_FX_CHECK=1`` checks the result without such a list (``read_only``).


class CannotPackError(AmpFxError):
    """Raised if a graph must be compiled without constants. Never reaches a user."""


@dataclasses.dataclass(frozen=True)
class PackedGraph:
    """Compiled graph whose packed weights are constants that can be replaced.

    Attributes:
        constants: Descriptions of the values that are constants of the code.
        values: Descriptions of the values that are the last inputs of the code.
        passed: Positions of the inputs that the code gets before the values.
        code: The compiled function, which receives a list of the inputs.
        names: For each output of each constant, its names in the code.
    """

    constants: tuple[CachedValueSpec, ...]
    values: tuple[CachedValueSpec, ...]
    passed: tuple[int, ...]
    code: Callable[[list[Any]], Any]
    names: tuple[tuple[tuple[str, ...], ...], ...]

    def bind(self, constants: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """Returns a copy of the code with new constants.

        Args:
            constants: For each of ``constants``, a tensor or a tuple of tensors.
        """
        scope: dict[str, Any] = {}
        for names, value in zip(self.names, constants, strict=True):
            outputs = value if isinstance(value, tuple) else (value,)
            for output_names, output in zip(names, outputs, strict=True):
                scope.update(dict.fromkeys(output_names, output))
        function = self.code.__func__ if isinstance(self.code, MethodType) else self.code
        assert isinstance(function, FunctionType)
        scope = {**function.__globals__, **scope}
        bound = FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
        return MethodType(bound, self.code.__self__) if isinstance(self.code, MethodType) else bound


class Constants:
    """Constants of a graph that depend on weights, with the ops that compute them.

    Args:
        names: Names of the weights in the user's program, by position.
        run: Computes a node from the values of its inputs.

    Attributes:
        inputs: The inputs that replace constants, by the nodes that compute them.
        specs: Their descriptions, in the order of the inputs.
        values: Their values.
    """

    def __init__(self, names: Mapping[int, str], run: Run = run_node) -> None:
        self.prepare = Prepare(names)
        self.copies: dict[str, fx.Node] = {}
        self.inputs: dict[fx.Node, fx.Node] = {}
        self.specs: list[CachedValueSpec] = []
        self.values: list[Any] = []
        self._run = run

    def put(self, gm: fx.GraphModule, node: fx.Node, value: torch.Tensor, copy: fx.Node) -> None:
        """Replaces a node by a constant that ``copy`` computes."""
        from amp_fx.torch_private.inductor import replace_node_with_constant

        # On-disk caches store the name, so it must be the same in every process.
        name = f"_frozen_param{len(self.copies)}"
        replace_node_with_constant(gm, node, value, name)
        self.copies[name] = copy

    def fold(self, gm: fx.GraphModule) -> int:
        """Replaces all nodes that depend on constants alone by constants.

        Used instead of ``torch._inductor.freezing.constant_fold``.

        Returns:
            The number of new constants.
        """
        sources = {
            node: self.copies[str(node.target)]
            for node in gm.graph.find_nodes(op="get_attr")
            if str(node.target) in self.copies
        }
        # Constants may be returned, but not what is computed from them: the caller owns it.
        returned = escaping(gm, len(gm.graph.output_node().args[0])) - set(sources)  # type: ignore[arg-type]
        copies = copy_prepared(gm, sources, self.prepare, skipped=returned)
        # New tensors are fake if a weight is, as in a plan, and real otherwise. No name refers to
        # the weights: ``_compute`` frees each as soon as its other form exists.
        modes = [
            weight.fake_mode
            for weight in (getattr(gm, str(node.target)) for node in sources)
            if isinstance(weight, FakeTensor)
        ]
        with modes[0] if modes else unset_fake_temporarily(), torch.no_grad():
            values = self._compute(gm, copies)
        folded = values_read(copies, self.prepare, sources, has_views=True)
        for node in folded:
            if isinstance(values[node], FakeTensor):  # a plan describes what is not computed
                VALUE.put(copies[node], values[node])
            self.put(gm, node, values[node], copies[node])
        self.drop_unused(gm)
        return len(folded)

    def _compute(self, gm: fx.GraphModule, nodes: Collection[fx.Node]) -> dict[fx.Node, Any]:
        """Computes nodes, and frees each value and constant after its last user.

        All weights of a model in one more dtype or layout are large. What nodes outside of
        ``nodes`` use is never freed. Neither are the program's own constants, such as a
        ``torch.tensor([1.0, 2.0])``: nodes that depend on them alone stay in the graph.
        """
        num_users = {node: len(node.users) for node in nodes}
        attributes = Counter(str(node.target) for node in gm.graph.find_nodes(op="get_attr"))
        values: dict[fx.Node, Any] = {}
        for node in nodes:
            is_attribute = node.op == "get_attr"
            values[node] = (
                getattr(gm, str(node.target)) if is_attribute else self._run(node, values)
            )
            for source in node.all_input_nodes:
                num_users[source] -= 1
                if num_users[source]:
                    continue
                del values[source]
                name = str(source.target)
                if source.op == "get_attr" and name in self.copies and attributes[name] == 1:
                    gm._buffers[name] = torch.empty(0)  # until it is unused
        return values

    def check_addresses(self, gm: fx.GraphModule) -> None:
        """Raises ``CannotPackError`` if inductor would merge constants that share memory now."""
        constants = [gm._buffers[name] for name in self.copies if name in gm._buffers]
        plain = [c for c in constants if c is not None and c.layout is torch.strided and c.numel()]
        if len(set(map(data_address, plain))) < len(plain):
            raise CannotPackError("two weights share memory")

    def drop_unused(self, gm: fx.GraphModule) -> None:
        """Removes unused nodes, and frees constants that the graph does not read."""
        gm.graph.eliminate_dead_code()
        for node in gm.graph.find_nodes(op="get_attr"):
            if not node.users:
                gm.graph.erase_node(node)
        used = {str(node.target) for node in gm.graph.find_nodes(op="get_attr")}
        for name in [name for name in self.copies if name in gm._buffers and name not in used]:
            del gm._buffers[name]

    def plan(
        self, gm: fx.GraphModule, passed: tuple[int, ...], uncached: Mapping[str, str]
    ) -> CachePlan:
        """Returns the plan of a packed graph.

        Args:
            gm: The graph after all passes.
            passed: Positions of the original inputs that are not constants.
            uncached: For each weight, the reason why no value of it would be cached.
        """
        targets = [str(node.target) for node in gm.graph.find_nodes(op="get_attr")]
        outputs = dict.fromkeys(self.copies[t] for t in targets if t in self.copies)
        constants = specs_of(self.prepare, outputs)
        remaining = without_values([*constants, *self.specs], uncached)
        return CachePlan(tuple(self.specs), tuple(constants), passed, remaining)


def values_of(
    specs: Sequence[CachedValueSpec], tensors: Mapping[fx.Node, torch.Tensor]
) -> list[Any]:
    """Returns the value of each spec: a tensor, or a tuple of tensors for several outputs."""
    values = [tuple(tensors[output] for output in spec.outputs) for spec in specs]
    return [value[0] if len(value) == 1 else value for value in values]


def run_fake(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Computes a node from fake tensors.

    Ops that pack weights have no fake kernels. Their results are represented by copies of the
    weights, which have the same size except for padding.
    """
    if "_reorder_" not in str(node.target):
        return run_node(node, values)
    packed = [values[source].clone() for source in node.all_input_nodes]
    return packed[0] if len(packed) == 1 else packed


def specs_of(
    prepare: Prepare, outputs: Sequence[fx.Node] | Mapping[fx.Node, Any]
) -> list[CachedValueSpec]:
    """Describes constants, both weights and values computed from weights."""
    weights = [node for node in outputs if node.op == "placeholder"]
    computed = [node for node in outputs if node.op != "placeholder"]
    return [*map(prepare.alias, weights), *prepare.specs(computed)]


_PACKED_CONVOLUTIONS = ("mkldnn::_convolution_pointwise", "mkldnn::_convolution_pointwise_")


def compile_packed(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    passed: tuple[int, ...],
    constants: Constants,
    compile_graph: Callable[..., Any],
    **kwargs: Any,
) -> tuple[PackedGraph, list[Any]]:
    """Compiles a graph after the passes that pack its weights.

    Args:
        gm: The graph, whose last inputs are ``constants.values``.
        example_inputs: Its other inputs, fake.
        passed: Their positions among the inputs of the graph that was packed.
        constants: The constants.
        compile_graph: Inductor's ``compile_fx_inner`` or an equivalent function.
        **kwargs: Other arguments of the inner compiler.

    Returns:
        The graph, and the values that were computed during compilation.

    Raises:
        CannotPackError: Nothing can be cached, or inductor added constants whose computation is
            unknown.
    """
    new_inputs = gm.graph.find_nodes(op="placeholder")[len(example_inputs) :]
    of_templates = TemplateConstants(constants.prepare)
    for attribute, node in constants.copies.items():
        if attribute in gm._buffers:
            of_templates.add(gm.get_buffer(attribute), node)
    fake_mode = detect_fake_mode(example_inputs)
    # The shapes of values are those of weights, which Dynamo guards.
    examples = [
        value
        if fake_mode is None or isinstance(value, FakeTensor)
        else fake_mode.from_tensor(value, static_shapes=True)
        for value in flattened(constants.values)
    ]
    has_convolutions = not op_names(gm).isdisjoint(_PACKED_CONVOLUTIONS)
    with (
        packed_in_cache_keys(),
        chosen_templates_in(of_templates),
        float32_biases() if has_convolutions else contextlib.nullcontext(),
        # The store computes values with the strides for which the graph is compiled.
        without_input_asserts([str(node.target) for node in new_inputs]),
    ):
        compiled = compile_graph(gm, [*example_inputs, *examples], **kwargs)
    # Inductor may have computed constants of its own. Each constant of the code must be one that
    # can be computed again after a write.
    by_name = _constants_of(gm, compiled, constants, of_templates)
    if not by_name and not constants.specs:
        raise CannotPackError("no value in the graph depends on weights alone")
    code = _code_of(compiled, by_name) if by_name else compiled
    code_names: dict[fx.Node, list[str]] = {}
    tensors: dict[fx.Node, torch.Tensor] = {}
    for name, (node, tensor) in by_name.items():
        code_names.setdefault(node, []).append(name)
        tensors[node] = tensor
    for name in constants.copies:  # the graph is in a reference cycle, and must not hold them
        gm._buffers.pop(name, None)
    constant_specs = specs_of(constants.prepare, code_names)
    packed = PackedGraph(
        tuple(constant_specs),
        tuple(constants.specs),
        passed,
        code,
        tuple(tuple(tuple(code_names[n]) for n in spec.outputs) for spec in constant_specs),
    )
    return packed, [*values_of(constant_specs, tensors), *constants.values]


@contextlib.contextmanager
def packing(fake_mode: FakeTensorMode | None) -> Iterator[None]:
    """Context in which passes pack weights, and inductor compiles code with constants.

    Args:
        fake_mode: The mode of the graph's inputs.
    """
    from amp_fx.torch_private.inductor import enter_freezing
    from amp_fx.torch_private.inductor_config import config

    # Constants of the code can be replaced; small ones would become literals.
    settings = {"always_keep_tensor_constants": True}
    # Cached code does not contain how its templates computed their constants.
    if config.max_autotune or config.max_autotune_gemm:
        settings |= {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    with config.patch(settings), enter_freezing(), with_real_tensors(fake_mode):
        yield


def _constants_of(
    gm: fx.GraphModule, compiled: Any, constants: Constants, of_templates: TemplateConstants
) -> dict[str, tuple[fx.Node, torch.Tensor]]:
    """Returns the constants of compiled code by their names in the code.

    Each constant is paired with the node of ``prepare`` that computes it.

    Relies on ``CompiledFxGraph.constants`` and ``frozen_param_names``, which maps names in the code
    to attributes of the graph.

    Raises:
        CannotPackError: The code has other constants.
    """
    names: dict[str, tuple[fx.Node, torch.Tensor]] = {}
    for name, attribute in getattr(compiled, "frozen_param_names", {}).items():
        if attribute in constants.copies:
            names[name] = constants.copies[attribute], gm.get_buffer(attribute)
    attributes = [*vars(gm).values(), *gm._buffers.values(), *gm._parameters.values()]
    # The code of a graph without calls is a plain function.
    for name, constant in getattr(compiled, "constants", {}).items():
        if not any(constant is attribute for attribute in attributes):
            node = of_templates.node_of(constant)
            if node is None:
                raise CannotPackError(f"inductor computed {name} while it generated code")
            names[name] = node, constant
    return names


def _code_of(compiled: Any, names: Collection[str]) -> FunctionType | MethodType:
    """Returns the code of a compiled graph, which looks up its constants by their names.

    Relies on ``CompiledFxGraph.constants`` and ``current_callable``.

    Raises:
        CannotPackError: The code does not look up constants as globals.
    """
    code = compiled.current_callable
    function = getattr(code, "__func__", code)
    if not isinstance(code, (FunctionType, MethodType)) or not isinstance(function, FunctionType):
        raise CannotPackError("the compiled code is not a function of a Python module")
    if not _names_in(function.__code__).issuperset(names):
        raise CannotPackError("the compiled code consists of several functions")
    for name in names:  # the module is never freed, so it must not refer to constants
        function.__globals__[name] = None
        compiled.constants.pop(name, None)
    return code


def _names_in(code: CodeType) -> set[str]:
    inner = [const for const in code.co_consts if hasattr(const, "co_names")]
    return set(code.co_names).union(*[_names_in(const) for const in inner])
