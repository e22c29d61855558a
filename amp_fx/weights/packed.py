"""Compiles graphs without gradients, with weights packed for the kernels that read them.

``split`` finds the values, which become constants. Inductor's freezing passes pack the constants
for its kernels and add ops to the graph; those that depend on constants alone are folded as well.
Then all constants become inputs again, except those that kernels look up, such as oneDNN's packed
weights. Compiled code looks up its constants in the globals of its module, so ``PackedGraph.bind``
can replace them after a write. Inductor's ``freeze`` is not used: it treats every parameter and
buffer as constant and does not record how constants were computed.

Note [Cached values are read-only]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A cached value, or an alias of a weight, outlives the call. AOTAutograd and inductor decide in many
places which memory a graph may write, reuse, merge or return. All of these protect the inputs of a
graph and none protects its constants or intermediate results. So values are inputs:

- ``get_attr`` constants may be overwritten by oneDNN's in-place sums (``mkldnn_fusion``), returned
  in place of their copies (``remove_noop_ops``), and merged if their addresses are equal while the
  graph is compiled (``GraphLowering.allocate_non_dup_const_name``). ``Constants.to_inputs`` leaves
  constants to kernels that look them up and only read them. It rejects constants with one address.
- Inductor's freezing passes run before. They remove copies that the graph returns;
  ``_separate_outputs`` adds these again.
- AOTAutograd sees a value that the forward saves as an intermediate result, which the backward may
  overwrite (``bw_donated_idxs``); ``keep_saved`` removes it from that list. A backward may also
  return it as a gradient; ``copy_returned_inputs`` adds a copy.
- Values that the caller gets are not cached (``split.escaping``).

``AMP_FX_CHECK=1`` checks the result without such a list (``read_only``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import Counter, defaultdict
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from amp_fx.errors import AmpFxError
from amp_fx.graphs.metadata import VALUE
from amp_fx.graphs.purity import is_pure
from amp_fx.replaced import replaced
from amp_fx.torch_private.fake_tensors import FakeTensor, unset_fake_temporarily
from amp_fx.torch_private.tensors import data_address
from amp_fx.weights.batch_norms import fold_batch_norms, round_biases
from amp_fx.weights.call import flattened
from amp_fx.weights.few_rows import block_few_rows
from amp_fx.weights.split import (
    Prepare,
    copy_prepared,
    escaping,
    run_node,
    values_read,
    viewed_by,
    written_inputs,
)
from amp_fx.weights.template_constants import TemplateConstants

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from types import CodeType

    from amp_fx.weights.split import CachedValueSpec

    Run = Callable[[fx.Node, Mapping[fx.Node, Any]], Any]
    Check = Callable[[fx.Graph], None]
    Widen = Callable[[fx.Graph], None]


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

    def to_inputs(self) -> tuple[list[CachedValueSpec], list[Any]]:
        """Turns constants into inputs of the graph, except those that kernels look up.

        See Note [Cached values are read-only].

        Returns:
            Descriptions of the values that are the last inputs now, and the values.
        """
        graph, by_copy = self.gm.graph, self._plain_constants()
        specs = specs_of(self.prepare, by_copy)
        inputs = graph.find_nodes(op="placeholder")
        first = next(iter(graph.nodes))
        tensors = {}
        for copy in [output for spec in specs for output in spec.outputs]:
            nodes = by_copy[copy]
            tensors[copy] = getattr(self.gm, str(nodes[0].target))
            with graph.inserting_before(first):
                inputs.append(graph.placeholder(f"{nodes[0].name}_cached"))
            inputs[-1].meta = dict(nodes[0].meta)
            for node in nodes:
                node.replace_all_uses_with(inputs[-1], lambda user: not _looks_up_constants(user))
        if inputs and inputs[0] is not first:  # passes put other nodes before and between them
            first.prepend(inputs[0])
        for previous, node in itertools.pairwise(inputs):
            previous.append(node)
        self._drop_unused()
        self._check_addresses()
        return specs, _values_of(specs, tensors)

    def _check_addresses(self) -> None:
        """Raises ``CannotPackError`` if inductor would merge constants that share memory now."""
        constants = [self.gm._buffers[name] for name in self.copies if name in self.gm._buffers]
        plain = [c for c in constants if c is not None and c.layout is torch.strided and c.numel()]
        if len(set(map(data_address, plain))) < len(plain):
            raise CannotPackError("two weights share memory")

    def _plain_constants(self) -> dict[fx.Node, list[fx.Node]]:
        """Returns the constants that ``to_inputs`` replaces, by their nodes in ``prepare``."""
        constants: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in self.gm.graph.find_nodes(op="get_attr"):
            copy = self.copies.get(str(node.target))
            if copy is None or all(map(_looks_up_constants, node.users)):
                continue
            if getattr(self.gm, str(node.target)).layout is torch.strided:
                constants[copy].append(node)
        return constants

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


def _looks_up_constants(user: fx.Node) -> bool:
    """Returns True if inductor's lowering of a node needs weights that are constants.

    It looks up contents and names of quantized weights, and of weights that a C++ template may
    block with ``max_autotune``. All of these only read them.
    """
    from amp_fx.torch_private.inductor_config import config

    if str(user.target).startswith("onednn."):  # an op, or an op without its overload
        return True
    return user.target in _PRODUCTS and (config.max_autotune or config.max_autotune_gemm)


_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


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
    from amp_fx.torch_private.inductor import without_input_asserts

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
        old_static = kwargs.get("static_input_idxs") or ()
        static = [new for new, old in enumerate(taken) if old in old_static]
        value_specs, values = constants.to_inputs()
        examples = _examples(flattened(values), example_inputs)
        static += range(len(taken), len(taken) + len(examples))
        inputs = [*(example_inputs[i] for i in taken), *examples]
        kwargs = {**kwargs, "static_input_idxs": static, "layout_opt": layout_opt}
        new_inputs = gm.graph.find_nodes(op="placeholder")[len(taken) :]
        of_templates = TemplateConstants(constants.prepare)
        for attribute, node in constants.copies.items():
            if attribute in gm._buffers:
                of_templates.add(gm.get_buffer(attribute), node)
        with (
            _real_constants(example_inputs),
            _packed_in_cache_keys(),
            of_templates.following(),
            # The store computes values with the strides for which the graph is compiled.
            without_input_asserts([str(node.target) for node in new_inputs]),
        ):
            compiled = compile_graph(gm, inputs, **kwargs)
    by_name = _constants_of(gm, compiled, constants, of_templates)
    if not by_name and not value_specs:
        raise CannotPackError("no value in the graph depends on weights alone")
    code = _code_of(compiled, by_name) if by_name else compiled
    code_names: dict[fx.Node, list[str]] = {}
    tensors: dict[fx.Node, torch.Tensor] = {}
    for name, (node, tensor) in by_name.items():
        code_names.setdefault(node, []).append(name)
        tensors[node] = tensor
    for attribute in constants.copies:  # gm is in a reference cycle
        gm._buffers.pop(attribute, None)
    constant_specs = specs_of(constants.prepare, code_names)
    packed = PackedGraph(
        tuple(constant_specs),
        tuple(value_specs),
        taken,
        code,
        tuple(tuple(tuple(code_names[n]) for n in spec.outputs) for spec in constant_specs),
    )
    return packed, [*_values_of(constant_specs, tensors), *values]


def _values_of(
    specs: Sequence[CachedValueSpec], tensors: Mapping[fx.Node, torch.Tensor]
) -> list[Any]:
    """Returns the value of each spec: a tensor, or a tuple of tensors for several outputs."""
    values = [tuple(tensors[output] for output in spec.outputs) for spec in specs]
    return [value[0] if len(value) == 1 else value for value in values]


def _examples(values: Iterable[torch.Tensor], example_inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Returns fake inputs for values that become inputs of a graph."""
    from amp_fx.torch_private.fake_tensors import detect_fake_mode

    fake_mode = detect_fake_mode(example_inputs)
    return [
        value
        if fake_mode is None or isinstance(value, FakeTensor)
        else fake_mode.from_tensor(value, static_shapes=True)
        for value in values
    ]


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
        packing_low_products,
        packing_products_of_vectors,
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
            # Recorded strides fix the layout of outputs. An op that does it as well would hide
            # from passes that its input is returned, and they would remove copies before it.
            with replaced((freezing, "enforce_output_layout", lambda _: None)):
                freezing.convert_conv_weights_to_channels_last(gm)
        with (
            replaced((freezing, "constant_fold", constants.fold)),
            batch_norm_folding(bool(folds_batch_norm)),
            config.patch({"cpp.enable_concat_linear": True} if chooses_kernels else {}),
            packing_for_onednn() if chooses_kernels else packing_low_products(),
            packing_products_of_vectors(),
        ):
            splits, sharing = set(_splits(gm.graph)), _outputs_sharing(gm)
            freezing_passes(gm, [example_inputs[i] for i in taken])
            _copy_returned_parts(gm, [split for split in _splits(gm.graph) if split not in splits])
            _separate_outputs(gm, sharing)
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


def _outputs_sharing(gm: fx.GraphModule) -> list[fx.Node | int | None]:
    """Returns what each output of a graph shares memory with.

    That is an input or a constant of the graph, or the position of an earlier output. It is the
    position of the output itself if the output shares its memory with none of these.
    """
    sharing: list[fx.Node | int | None] = []
    first: dict[fx.Node, int] = {}
    for i, output in enumerate(gm.graph.output_node().args[0]):  # type: ignore[arg-type]
        base = viewed_by(output) if isinstance(output, fx.Node) else None
        is_given = base is not None and base.op in ("placeholder", "get_attr")
        sharing.append(base if is_given or base is None else first.setdefault(base, i))
    return sharing


def _separate_outputs(gm: fx.GraphModule, sharing: Sequence[fx.Node | int | None]) -> None:
    """Copies outputs that share memory because passes removed a copy.

    Inductor's freezing removes casts to the dtype that a value has, which are copies.

    Args:
        gm: The graph.
        sharing: ``_outputs_sharing`` before the passes.
    """
    output = gm.graph.output_node()
    returned: list[Any] = [*output.args[0]]  # type: ignore[misc]
    pairs = zip(sharing, _outputs_sharing(gm), strict=True)
    for i in [
        i for i, (before, after) in enumerate(pairs) if isinstance(before, int) and before != after
    ]:
        with gm.graph.inserting_before(output):
            copy = gm.graph.call_function(torch.ops.aten.clone.default, (returned[i],))
        VALUE.put(copy, VALUE.of(returned[i]).clone())
        returned[i] = copy
    output.args = (tuple(returned),)


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
