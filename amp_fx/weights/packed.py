"""Compiles graphs without gradients for the CPU, with cached values as constants of their code.

``split`` finds the values, which become constants. Inductor's freezing passes pack the constants
for its kernels and add ops to the graph; those that depend on constants alone are folded as well.
Compiled code looks up its constants in the globals of its module, so ``PackedGraph.bind`` can
replace them after a write. Inductor's ``freeze`` is not used: it treats every parameter and buffer
as constant and does not record how constants were computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.errors import AmpFxError
from amp_fx.graphs.metadata import VALUE
from amp_fx.graphs.purity import is_pure
from amp_fx.replaced import replaced
from amp_fx.torch_private.fake_tensors import FakeTensor, unset_fake_temporarily
from amp_fx.weights.batch_norms import fold_batch_norms, round_biases
from amp_fx.weights.few_rows import block_few_rows
from amp_fx.weights.split import (
    Prepare,
    copy_prepared,
    escaping,
    run_node,
    values_read,
    written_inputs,
)
from amp_fx.weights.template_constants import TemplateConstants

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from types import CodeType

    from torch import fx

    from amp_fx.weights.split import CachedValueSpec

    Run = Callable[[fx.Node, Mapping[fx.Node, Any]], Any]
    Check = Callable[[fx.Graph], None]
    Widen = Callable[[fx.Graph], None]


class CannotPackError(AmpFxError):
    """Raised if a graph must be compiled without constants. Never reaches a user."""


@dataclasses.dataclass(frozen=True)
class PackedGraph:
    """Compiled graph whose constants can be replaced.

    Attributes:
        specs: Descriptions of the cached values.
        taken: Positions of the remaining inputs.
        code: The compiled function, which receives a list of the inputs.
        names: For each output of each value, its names in the code.
    """

    specs: tuple[CachedValueSpec, ...]
    taken: tuple[int, ...]
    code: FunctionType | MethodType
    names: tuple[tuple[tuple[str, ...], ...], ...]

    def bind(self, values: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """Returns a copy of the code with new constants.

        Args:
            values: For each of ``specs``, a tensor or a tuple of tensors.
        """
        constants: dict[str, torch.Tensor] = {}
        for value_names, value in zip(self.names, values, strict=True):
            outputs = value if isinstance(value, tuple) else (value,)
            for output_names, output in zip(value_names, outputs, strict=True):
                constants.update(dict.fromkeys(output_names, output))
        function = self.code.__func__ if isinstance(self.code, MethodType) else self.code
        assert isinstance(function, FunctionType)
        scope = {**function.__globals__, **constants}
        bound = FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
        return MethodType(bound, self.code.__self__) if isinstance(self.code, MethodType) else bound


class Constants:
    """Constants of a graph that depend on weights, with the ops that compute them.

    Args:
        gm: The graph.
        names: Names of its weights in the user's program, by position.
        run: Computes a node from the values of its inputs.
    """

    def __init__(self, gm: fx.GraphModule, names: Mapping[int, str], run: Run) -> None:
        self.gm = gm
        self.prepare = Prepare(names)
        self.copies: dict[str, fx.Node] = {}
        self._run = run

    def put(self, node: fx.Node, value: torch.Tensor, copy: fx.Node) -> None:
        """Replaces a node by a constant."""
        from amp_fx.torch_private.inductor import replace_node_with_constant

        # On-disk caches store the name, so it must be the same in every process.
        name = f"_frozen_param{len(self.copies)}"
        replace_node_with_constant(self.gm, node, value, name)
        self.copies[name] = copy

    def fold(self, gm: fx.GraphModule) -> None:
        """Replaces all nodes that depend on constants alone by constants.

        Used instead of ``torch._inductor.freezing.constant_fold``.
        """
        sources = {
            node: self.copies[str(node.target)]
            for node in gm.graph.find_nodes(op="get_attr")
            if str(node.target) in self.copies
        }
        returned = escaping(gm, len(gm.graph.output_node().args[0])) - set(sources)  # type: ignore[arg-type]
        copies = copy_prepared(gm, sources, self.prepare, skipped=returned)
        with _mode_of([getattr(gm, str(node.target)) for node in sources]), torch.no_grad():
            values = self._compute(gm, copies)
        for node in values_read(copies, self.prepare, sources, has_views=True):
            self.put(node, values[node], copies[node])
        self._drop_unused()

    def _compute(self, gm: fx.GraphModule, nodes: Collection[fx.Node]) -> dict[fx.Node, Any]:
        """Computes nodes, and frees each value and constant after its last user.

        All weights of a model in one more dtype or layout are large. What nodes outside of
        ``nodes`` use is never freed.
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
                if source.op == "get_attr" and attributes[str(source.target)] == 1:
                    gm._buffers[str(source.target)] = torch.empty(0)  # until it is unused
        return values

    def _drop_unused(self) -> None:
        gm = self.gm
        gm.graph.eliminate_dead_code()
        for node in gm.graph.find_nodes(op="get_attr"):
            if not node.users:
                gm.graph.erase_node(node)
        used = {str(node.target) for node in gm.graph.find_nodes(op="get_attr")}
        for name in [name for name in self.copies if name in gm._buffers and name not in used]:
            del gm._buffers[name]
        gm.graph.lint()
        gm.recompile()


def compile_packed(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    weights: Mapping[int, torch.Tensor],
    names: Mapping[int, str],
    compile_graph: Callable[..., Any],
    *,
    folds_batch_norm: bool | None = None,
    chooses_kernels: bool = False,
    check: Check | None = None,
    widen: Widen | None = None,
    **kwargs: Any,
) -> tuple[PackedGraph, list[Any]]:
    """Packs the weights of a graph and compiles it.

    Args:
        gm: A graph without gradients, as ``compile_fx`` passes it to its inner compiler.
        example_inputs: Fake inputs of the graph.
        weights: The inputs that are weights, by position.
        names: Names of the weights in the user's program, by position.
        compile_graph: Inductor's ``compile_fx_inner`` or an equivalent function.
        folds_batch_norm: Whether batch norms are folded into the weights of convolutions. None
            folds them where that is more accurate (``batch_norms``), True wherever inductor does.
        chooses_kernels: Whether products may add up in another order than each of them does in
            oneDNN: products of few rows in inductor's C++ template (``few_rows``), and products of
            one input as one product.
        check: Raises ``CannotPackError`` for a packed graph that must not be compiled.
        widen: Computes the remaining low products in float32 if this CPU has no units for them.
        **kwargs: Other arguments of the inner compiler.

    Returns:
        The graph, and the values that were computed during compilation.

    Raises:
        CannotPackError: Nothing can be cached, or inductor added constants whose computation is
            unknown.
    """
    with _compiling_constants():
        constants, taken, layout_opt = pack(
            gm,
            example_inputs,
            weights,
            names,
            folds_batch_norm=folds_batch_norm,
            chooses_kernels=chooses_kernels,
            check=check,
            widen=widen,
        )
        inputs = [example_inputs[i] for i in taken]
        new_positions = {position: i for i, position in enumerate(taken)}
        old_static = kwargs.get("static_input_idxs") or ()
        static = [new_positions[i] for i in old_static if i in new_positions]
        kwargs = {**kwargs, "static_input_idxs": static, "layout_opt": layout_opt}
        of_templates = TemplateConstants(constants.prepare)
        for attribute, node in constants.copies.items():
            if attribute in gm._buffers:
                of_templates.add(gm.get_buffer(attribute), node)
        with _real_constants(example_inputs), _packed_in_cache_keys(), of_templates.following():
            compiled = compile_graph(gm, inputs, **kwargs)
    code, by_name = _code_of(gm, compiled, constants, of_templates)
    outputs: dict[fx.Node, list[str]] = {}
    computed = {}
    for name, (node, tensor) in by_name.items():
        outputs.setdefault(node, []).append(name)
        computed[node] = tensor
    for attribute in constants.copies:  # gm is in a reference cycle
        gm._buffers.pop(attribute, None)
    specs = specs_of(constants.prepare, outputs)
    values = [tuple(computed[n] for n in spec.outputs) for spec in specs]
    output_names = tuple(tuple(tuple(outputs[n]) for n in spec.outputs) for spec in specs)
    packed = PackedGraph(tuple(specs), taken, code, output_names)
    return packed, [value[0] if len(value) == 1 else value for value in values]


def _mode_of(weights: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which new tensors are fake if a weight is fake, and real otherwise."""
    modes = [weight.fake_mode for weight in weights if isinstance(weight, FakeTensor)]
    return modes[0] if modes else unset_fake_temporarily()


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


def pack(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    weights: Mapping[int, torch.Tensor],
    names: Mapping[int, str],
    *,
    folds_batch_norm: bool | None,
    chooses_kernels: bool,
    check: Check | None = None,
    widen: Widen | None = None,
    run: Run = run_node,
) -> tuple[Constants, tuple[int, ...], bool]:
    """Edits a graph with the freezing passes, in the order of ``fw_compiler_freezing``.

    Relies on ``cpp.enable_concat_linear``, which turns on a pattern that joins products.

    Returns:
        The constants, the positions of the remaining inputs, and inductor's layout decision.
    """
    from amp_fx.torch_private.inductor import (
        GraphLowering,
        enter_freezing,
        freezing,
        freezing_passes,
        packing_for_onednn,
        record_has_frozen_params,
        view_to_reshape,
    )
    from amp_fx.torch_private.inductor_config import config

    placeholders = gm.graph.find_nodes(op="placeholder")
    written = written_inputs(gm)
    weights = {i: weight for i, weight in weights.items() if placeholders[i] not in written}
    taken = tuple(i for i in range(len(placeholders)) if i not in weights)
    layout_opt = bool(GraphLowering.decide_layout_opt(gm, is_inference=True))
    constants = Constants(gm, names, run)
    with enter_freezing():
        view_to_reshape(gm)  # type: ignore[no-untyped-call]
        for position, weight in weights.items():
            node = placeholders[position]
            copy = constants.prepare.weight(position, VALUE.of(node))
            constants.put(node, weight, copy)
        gm.graph = _without_duplicates(gm.graph)
        gm.recompile()
        if chooses_kernels:
            if folds_batch_norm is not False:
                fold_batch_norms(gm.graph)
            constants.fold(gm)  # computes what folded norms add to weights and biases
            if block_few_rows(gm.graph):
                constants.fold(gm)  # computes the blocks, before passes that know no padding
        if widen is not None:
            widen(gm.graph)
        if layout_opt:
            freezing.convert_conv_weights_to_channels_last(gm)
        with (
            replaced((freezing, "constant_fold", constants.fold)),
            batch_norm_folding(bool(folds_batch_norm)),
            config.patch({"cpp.enable_concat_linear": True} if chooses_kernels else {}),
            packing_for_onednn() if chooses_kernels else contextlib.nullcontext(),
        ):
            splits = set(_splits(gm.graph))
            freezing_passes(gm, [example_inputs[i] for i in taken])
            _copy_returned_parts(gm, [split for split in _splits(gm.graph) if split not in splits])
        round_biases(gm.graph)
        constants.fold(gm)
        if check is not None:
            check(gm.graph)
        record_has_frozen_params(gm)
    return constants, taken, layout_opt


def _without_duplicates(graph: fx.Graph) -> fx.Graph:
    """Merges equal pure nodes.

    Tensors that are one number throughout (``full``) are not merged: inductor computes the number
    where it is read, but writes a tensor with several readers to memory, and with it what a reader
    concatenates to it.

    Relies on ``torch._functorch.compile_utils.rand_ops``, the packets that CSE does not merge.
    """
    from amp_fx.torch_private.aot_autograd import compile_utils

    calls = [node for node in graph.nodes if node.op == "call_function"]
    impure = [compile_utils.get_aten_target(node) for node in calls if not is_pure(node)]
    kept = [*compile_utils.rand_ops, torch.ops.aten.full, *impure]
    with replaced((compile_utils, "rand_ops", kept)):
        return compile_utils.fx_graph_cse(graph)


def _splits(graph: fx.Graph) -> Sequence[fx.Node]:
    return graph.find_nodes(op="call_function", target=torch.ops.aten.split_with_sizes.default)


def _copy_returned_parts(gm: fx.GraphModule, splits: Sequence[fx.Node]) -> None:
    """Copies results of joined products that a graph returns.

    Products that are not joined are contiguous, and each has a separate storage.

    Args:
        gm: The graph.
        splits: The nodes that split joined products.
    """
    output = gm.graph.output_node()
    returned = {output, *escaping(gm, len(output.args[0]))}  # type: ignore[arg-type]
    for part in [part for split in splits for part in split.users if part in returned]:
        with gm.graph.inserting_after(part):
            copy = gm.graph.call_function(
                torch.ops.aten.clone.default, (part,), {"memory_format": torch.contiguous_format}
            )
        VALUE.put(copy, VALUE.of(part).contiguous())
        part.replace_all_uses_with(copy, returned.__contains__)


def batch_norm_folding(is_on: bool) -> contextlib.AbstractContextManager[None]:
    """Context in which passes fold arithmetic after a convolution or product into its weights.

    Relies on ``torch._inductor.fx_passes.freezing_patterns.binary_folding_pass``.
    """
    from amp_fx.torch_private.inductor import PatternMatcherPass, freezing_patterns

    freezing_patterns.lazy_init()  # registers the patterns of the pass that is replaced here
    if is_on:
        return contextlib.nullcontext()
    return replaced((freezing_patterns, "binary_folding_pass", PatternMatcherPass()))


def _real_constants(example_inputs: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Context in which ops may combine fake tensors with the real constants of a graph."""
    from amp_fx.torch_private.fake_tensors import detect_fake_mode

    fake_mode = detect_fake_mode(example_inputs)
    if fake_mode is None:
        return contextlib.nullcontext()
    return replaced((fake_mode, "allow_non_fake_inputs", True))


def _packed_in_cache_keys() -> contextlib.AbstractContextManager[None]:
    """Context in which inductor's on-disk cache stores graphs with packed weights.

    Inductor skips such graphs because it cannot pickle packed weights. It also adds the contents of
    small tensors to the key because it usually writes them into the code as literals. Here, the key
    describes packed and one-dimensional constants by layout, dtype, device, shape and strides; the
    artifact refers to them by name.

    Relies on ``FxGraphCachePickler._reduce_tensor`` and ``CacheabilityValidator.check_tensor`` of
    ``torch._inductor.codecache``.
    """
    from amp_fx.torch_private.inductor import (
        CacheabilityValidator,
        FxGraphCachePickler,
        is_frozen_param,
    )

    reduce, check = FxGraphCachePickler._reduce_tensor, CacheabilityValidator.check_tensor

    def reduce_packed(self: FxGraphCachePickler, tensor: torch.Tensor) -> Any:
        if not is_frozen_param(tensor) or not (tensor.is_mkldnn or tensor.dim() == 1):
            return reduce(self, tensor)
        geometry = () if tensor.is_mkldnn else (tensor.stride(), tensor.storage_offset())
        kind = str(tensor.layout), str(tensor.dtype), str(tensor.device)
        return tuple, ((kind, tuple(tensor.shape), geometry),)

    def check_others(tensor: torch.Tensor) -> None:
        if not is_frozen_param(tensor):
            check(tensor)

    return replaced(
        (FxGraphCachePickler, "_reduce_tensor", reduce_packed),
        (CacheabilityValidator, "check_tensor", staticmethod(check_others)),
    )


def _compiling_constants() -> contextlib.AbstractContextManager[None]:
    """Context in which inductor compiles code whose constants can be replaced."""
    from amp_fx.torch_private.inductor_config import config

    has_templates = config.max_autotune or config.max_autotune_gemm
    settings = {"always_keep_tensor_constants": True}  # else small ones become literals
    if has_templates:  # cached code does not contain how its templates computed their constants
        settings |= {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    patch: contextlib.AbstractContextManager[None] = config.patch(settings)
    return patch


def _code_of(
    gm: fx.GraphModule, compiled: Any, constants: Constants, of_templates: TemplateConstants
) -> tuple[FunctionType | MethodType, dict[str, tuple[fx.Node, torch.Tensor]]]:
    """Returns the code of a compiled graph, and its constants by their names in the code.

    Each constant is paired with the node of ``prepare`` that computes it.

    Relies on ``CompiledFxGraph.constants``, ``current_callable`` and ``frozen_param_names``, which
    maps names in the code to attributes of the graph.

    Raises:
        CannotPackError: The code has other constants, or does not look up constants as globals.
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
    if not names:
        raise CannotPackError("no value in the graph depends on weights alone")
    code = compiled.current_callable
    function = getattr(code, "__func__", code)
    if not isinstance(code, (FunctionType, MethodType)) or not isinstance(function, FunctionType):
        raise CannotPackError("the compiled code is not a function of a Python module")
    if not _names_in(function.__code__).issuperset(names):
        raise CannotPackError("the compiled code consists of several functions")
    for name in names:  # the module is never freed, so it must not refer to constants
        function.__globals__[name] = None
        compiled.constants.pop(name, None)
    return code, names


def _names_in(code: CodeType) -> set[str]:
    inner = [const for const in code.co_consts if hasattr(const, "co_names")]
    return set(code.co_names).union(*[_names_in(const) for const in inner])
