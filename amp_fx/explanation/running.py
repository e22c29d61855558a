"""Captures the graphs of a stand-in: a copy of a model and its inputs with fake tensors.

Running the copy costs nothing and changes no parameter, buffer or attribute of the model, nor
Dynamo's state. If the machine lacks the model's device (``device_type="cuda"`` without a GPU,
``device="meta"``), the copy is on the CPU and uses that device's op tables, because fake tensors of
a device that torch was built without cannot be indexed or differentiated.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from amp_fx.backend.entry import prepare_torch
from amp_fx.backend.rewrite import rewrite
from amp_fx.errors import OptionError, UnsupportedError
from amp_fx.graphs.values import call_on_fakes, hide_meta_errors, storage_id, to_meta_inputs
from amp_fx.random_states import preserve_random_states
from amp_fx.regions.state import autocast_device_types, left_on_error, no_autocast
from amp_fx.torch_private import pytree
from amp_fx.torch_private.autograd import restore_functorch_levels
from amp_fx.torch_private.dynamo import config as dynamo_config
from amp_fx.torch_private.dynamo import counters, optimize, pgo
from amp_fx.torch_private.fake_tensors import FakeTensor, FakeTensorMode
from amp_fx.torch_private.modules import has_global_module_hooks
from amp_fx.weights.inputs import Inputs
from amp_fx.weights.watch import foreign
from amp_fx.weights.write_signals import is_watchable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from amp_fx.backend.rewrite import Rewritten
    from amp_fx.options import Options


@dataclasses.dataclass(frozen=True)
class StandIn:
    """A copy of a model and its arguments, which is run instead of the model.

    Attributes:
        program: The copy of the model; functions are not copied.
        fake_mode: The fake mode of its tensors.
        device_type: The device type whose autocast is explained.
        imagined: Whether the CPU represents that device.
        foreign_ids: Identities of the copies of tensors whose memory torch did not allocate.
    """

    program: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fake_mode: FakeTensorMode
    device_type: str
    imagined: bool
    foreign_ids: frozenset[int] = frozenset()


def fake_stand_in(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device_type: str | None,
) -> StandIn:
    """Creates a stand-in with fake tensors."""
    tensors = [*module_tensors(model), *leaf_tensors((args, kwargs))]
    present = {tensor.device.type for tensor in tensors}
    target = target_device(present, device_type)
    imagined = target != "cpu" and not (target in present and is_usable(target))
    # Loops need a shape environment for new sizes. Sizes and numbers that depend on values raise.
    shape_env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env, static_shapes=True)
    copies: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = fake_copy(tensor, mode, "cpu" if imagined else None, target)
        return copies[id(tensor)]

    for tensor in tensors:
        fake(tensor)
    program = copy_module(model, copies) if isinstance(model, torch.nn.Module) else model
    fake_args, fake_kwargs = pytree.tree_map_only(torch.Tensor, fake, (args, kwargs))
    # On a device that is imagined, the weights would be in other memory.
    real = {} if imagined else {i: t for i, t in enumerate(tensors) if is_watchable(t)}
    ids = frozenset(id(fake(tensors[i])) for i in foreign(real))
    return StandIn(program, fake_args, fake_kwargs, mode, target, imagined, ids)


def target_device(present: set[str], device_type: str | None = None) -> str:
    """Returns the device type to explain for.

    Args:
        present: The device types of the tensors.
        device_type: The device type that the user requested, or None.
    """
    supported = autocast_device_types()
    if device_type is not None:
        if device_type not in supported:
            raise OptionError(
                f"device_type={device_type!r} cannot autocast; use one of {', '.join(supported)}"
            )
        return device_type
    candidates = [name for name in supported if name in present]
    if candidates:
        return candidates[0]
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator is not None and "meta" in present else "cpu"


def is_usable(device_type: str) -> bool:
    """Returns True if this machine has a device of an accelerator's type."""
    module = getattr(torch, device_type, None)
    return module is not None and bool(module.is_available())


def module_tensors(model: Any) -> list[torch.Tensor]:
    """Returns parameters, buffers and tensors in plain attributes of modules."""
    if not isinstance(model, torch.nn.Module):
        return []
    return [*model.parameters(), *model.buffers(), *_plain_tensors(model)]


def _plain_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    attributes = [value for module in model.modules() for value in vars(module).values()]
    return [value for value in attributes if isinstance(value, torch.Tensor)]


def shared_weights(model: Any, outputs: Any) -> tuple[str, ...]:
    """Returns names of parameters and buffers that share storage with other tensors.

    These are parameters, buffers, plain attributes of modules, and outputs.
    """
    if not isinstance(model, torch.nn.Module):
        return ()
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    others = [*_plain_tensors(model), *leaf_tensors(outputs)]
    num_uses = Counter(map(storage_id, [*(tensor for _, tensor in named), *others]))
    return tuple(name for name, tensor in named if num_uses[storage_id(tensor)] > 1)


def leaf_tensors(values: Any) -> list[torch.Tensor]:
    """Returns the tensors in nested arguments."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def fake_copy(
    tensor: torch.Tensor, mode: FakeTensorMode, moved_to: str | None, target: str = "cpu"
) -> torch.Tensor:
    """Returns a fake copy of a tensor.

    Args:
        tensor: The tensor.
        mode: The fake mode of the copy.
        moved_to: The device of the copy; None for the device of the tensor.
        target: The device of copies of meta tensors.
    """
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta" or moved_to is not None:
        device = moved_to or (target if tensor.device.type == "meta" else tensor.device)
        with mode, torch.no_grad():
            fake = _empty_like(tensor, device)
    else:
        fake = mode.from_tensor(tensor, static_shapes=True)
        fake = fake.detach() if not fake.is_leaf else fake
    if isinstance(tensor, torch.nn.Parameter):
        if isinstance(fake, torch.nn.Parameter):
            return fake
        return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def _empty_like(tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def copy_module(model: torch.nn.Module, copies: dict[int, torch.Tensor]) -> torch.nn.Module:
    """Returns a deep copy whose tensors are ``copies``, by ``id`` of the originals."""
    memo: dict[int, Any] = dict(copies)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in model.modules()):
            raise UnsupportedError(
                f"{type(model).__name__} is sharded: explain it before fully_shard, on the meta "
                "device if it is large; fully_shard does not change the paths of weights"
            ) from error
        raise UnsupportedError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), but "
            "explain runs a copy of a module so that the module does not change: pass a function "
            "that calls the module instead"
        ) from error


@dataclasses.dataclass(frozen=True)
class CapturedGraph:
    """A graph that Dynamo captured, and its rewritten copy.

    Attributes:
        gm: The captured graph.
        inputs: Its inputs, fake.
        rewritten: The copy with casts.
        is_grad_enabled: Whether gradients are recorded.
    """

    gm: fx.GraphModule
    inputs: tuple[Any, ...]
    rewritten: Rewritten
    is_grad_enabled: bool

    @property
    def fallback(self) -> str:
        """The reason why the graph was not rewritten, or empty."""
        return "" if self.rewritten.error is None else str(self.rewritten.error)


@dataclasses.dataclass(frozen=True)
class Capture:
    """Graphs that Dynamo captured in one call.

    Attributes:
        graphs: The graphs. The caller clears the list, because Dynamo's cache refers to it.
        other_breaks: Reasons of graph breaks that do not end a captured graph.
        is_whole: Whether one graph contains the whole program.
        outputs: The outputs of the call.
    """

    graphs: list[CapturedGraph]
    other_breaks: tuple[str, ...]
    is_whole: bool
    outputs: Any


class _RunOnFakes(fx.Interpreter):
    """Runs a graph on fake tensors as the passes do: some kernels read numbers (``one_hot``)."""

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("call_function", "call_method"):
            return super().run_node(n)
        return call_on_fakes(n, *self.fetch_args_kwargs_from_env(n))


def run_stand_in(
    stand_in: StandIn,
    options: Options,
    region: Callable[[], contextlib.AbstractContextManager[Any]],
) -> Capture:
    """Captures and rewrites the graphs of one call.

    Args:
        stand_in: The program and its arguments.
        options: Options of the backend.
        region: Returns the region around the call.
    """
    graphs: list[CapturedGraph] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if stand_in.imagined:
            _move_regions(gm, stand_in.device_type)
        inputs = Inputs.of(gm, to_meta_inputs(example_inputs))
        rewritten = rewrite(gm, inputs, options, is_reported=False)
        captured = CapturedGraph(gm, tuple(example_inputs), rewritten, torch.is_grad_enabled())
        index = len(graphs)
        graphs.append(captured)

        def run(*args: Any) -> Any:
            with warnings.catch_warnings(), no_autocast():
                warnings.simplefilter("ignore")  # Dynamo has already issued them
                return _RunOnFakes(graphs[index].rewritten.gm).run(*args)

        return run

    before = Counter(counters["graph_break"])
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserve_random_states())
        stack.enter_context(isolated())
        stack.enter_context(hide_meta_errors())
        # A graph may fail between nodes that change the state of the thread and restore it.
        stack.enter_context(left_on_error())
        stack.enter_context(restore_functorch_levels())
        stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
        stack.enter_context(stand_in.fake_mode)
        stack.enter_context(region())
        outputs = optimized(backend)(stand_in.program)(*stand_in.args, **stand_in.kwargs)
        new = Counter(counters["graph_break"]) - before
    reasons: list[Any] = [graph.gm.compile_subgraph_reason for graph in graphs]
    ended = Counter(str(reason.reason) for reason in reasons if reason.graph_break)
    is_whole = not new and _is_whole(graphs, stand_in.program)
    return Capture(graphs, tuple((new - ended).elements()), is_whole, outputs)


def _is_whole(graphs: Sequence[CapturedGraph], program: Callable[..., Any]) -> bool:
    """Returns True if a single graph was captured, from the frame of the program.

    If Dynamo skips a frame, it runs the frame without a graph break and captures the functions that
    the frame calls. Hooks of the outermost module are separate frames.
    """
    if len(graphs) != 1 or graphs[0].fallback:
        return False
    frame = graphs[0].rewritten.frame
    if isinstance(program, torch.nn.Module):
        is_outermost = frame.root is program and len(frame.stack) == 1
        return is_outermost and not has_hooks(program)
    return frame.is_outermost


def has_hooks(module: torch.nn.Module) -> bool:
    """Returns True if a call of a module runs hooks, including global ones."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or has_global_module_hooks()


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Context whose compilations are independent of earlier and later ones (see ``optimized``).

    Recompile limits do not apply. Relies on ``isolate_recompiles`` of ``torch._dynamo.optimize``.
    """
    before = Counter(counters["graph_break"])
    try:
        no_limit = {"recompile_limit": sys.maxsize, "accumulated_recompile_limit": sys.maxsize}
        with _sizes_forgotten(), dynamo_config.patch(no_limit):
            yield
    finally:
        counters["graph_break"] = before


@contextlib.contextmanager
def _sizes_forgotten() -> Iterator[None]:
    """Context in which Dynamo does not know sizes of earlier calls, and does not record new ones.

    Relies on the dictionary in which ``torch._dynamo.pgo`` records sizes.
    """
    state = pgo.get_code_state()
    before = copy.deepcopy(state)
    state.clear()
    try:
        yield
    finally:
        state.clear()
        state.update(before)


def optimized(backend: Any, **kwargs: Any) -> Any:
    """Calls ``torch._dynamo.optimize`` with separate entries in Dynamo's cache."""
    prepare_torch()
    return optimize(backend, isolate_recompiles=True, **kwargs)


def _move_regions(gm: fx.GraphModule, device_type: str) -> None:
    """Replaces regions of an imagined device by regions of the CPU, which represents it."""
    from amp_fx.torch_private.autocast import enter_autocast

    for node in gm.graph.find_nodes(op="call_function", target=enter_autocast):
        if node.args[0] != device_type:
            continue
        dtype = node.args[1] if len(node.args) > 1 else None
        node.args = ("cpu", dtype or torch.get_autocast_dtype(device_type), *node.args[2:])
