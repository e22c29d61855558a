"""All patches of torch: context managers that amp_fx's compilations enter, and three for good.

Each says which bug or which missing interface it works around. ``replaced`` restores what a context
replaced; while it is active, all threads see the replacement. Nothing is patched on import. What
the lowering of a product replaces while it generates code is beside it (``inductor``), because that
module cannot import this one.

Three patches stay for the process, because torch runs the patched code outside of any compilation
of amp_fx (``docs/limits.md``): ``skip_calls_under_transforms``, ``wrap_checkpoints`` and
``wrap_swaps``.

From these versions of torch on, patches are needless:

- 2.15: in ``repaired_inductor``, ``recompute_size_and_body`` (pytorch#185873) and
  ``record_original_output_strides``
- not yet, and a bug: ``get_storage`` and ``remove_no_ops`` in ``repaired_inductor``,
  ``packing_products_of_vectors``, ``skip_calls_under_transforms`` (pytorch#128711)
- not yet, and a missing hook or setting: all others
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental import proxy_tensor

from amp_fx.replaced import replaced
from amp_fx.torch_private import pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import fx

    from amp_fx.torch_private.fake_tensors import FakeTensorMode

    Function = Callable[..., Any]

_in_thread = threading.local()


@contextlib.contextmanager
def repaired_inductor() -> Iterator[None]:
    """Context in which four bugs of inductor are repaired.

    Its CPU scheduler computes wrong gradients (pytorch#185509). When the scheduler recomputes a
    loop body, it drops the new name of a buffer that a scatter mutates. A kernel that reads the sum
    may then run before the scatter. Casts around the backward of interpolation or max pooling
    trigger the bug. The repair is that of pytorch#185873. Needless from torch 2.15, where it
    changes nothing.

    After a pass, inductor updates the values of the nodes that depend on a changed node, and
    compares their storages. Sparse tensors have none, so the backward of
    ``nn.Embedding(sparse=True)`` raises an error if a pass changes an op before it. Needed up to
    torch 2.15.

    Before it generates code, inductor computes the values of all nodes again, and gives outputs the
    strides of the new values. They differ if a pass changed the layout of a convolution's weight.
    Here, strides that were recorded before stay (``passes.record_output_strides``). Needless from
    torch 2.15, which does the same.

    Inductor removes additions of 0 and products with 1, also if a graph returns them. The caller
    of ``weight + 0`` then gets the weight itself, and may write to it. Needed for torch 2.15; torch
    2.13 leaves such ops alone.

    Relies on ``SchedulerNode.recompute_size_and_body`` and ``mutation_renames``, on
    ``torch._inductor.fx_utils.get_storage``, on
    ``torch._inductor.compile_fx.record_original_output_strides``, and on
    ``torch._inductor.fx_passes.joint_graph.remove_no_ops``.
    """
    if getattr(_in_thread, "is_repaired", False):  # a graph is compiled inside of ``compile_fx``
        yield
        return
    from amp_fx.torch_private.inductor import (
        SchedulerNode,
        compile_fx_module,
        fx_utils,
        joint_graph,
    )

    get_storage = fx_utils.get_storage
    recompute = SchedulerNode.recompute_size_and_body
    record = compile_fx_module.record_original_output_strides
    remove_no_ops = joint_graph.remove_no_ops

    def storage_or_id(t: torch.Tensor) -> int:
        return get_storage(t) if t.layout is torch.strided else id(t)

    @functools.wraps(recompute)
    def recompute_and_rename(self: SchedulerNode, *args: Any, **kwargs: Any) -> None:
        recompute(self, *args, **kwargs)
        if self.mutation_renames:
            self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    @functools.wraps(remove_no_ops)
    def remove_and_copy(gm: fx.GraphModule, *args: Any) -> None:
        output = gm.graph.output_node()
        before = output.args
        remove_no_ops(gm, *args)

        def copied(node: Any, original: Any) -> Any:
            if node is original:
                return node
            with gm.graph.inserting_before(output):
                copy = gm.graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta = {**node.meta, "val": node.meta["val"].clone()}
            return copy

        output.args = pytree.tree_map(copied, output.args, before)

    @functools.wraps(record)
    def record_once(gm: fx.GraphModule) -> None:
        if "original_output_strides" not in gm.graph.output_node().meta:
            record(gm)

    _in_thread.is_repaired = True
    try:
        with replaced(
            (fx_utils, "get_storage", storage_or_id),
            (SchedulerNode, "recompute_size_and_body", recompute_and_rename),
            (compile_fx_module, "record_original_output_strides", record_once),
            (joint_graph, "remove_no_ops", remove_and_copy),
        ):
            yield
    finally:
        _in_thread.is_repaired = False


def without_input_asserts(names: Collection[str]) -> AbstractContextManager[None]:
    """Context in which generated code does not check sizes and strides of some inputs.

    A check takes 0.5 us of the host's time in every call. Inductor has a setting for all inputs
    only (torch 2.15).

    Relies on ``PythonWrapperCodegen.codegen_input_size_asserts`` adding checks to
    ``_pending_input_asserts``, by the names of the placeholders.
    """
    from amp_fx.torch_private.inductor import PythonWrapperCodegen

    add_asserts = PythonWrapperCodegen.codegen_input_size_asserts

    @functools.wraps(add_asserts)
    def add_others(self: Any) -> None:
        add_asserts(self)
        for name in names:
            self._pending_input_asserts.pop(name, None)

    return replaced((PythonWrapperCodegen, "codegen_input_size_asserts", add_others))


def merging_all_but(packets: Sequence[Any]) -> AbstractContextManager[None]:
    """Context in which AOTAutograd's CSE does not merge calls of some packets.

    CSE takes no predicate (torch 2.15). Relies on ``torch._functorch.compile_utils.rand_ops``, the
    packets that it does not merge.
    """
    from amp_fx.torch_private.aot_autograd import compile_utils

    unmerged = [*compile_utils.rand_ops, *packets]
    return replaced((compile_utils, "rand_ops", unmerged))


def folding_constants_by(fold: Function) -> AbstractContextManager[None]:
    """Context in which inductor's freezing passes call a function to fold constants.

    Inductor's own function does not record how a constant was computed, so that it could not be
    computed again after a write to a weight (torch 2.15).
    """
    from amp_fx.torch_private.inductor import freezing

    return replaced((freezing, "constant_fold", fold))


def batch_norm_folding(is_on: bool) -> AbstractContextManager[None]:
    """Context in which passes fold arithmetic after a convolution or product into its weights.

    Freezing has no setting that turns this off (torch 2.15). Relies on
    ``torch._inductor.fx_passes.freezing_patterns.binary_folding_pass``.
    """
    from amp_fx.torch_private.inductor import PatternMatcherPass, freezing_patterns

    freezing_patterns.lazy_init()  # registers the patterns of the pass that is replaced here
    if is_on:
        return contextlib.nullcontext()
    return replaced((freezing_patterns, "binary_folding_pass", PatternMatcherPass()))


def packing_for_onednn() -> AbstractContextManager[None]:
    """Context in which inductor's freezing packs float32 products for oneDNN instead of MKL.

    Relies on ``fx_passes.mkldnn_fusion``, where ahead-of-time compilation changes nothing else.
    """
    from amp_fx.torch_private.inductor import V

    context: AbstractContextManager[None] = V.set_aot_compilation(True)
    return context


def packing_low_products() -> AbstractContextManager[None]:
    """Context in which inductor's freezing does not pack float32 products.

    MKL's kernels for packed weights have other bits than those that ATen calls.

    Relies on ``fx_passes.mkldnn_fusion``, which packs float32 products if torch has MKL.
    """
    return replaced((torch._C, "has_mkl", False))


def packing_products_of_vectors() -> AbstractContextManager[None]:
    """Context in which inductor's freezing does not raise for the product of a vector.

    Relies on ``fx_passes.mkldnn_fusion``, which multiplies the sizes before the last one by
    ``reduce``, and nothing else. A vector has no such sizes (torch 2.15).
    """
    from amp_fx.torch_private.inductor import mkldnn_fusion

    def product(multiply: Callable[[Any, Any], Any], sizes: Sequence[Any]) -> Any:
        return functools.reduce(multiply, sizes, 1)

    return replaced((mkldnn_fusion, "reduce", product))


@contextlib.contextmanager
def float32_biases() -> Iterator[None]:
    """Context in which packed bfloat16 convolutions take float32 biases, as oneDNN's kernels do.

    Biases are the tensors of one dimension among the arguments. Inductor promotes all arguments to
    one dtype (torch 2.15).

    Relies on the lowerings of these ops promoting the dtypes of all tensors to one, and on
    ``__wrapped__``, which does not. The ops that also add a tensor check the dtype of the bias, so
    it is rounded for them.
    """
    from amp_fx.torch_private.inductor import lowerings

    mkldnn = torch.ops.mkldnn
    names = ("_convolution_pointwise", "_convolution_pointwise_")
    packets = [getattr(mkldnn, name, None) for name in names]
    ops = [getattr(packet, kind, None) for packet in packets for kind in ("default", "binary")]
    before = {op: lowerings[op] for op in ops if op in lowerings}
    alone = getattr(packets[0], "default", None)
    for op, promoting in before.items():
        lowerings[op] = _with_bias(promoting, is_rounded=op is not alone)
    try:
        yield
    finally:
        lowerings.update(before)


def _with_bias(promoting: Any, *, is_rounded: bool) -> Any:
    from amp_fx.torch_private.inductor import ir, to_dtype

    def is_bias(arg: Any) -> bool:
        return isinstance(arg, ir.TensorBox) and len(arg.get_size()) == 1

    @functools.wraps(promoting)
    def lower(*args: Any, **kwargs: Any) -> Any:
        others = [arg for arg in args if isinstance(arg, ir.TensorBox) and not is_bias(arg)]
        dtypes = {other.get_dtype() for other in others}
        if len(dtypes) > 1:
            return promoting(*args, **kwargs)
        if is_rounded:
            [dtype] = dtypes
            args = tuple(to_dtype(arg, dtype) if is_bias(arg) else arg for arg in args)
        return promoting.__wrapped__(*args, **kwargs)

    return lower


def packed_in_cache_keys() -> AbstractContextManager[None]:
    """Context in which inductor's on-disk cache stores graphs with packed weights.

    Inductor skips such graphs because it cannot pickle packed weights. It also adds the contents of
    small tensors to the key because it usually writes them into the code as literals (torch 2.15).
    Here, the key describes packed and one-dimensional constants by layout, dtype, device, shape and
    strides; the artifact refers to them by name.

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


def chosen_templates_in(mode: AbstractContextManager[Any]) -> AbstractContextManager[None]:
    """Context in which a mode is active while inductor uses a C++ template that it has chosen.

    Templates that are only benchmarked do not count. Inductor does not say how a template computes
    a constant (torch 2.15). Relies on ``DataProcessorChoiceCallerWrapper.output_node`` of
    ``torch._inductor.select_algorithm``.
    """
    from amp_fx.torch_private.inductor import DataProcessorChoiceCallerWrapper as Choice

    output_node = Choice.output_node

    @functools.wraps(output_node)
    def recorded(choice: Choice) -> Any:
        with mode:
            return output_node(choice)

    return replaced((Choice, "output_node", recorded))


def without_metadata_guards(fake_mode: FakeTensorMode | None) -> AbstractContextManager[None]:
    """Context in which traces do not guard on the memory format of results.

    Dynamo cannot check such guards on the ragged size of a nested tensor that the graph creates,
    and the memory format in the metadata is not used (torch 2.15).

    Relies on ``torch.fx.experimental.proxy_tensor._extract_tensor_metadata``.
    """
    env = None if fake_mode is None else fake_mode.shape_env
    if env is None:
        return contextlib.nullcontext()
    extract = proxy_tensor._extract_tensor_metadata  # type: ignore[attr-defined]

    def extract_without_guards(*args: Any, **kwargs: Any) -> Any:
        with env.suppress_guards():
            return extract(*args, **kwargs)

    return replaced((proxy_tensor, "_extract_tensor_metadata", extract_without_guards))


def skip_calls_under_transforms(is_skipped: Callable[[Any], bool]) -> None:
    """Makes Dynamo skip only one call under a ``torch.func`` transform, not the whole frame.

    Stays for the process: Dynamo rejects such a frame before it calls a backend. Up to torch 2.15,
    Dynamo would run all later calls of the function uncompiled (pytorch#128711).

    Relies on ``InstructionTranslator._throw_if_in_functorch``. With ``fullgraph=True``, the
    exception reaches the user.

    Args:
        is_skipped: Called with the compiler of a frame; returns True if only this call is skipped.
    """
    from amp_fx.torch_private.dynamo import InstructionTranslator, Unsupported, skip_this_call

    refuse = InstructionTranslator._throw_if_in_functorch

    @functools.wraps(refuse)
    def refuse_once(self: InstructionTranslator) -> None:
        try:
            refuse(self)
        except Unsupported as error:
            if is_skipped(self.output.compiler_fn):
                skip_this_call(error)
                error.logged = True
            raise

    InstructionTranslator._throw_if_in_functorch = refuse_once  # type: ignore[method-assign]


def wrap_checkpoints(wrap: Callable[[Function], Function]) -> None:
    """Wraps the functions that ``torch.utils.checkpoint`` runs now and again in the backward.

    Stays for the process: eager code calls checkpoints. torch has no hook for the state in which a
    checkpoint recomputes, except for autocast's own (torch 2.15).

    Relies on ``checkpoint.CheckpointFunction.forward`` and
    ``checkpoint._checkpoint_without_reentrant_generator`` (``..._impl`` since torch 2.14 or
    2.15), which receive the function as argument 1 and 0, and on ``checkpoint.checkpoint``, which
    looks both up when it is called.
    """
    from torch.utils import checkpoint

    name = "_checkpoint_without_reentrant_generator"
    if hasattr(checkpoint, f"{name}_impl"):
        name = f"{name}_impl"
    reentrant = checkpoint.CheckpointFunction.forward
    non_reentrant = getattr(checkpoint, name)

    @functools.wraps(reentrant)
    def forward(ctx: Any, function: Function, *args: Any) -> Any:
        return reentrant(ctx, wrap(function), *args)  # type: ignore[no-untyped-call]

    @functools.wraps(non_reentrant)
    def generator(function: Function, *args: Any, **kwargs: Any) -> Any:
        return non_reentrant(wrap(function), *args, **kwargs)

    checkpoint.CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]
    setattr(checkpoint, name, generator)


def wrap_swaps(before: Callable[[torch.Tensor], Callable[[], None]]) -> None:
    """Calls a function before two tensors are swapped.

    Stays for the process: the function swaps tensors of the user's program. ``swap_tensors``
    rejects tensors that have weak references (torch 2.15). Code that has already imported the
    function calls the original.

    Args:
        before: Called with each of the two tensors. Returns a function to call after the swap.
    """
    swap: Any = torch.utils.swap_tensors

    @functools.wraps(swap)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        callbacks = [before(tensor) for tensor in (t1, t2)]
        try:
            swap(t1, t2)
        finally:
            for callback in callbacks:
                callback()

    torch.utils.swap_tensors = swap_tensors
