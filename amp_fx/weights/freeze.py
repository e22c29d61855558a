"""Freezes a graph of AOTAutograd with inductor's passes, and keeps a recipe of every constant.

The passes are those of ``torch._inductor.freezing``: weights become constants, what depends on
them alone is folded, products with packed weights take the place of plain ones. They are run
here, on the graph that ``compile_fx`` hands to its inner compiler, because inductor's own
``freeze`` takes every parameter and buffer for constant, and forgets what it folded.

Batch norms are folded into convolutions only when asked: that changes roundings.
"""

from __future__ import annotations

import contextlib
import dataclasses
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.errors import AmpFxError
from amp_fx.graphs.purity import is_pure
from amp_fx.replaced import replaced
from amp_fx.weights.recipes import (
    Recipe,
    Recipes,
    Weight,
    key_of,
    make,
    ops_of,
    packing_key,
    sources_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence
    from types import CodeType

    from torch import fx


class CannotFreezeError(AmpFxError):
    """A graph is left as it is; the message says why. Never reaches a user."""


@dataclasses.dataclass(frozen=True)
class FrozenGraph:
    """A compiled graph whose constants can be given anew.

    Attributes:
        taken: Positions of the inputs that it still takes.
        recipes: Of each constant, by the name that its code has for it.
        code: What runs, to be called with a list of the inputs taken; its constants are
            among the names it finds in its module.
        handed_out: Positions of the outputs that are constants: callers may write to them.
    """

    taken: tuple[int, ...]
    recipes: Mapping[str, Recipe]
    code: FunctionType | MethodType
    handed_out: tuple[int, ...]

    def values(self, names: Mapping[int, str]) -> tuple[FrozenValue, ...]:
        """The values that its constants are, in order."""
        return tuple(FrozenValue(recipe, names) for recipe in self._distinct())

    def bind(self, values: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """Returns the code with such values as its constants."""
        made = dict(zip(self._distinct(), values, strict=True))
        return self.with_constants({name: made[r] for name, r in self.recipes.items()})

    def _distinct(self) -> tuple[Recipe, ...]:
        return tuple(dict.fromkeys(self.recipes.values()))

    def with_constants(self, constants: Mapping[str, torch.Tensor]) -> Callable[..., Any]:
        """Returns the code with these constants and those of no other call."""
        function = self.code.__func__ if isinstance(self.code, MethodType) else self.code
        assert isinstance(function, FunctionType)
        names = {**function.__globals__, **constants}
        bound = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
        return MethodType(bound, self.code.__self__) if isinstance(self.code, MethodType) else bound


class FrozenValue:
    """Describes one constant that a frozen graph keeps of its weights."""

    def __init__(self, recipe: Recipe, names: Mapping[int, str]) -> None:
        self.recipe = recipe
        self.positions = tuple(sorted(sources_of(recipe)))
        self.names = tuple(names[i] for i in self.positions)
        self.ops = ops_of(recipe)
        self.is_alias = isinstance(recipe, Weight)

    def key(self, weights: tuple[torch.Tensor, ...]) -> str:
        """The same in all graphs for what is made alike of the same weights."""
        return key_of(self.recipe, self._identities(weights))

    def family(self, weights: tuple[torch.Tensor, ...]) -> str:
        """The same for all that is packed of the same, whatever the packing was told."""
        return packing_key(self.recipe, self._identities(weights))

    def make(self, weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Makes the constant."""
        return make(self.recipe, dict(zip(self.positions, weights, strict=True)))

    def laid_out(self, weight: torch.Tensor) -> None:
        """It is made by its ops, whatever they are."""

    def _identities(self, weights: tuple[torch.Tensor, ...]) -> dict[int, int]:
        return dict(zip(self.positions, map(id, weights), strict=True))


def compile_frozen(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    weights: Mapping[int, torch.Tensor],
    compile_graph: Callable[..., Any],
    *,
    folds_batch_norm: bool = False,
    **kwargs: Any,
) -> tuple[FrozenGraph, dict[Recipe, torch.Tensor]]:
    """Freezes and compiles a graph.

    Args:
        gm: A graph without gradients, as ``compile_fx`` hands it to its inner compiler.
        example_inputs: Its inputs, fake.
        weights: The inputs that are weights, by position: what is folded is computed from
            these tensors.
        compile_graph: Inductor's ``compile_fx_inner``, or a function like it.
        folds_batch_norm: Whether batch norms are folded into the weights of convolutions.
        **kwargs: What else the inner compiler was given.

    Returns:
        The graph, and the constants that were made of the weights while it was compiled.

    Raises:
        CannotFreezeError: The graph holds nothing that could be frozen, or inductor made
            something of it whose constants cannot be given anew.
    """
    from torch._inductor import config

    with config.patch(always_keep_tensor_constants=True):  # small ones become literals otherwise
        recipes, taken, layout_opt = _freeze(gm, example_inputs, weights, folds_batch_norm)
        _drop_constants(gm, {str(node.target) for node in gm.graph.find_nodes(op="get_attr")})
        handed_out = _constant_outputs(gm)
        inputs = [example_inputs[i] for i in taken]
        kwargs["static_input_idxs"] = _renumbered(kwargs.get("static_input_idxs") or (), taken)
        with _real_constants(example_inputs), _packed_in_cache_keys():
            compiled = compile_graph(gm, inputs, **{**kwargs, "layout_opt": layout_opt})
    code, changing = _checked(gm, compiled, recipes)
    attributes = compiled.frozen_param_names
    made = {recipe: getattr(gm, attributes[name]) for name, recipe in changing.items()}
    _drop_constants(gm)
    return FrozenGraph(taken, changing, code, handed_out), made


def folded(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    weights: Mapping[int, torch.Tensor],
    *,
    folds_batch_norm: bool = False,
) -> dict[Recipe, torch.Tensor]:
    """The constants that a graph is left with when its weights are frozen, by their recipes.

    Tensors are fake, so that nothing is computed; the graph is changed.
    """
    with _fake_packing():
        recipes, _, _ = _freeze(gm, example_inputs, weights, folds_batch_norm)
    names = [str(node.target) for node in gm.graph.find_nodes(op="get_attr")]
    known = {recipes[name]: getattr(gm, name) for name in names if name in recipes}
    return {recipe: value for recipe, value in known.items() if sources_of(recipe)}


def _fake_packing() -> contextlib.AbstractContextManager[None]:
    """Gives ops that pack weights fake results, as torch has no fake kernels of them.

    What is packed takes what the weight takes, but for padding. Relies on
    ``torch._inductor.constant_folding.ConstantFolder`` being an ``fx.Interpreter``.
    """
    from torch._inductor.constant_folding import ConstantFolder

    def call(self: ConstantFolder, target: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if "_reorder_" not in str(target):
            return super(ConstantFolder, self).call_function(target, args, kwargs)
        packed = [weight.clone() for weight in args if isinstance(weight, torch.Tensor)]
        return packed[0] if len(packed) == 1 else packed

    return replaced((ConstantFolder, "call_function", call))


def _freeze(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    weights: Mapping[int, torch.Tensor],
    folds_batch_norm: bool,
) -> tuple[Recipes, tuple[int, ...], bool]:
    """Runs the passes in the order of ``fw_compiler_freezing`` and ``freeze``."""
    from torch._inductor import constant_folding, freezing
    from torch._inductor.freezing_utils import enter_freezing, record_has_frozen_params
    from torch._inductor.fx_passes.freezing_patterns import freezing_passes
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.graph import GraphLowering

    placeholders = gm.graph.find_nodes(op="placeholder")
    taken = tuple(i for i in range(len(placeholders)) if i not in weights)
    layout_opt = bool(GraphLowering.decide_layout_opt(gm, is_inference=True))
    if layout_opt:
        freezing.convert_conv_weights_to_channels_last(gm)
    recipes = Recipes()
    with enter_freezing():
        view_to_reshape(gm)  # type: ignore[no-untyped-call]
        for position, weight in weights.items():
            recipes.put(gm, placeholders[position], weight, Weight(position))
        gm.graph = _without_duplicates(gm.graph)
        _separate_fills(gm.graph)
        gm.recompile()
        with recipes.following(gm), batch_norm_folding(folds_batch_norm):
            freezing_passes(gm, [example_inputs[i] for i in taken])
            constant_folding.constant_fold(gm)
        record_has_frozen_params(gm)
    return recipes, taken, layout_opt


def _without_duplicates(graph: fx.Graph) -> fx.Graph:
    """Merges pure nodes that compute the same; each call of an impure op has its own effect.

    Relies on ``torch._functorch.compile_utils.rand_ops``, the packets that it does not merge.
    """
    from torch._functorch import compile_utils

    calls = [node for node in graph.nodes if node.op == "call_function"]
    impure = [compile_utils.get_aten_target(node) for node in calls if not is_pure(node)]
    with replaced((compile_utils, "rand_ops", [*compile_utils.rand_ops, *impure])):
        return compile_utils.fx_graph_cse(graph)


def _separate_fills(graph: fx.Graph) -> None:
    """Gives every reader of a tensor that is one number throughout a node of its own.

    Inductor computes the number where it is read; what several readers share, ``cat`` among them,
    it writes to memory first, and then what is concatenated, and then a copy of that.
    """
    for fill in graph.find_nodes(op="call_function", target=torch.ops.aten.full.default):
        for reader in list(fill.users)[1:]:
            with graph.inserting_before(reader):
                reader.replace_input_with(fill, graph.node_copy(fill))


def _drop_constants(gm: fx.GraphModule, but_for: Container[str] = ()) -> None:
    """Frees constants: the graph is part of a cycle that lives until the garbage is collected."""
    for name in [each for each in gm._buffers if each not in but_for]:
        del gm._buffers[name]


def _constant_outputs(gm: fx.GraphModule) -> tuple[int, ...]:
    """Positions of the outputs that the passes turned into constants."""
    outputs = gm.graph.output_node().args[0]
    assert isinstance(outputs, (list, tuple))
    is_constant = [isinstance(n, torch.fx.Node) and n.op == "get_attr" for n in outputs]
    return tuple(i for i, known in enumerate(is_constant) if known)


def batch_norm_folding(is_on: bool) -> contextlib.AbstractContextManager[None]:
    """Makes the passes fold arithmetic behind a convolution or product into its weights, or not.

    Relies on ``torch._inductor.fx_passes.freezing_patterns.binary_folding_pass``.
    """
    from torch._inductor.fx_passes import freezing_patterns
    from torch._inductor.pattern_matcher import PatternMatcherPass

    freezing_patterns.lazy_init()  # which fills the pass
    if is_on:
        return contextlib.nullcontext()
    return replaced((freezing_patterns, "binary_folding_pass", PatternMatcherPass()))


def _renumbered(positions: Sequence[int], taken: Sequence[int]) -> list[int]:
    new = {old: i for i, old in enumerate(taken)}
    return [new[position] for position in positions if position in new]


def _real_constants(example_inputs: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Lets fake tensors meet the constants of a graph, which are real."""
    from torch._guards import detect_fake_mode

    fake_mode = detect_fake_mode(example_inputs)
    if fake_mode is None:
        return contextlib.nullcontext()
    return replaced((fake_mode, "allow_non_fake_inputs", True))


def _packed_in_cache_keys() -> contextlib.AbstractContextManager[None]:
    """Lets inductor's on-disk cache take graphs with packed weights, whatever they hold.

    It passes over them because it cannot pickle the weights, and takes the contents of those of
    up to eight elements into the key because it writes them into the code otherwise. Of all
    others only what they are goes there, and the artifact knows them by their names.

    Relies on ``FxGraphCachePickler._reduce_tensor`` and ``CacheabilityValidator.check_tensor`` of
    ``torch._inductor.codecache``.
    """
    from torch._inductor.codecache import CacheabilityValidator, FxGraphCachePickler
    from torch._inductor.freezing_utils import is_frozen_param

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


def _checked(
    gm: fx.GraphModule, compiled: Any, recipes: Recipes
) -> tuple[FunctionType | MethodType, dict[str, Recipe]]:
    """The code of a compiled graph, and its constants, if all are known and can be given anew.

    Relies on ``CompiledFxGraph.constants``, ``frozen_param_names`` (by the names in the code,
    those of the graph's attributes) and ``current_callable``.
    """
    names = dict(getattr(compiled, "frozen_param_names", {}))
    if not names or not all(attribute in recipes for attribute in names.values()):
        raise CannotFreezeError("nothing in it depends on weights alone")
    own = [*vars(gm).values(), *gm._buffers.values(), *gm._parameters.values()]
    for name, constant in compiled.constants.items():
        if not any(constant is value for value in own):
            raise CannotFreezeError(f"inductor made {name} of weights while it generated code")
    code = compiled.current_callable
    function = getattr(code, "__func__", code)
    if not isinstance(code, (FunctionType, MethodType)) or not isinstance(function, FunctionType):
        raise CannotFreezeError("its code is not a function of a Python module")
    known = _names_in(function.__code__)
    if not known.issuperset(names):
        raise CannotFreezeError("its code is in several functions")
    by_name = {name: recipes[attribute] for name, attribute in names.items()}
    changing = {name: recipe for name, recipe in by_name.items() if sources_of(recipe)}
    for name in changing:  # the module lives as long as the process
        function.__globals__[name] = None
        compiled.constants.pop(name, None)
    return code, changing


def _names_in(code: CodeType) -> set[str]:
    inner = [const for const in code.co_consts if hasattr(const, "co_names")]
    return set(code.co_names).union(*[_names_in(const) for const in inner])
