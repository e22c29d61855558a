"""Compiles graphs without gradients for the CPU, with cached values as constants of their code.

The graph is split (``split``), the values become constants, inductor's freezing passes pack them
for its kernels, and what the passes add is split off again. Compiled code finds its constants among
the globals of its module: after a write it gets new ones (``PackedGraph.bind``). Inductor's own
``freeze`` takes every parameter and buffer for constant and forgets how constants were computed.

Batch norms are folded into convolutions only on request, because that changes roundings.
"""

from __future__ import annotations

import contextlib
import dataclasses
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.errors import AmpFxError
from amp_fx.graphs.metadata import VALUE
from amp_fx.graphs.purity import is_pure
from amp_fx.replaced import replaced
from amp_fx.torch_private.fake_tensors import unset_fake_temporarily
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
    from collections.abc import Callable, Mapping, Sequence
    from types import CodeType

    from torch import fx

    from amp_fx.weights.split import CachedValueSpec

    Run = Callable[[fx.Node, Mapping[fx.Node, Any]], Any]


class CannotPackError(AmpFxError):
    """A graph is compiled without constants; the message says why. Never reaches a user."""


@dataclasses.dataclass(frozen=True)
class PackedGraph:
    """A compiled graph whose constants can be replaced.

    Attributes:
        specs: Describes the cached values.
        taken: Positions of the inputs that it still takes.
        code: The compiled function; it takes a list of the inputs.
        names: For each value, the names that the code has for each of its outputs.
    """

    specs: tuple[CachedValueSpec, ...]
    taken: tuple[int, ...]
    code: FunctionType | MethodType
    names: tuple[tuple[tuple[str, ...], ...], ...]

    def bind(self, values: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """Returns the code with other values as its constants.

        Args:
            values: One for each of ``specs``: a tensor, or a tuple of tensors.
        """
        constants: dict[str, torch.Tensor] = {}
        for names, value in zip(self.names, values, strict=True):
            outputs = value if isinstance(value, tuple) else (value,)
            for own, output in zip(names, outputs, strict=True):
                constants.update(dict.fromkeys(own, output))
        function = self.code.__func__ if isinstance(self.code, MethodType) else self.code
        assert isinstance(function, FunctionType)
        scope = {**function.__globals__, **constants}
        bound = FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
        return MethodType(bound, self.code.__self__) if isinstance(self.code, MethodType) else bound


class Constants:
    """Constants of a graph that depend on weights, and how they are computed.

    Args:
        gm: The graph.
        names: Names of its weights in the user's program, by position.
        run: Computes a node from the values of others.
    """

    def __init__(self, gm: fx.GraphModule, names: Mapping[int, str], run: Run) -> None:
        self.gm = gm
        self.prepare = Prepare(names)
        self.copies: dict[str, fx.Node] = {}
        self._run = run

    def put(self, node: fx.Node, value: torch.Tensor, copy: fx.Node) -> None:
        """Replaces a node by a constant, named alike in every process because caches store it."""
        from amp_fx.torch_private.inductor import replace_node_with_constant

        name = f"_frozen_param{len(self.copies)}"
        replace_node_with_constant(self.gm, node, value, name)
        self.copies[name] = copy

    def fold(self, gm: fx.GraphModule) -> None:
        """Replaces everything that depends on constants alone by constants.

        It takes the place of ``torch._inductor.freezing.constant_fold``.
        """
        attributes = gm.graph.find_nodes(op="get_attr")
        sources = {
            n: self.copies[str(n.target)] for n in attributes if str(n.target) in self.copies
        }
        returned = escaping(gm, len(gm.graph.output_node().args[0])) - set(sources)  # type: ignore[arg-type]
        copies = copy_prepared(gm, sources, self.prepare, skipped=returned)
        values: dict[fx.Node, Any] = {}
        with unset_fake_temporarily(), torch.no_grad():
            for node in copies:
                is_own = node.op == "get_attr"
                values[node] = getattr(gm, str(node.target)) if is_own else self._run(node, values)
        for node in values_read(copies, self.prepare, sources, has_views=True):
            self.put(node, values[node], copies[node])
        self._drop_unused()

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
    folds_batch_norm: bool = False,
    chooses_kernels: bool = False,
    **kwargs: Any,
) -> tuple[PackedGraph, list[Any]]:
    """Packs the weights of a graph and compiles it.

    Args:
        gm: A graph without gradients, as ``compile_fx`` hands it to its inner compiler.
        example_inputs: Its inputs, fake.
        weights: The inputs that are weights, by position.
        names: Their names in the user's program.
        compile_graph: Inductor's ``compile_fx_inner``, or a function like it.
        folds_batch_norm: Whether batch norms are folded into the weights of convolutions.
        chooses_kernels: Whether products may add up in another order than each of them does in
            oneDNN: those of few rows in inductor's C++ template (``few_rows``), those of one input
            joined.
        **kwargs: Other arguments of the inner compiler.

    Returns:
        The graph, and the values that were computed while it was compiled.

    Raises:
        CannotPackError: Nothing can be cached, or inductor computed constants of its own.
    """
    with _compiling_constants():
        constants, taken, layout_opt = pack(
            gm,
            example_inputs,
            weights,
            names,
            folds_batch_norm=folds_batch_norm,
            chooses_kernels=chooses_kernels,
        )
        inputs = [example_inputs[i] for i in taken]
        new = {old: i for i, old in enumerate(taken)}
        static = [new[i] for i in kwargs.get("static_input_idxs") or () if i in new]
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
    tuples = [tuple(computed[n] for n in spec.outputs) for spec in specs]
    return (
        PackedGraph(
            tuple(specs),
            taken,
            code,
            tuple(tuple(tuple(outputs[n]) for n in s.outputs) for s in specs),
        ),
        [value[0] if len(value) == 1 else value for value in tuples],
    )


def run_fake(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Computes a node from fake tensors.

    Ops that pack weights have no fake kernels. A packed weight takes the memory of the weight, but
    for padding.
    """
    if "_reorder_" not in str(node.target):
        return run_node(node, values)
    packed = [values[source].clone() for source in node.all_input_nodes]
    return packed[0] if len(packed) == 1 else packed


def specs_of(
    prepare: Prepare, outputs: Sequence[fx.Node] | Mapping[fx.Node, Any]
) -> list[CachedValueSpec]:
    """Describes constants: weights as they are, and values computed from them."""
    weights = [node for node in outputs if node.op == "placeholder"]
    computed = [node for node in outputs if node.op != "placeholder"]
    return [*map(prepare.alias, weights), *prepare.specs(computed)]


def pack(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    weights: Mapping[int, torch.Tensor],
    names: Mapping[int, str],
    *,
    folds_batch_norm: bool,
    chooses_kernels: bool,
    run: Run = run_node,
) -> tuple[Constants, tuple[int, ...], bool]:
    """Runs the passes in the order of ``fw_compiler_freezing`` and ``freeze``; edits the graph.

    Relies on ``cpp.enable_concat_linear``, which turns on a pattern that joins products.

    Returns:
        The constants, the positions of the inputs that are left, and inductor's layout decision.
    """
    from amp_fx.torch_private.inductor import (
        GraphLowering,
        enter_freezing,
        freezing,
        freezing_passes,
        record_has_frozen_params,
        view_to_reshape,
    )
    from amp_fx.torch_private.inductor_config import config

    placeholders = gm.graph.find_nodes(op="placeholder")
    written = written_inputs(gm)
    weights = {i: weight for i, weight in weights.items() if placeholders[i] not in written}
    taken = tuple(i for i in range(len(placeholders)) if i not in weights)
    layout_opt = bool(GraphLowering.decide_layout_opt(gm, is_inference=True))
    if layout_opt:
        freezing.convert_conv_weights_to_channels_last(gm)
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
            constants.fold(gm)
            block_few_rows(gm.graph)
        with (
            replaced((freezing, "constant_fold", constants.fold)),
            batch_norm_folding(folds_batch_norm),
            config.patch({"cpp.enable_concat_linear": True} if chooses_kernels else {}),
        ):
            freezing_passes(gm, [example_inputs[i] for i in taken])
        constants.fold(gm)
        record_has_frozen_params(gm)
    return constants, taken, layout_opt


def _without_duplicates(graph: fx.Graph) -> fx.Graph:
    """Merges pure nodes that compute the same; each call of an impure op has its own effect.

    Relies on ``torch._functorch.compile_utils.rand_ops``, the packets that it does not merge.
    """
    from amp_fx.torch_private.aot_autograd import compile_utils

    calls = [node for node in graph.nodes if node.op == "call_function"]
    impure = [compile_utils.get_aten_target(node) for node in calls if not is_pure(node)]
    with replaced((compile_utils, "rand_ops", [*compile_utils.rand_ops, *impure])):
        return compile_utils.fx_graph_cse(graph)


def batch_norm_folding(is_on: bool) -> contextlib.AbstractContextManager[None]:
    """Makes the passes fold arithmetic after a convolution or product into its weights, or not.

    Relies on ``torch._inductor.fx_passes.freezing_patterns.binary_folding_pass``.
    """
    from amp_fx.torch_private.inductor import PatternMatcherPass, freezing_patterns

    freezing_patterns.lazy_init()  # which fills the pass
    if is_on:
        return contextlib.nullcontext()
    return replaced((freezing_patterns, "binary_folding_pass", PatternMatcherPass()))


def _real_constants(example_inputs: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Context manager in which fake tensors may meet the constants of a graph, which are real."""
    from amp_fx.torch_private.fake_tensors import detect_fake_mode

    fake_mode = detect_fake_mode(example_inputs)
    if fake_mode is None:
        return contextlib.nullcontext()
    return replaced((fake_mode, "allow_non_fake_inputs", True))


def _packed_in_cache_keys() -> contextlib.AbstractContextManager[None]:
    """Context manager in which inductor's on-disk cache stores graphs with packed weights.

    It passes over them because it cannot pickle the weights, and takes the contents of those of
    up to eight elements into the key because it writes them into the code otherwise. Of all
    others only what they are goes there, and the artifact knows them by their names.

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
        place = () if tensor.is_mkldnn else (tensor.stride(), tensor.storage_offset())
        kind = str(tensor.layout), str(tensor.dtype), str(tensor.device)
        return tuple, ((kind, tuple(tensor.shape), place),)

    def check_others(tensor: torch.Tensor) -> None:
        if not is_frozen_param(tensor):
            check(tensor)

    return replaced(
        (FxGraphCachePickler, "_reduce_tensor", reduce_packed),
        (CacheabilityValidator, "check_tensor", staticmethod(check_others)),
    )


def _compiling_constants() -> contextlib.AbstractContextManager[None]:
    """Sets how inductor compiles graphs whose constants are replaced later.

    Code from a cache on disk does not tell what its templates computed.
    """
    from amp_fx.torch_private.inductor_config import config

    has_templates = config.max_autotune or config.max_autotune_gemm
    settings = {"always_keep_tensor_constants": True}  # small ones become literals otherwise
    if has_templates:
        settings |= {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    patch: contextlib.AbstractContextManager[None] = config.patch(settings)
    return patch


def _code_of(
    gm: fx.GraphModule, compiled: Any, constants: Constants, of_templates: TemplateConstants
) -> tuple[FunctionType | MethodType, dict[str, tuple[fx.Node, torch.Tensor]]]:
    """Returns the code of a compiled graph, and its constants by their names in the code.

    Each constant comes with the node of ``prepare`` that computes it.

    Relies on ``CompiledFxGraph.constants``, ``frozen_param_names`` (by the names in the code,
    those of the graph's attributes) and ``current_callable``.

    Raises:
        CannotPackError: The code has other constants, or does not look them up as globals.
    """
    names: dict[str, tuple[fx.Node, torch.Tensor]] = {}
    for name, attribute in getattr(compiled, "frozen_param_names", {}).items():
        if attribute in constants.copies:
            names[name] = constants.copies[attribute], gm.get_buffer(attribute)
    own = [*vars(gm).values(), *gm._buffers.values(), *gm._parameters.values()]
    for name, constant in compiled.constants.items():
        if not any(constant is value for value in own):
            node = of_templates.node_of(constant)
            if node is None:
                raise CannotPackError(f"inductor computed {name} while it generated code")
            names[name] = node, constant
    if not names:
        raise CannotPackError("nothing in it depends on weights alone")
    code = compiled.current_callable
    function = getattr(code, "__func__", code)
    if not isinstance(code, (FunctionType, MethodType)) or not isinstance(function, FunctionType):
        raise CannotPackError("its code is not a function of a Python module")
    if not _names_in(function.__code__).issuperset(names):
        raise CannotPackError("its code is in several functions")
    for name in names:  # the module lives as long as the process
        function.__globals__[name] = None
        compiled.constants.pop(name, None)
    return code, names


def _names_in(code: CodeType) -> set[str]:
    inner = [const for const in code.co_consts if hasattr(const, "co_names")]
    return set(code.co_names).union(*[_names_in(const) for const in inner])
