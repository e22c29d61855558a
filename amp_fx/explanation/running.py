"""Sends a stand-in through Dynamo and the backend, and leaves no trace of that in Dynamo.

The stand-in is a copy of a model and its inputs that costs nothing to run: fake tensors.

What is explained is never the user's model but this copy, so that no parameter, buffer or
attribute changes. Where the model's device is not there (``device_type="cuda"`` without a
GPU, ``device="meta"``), the copy stands on the CPU and the CPU takes that device's op tables:
fake tensors of a device that torch was built without cannot be indexed or differentiated.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from amp_fx.backend.entry import called_in
from amp_fx.backend.rewrite import rewrite, start_state
from amp_fx.errors import OptionError, UnsupportedError
from amp_fx.explanation.recorder import GraphRecorder, SeenGraph
from amp_fx.graphs.policy_mode import markers_left_on_error
from amp_fx.graphs.values import plain_inputs, storage_id, without_meta_errors
from amp_fx.options import Options
from amp_fx.regions.state import autocast_device_types, no_autocast
from amp_fx.torch_private import pytree
from amp_fx.torch_private.autograd import functorch_levels_restored
from amp_fx.torch_private.dynamo import config as dynamo_config
from amp_fx.torch_private.dynamo import counters, optimize, pgo
from amp_fx.torch_private.fake_tensors import FakeTensor, FakeTensorMode
from amp_fx.torch_private.modules import has_global_module_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import fx


@dataclasses.dataclass(frozen=True)
class StandIn:
    """A copy of a model, with copies of its arguments, that is run in its place.

    Attributes:
        program: The copy of the model; a function as it is.
        fake_mode: The mode of its tensors; None where they are real.
        device_type: The device type whose autocast is explained.
        imagined: Whether the CPU stands for that device.
    """

    program: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fake_mode: FakeTensorMode | None
    device_type: str
    imagined: bool


def fake_stand_in(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device_type: str | None,
) -> StandIn:
    """A copy whose tensors are fake."""
    tensors = [*module_tensors(model), *leaf_tensors((args, kwargs))]
    present = {tensor.device.type for tensor in tensors}
    target = target_device(present, device_type)
    imagined = target != "cpu" and not (target in present and is_usable(target))
    # For the sizes that loops invent; sizes and numbers that depend on values are refused.
    shape_env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env, static_shapes=True)
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = fake_copy(tensor, mode, "cpu" if imagined else None, target)
        return made[id(tensor)]

    for tensor in tensors:
        fake(tensor)
    program = _copy_module(model, made) if isinstance(model, torch.nn.Module) else model
    fake_args, fake_kwargs = pytree.tree_map_only(torch.Tensor, fake, (args, kwargs))
    return StandIn(program, fake_args, fake_kwargs, mode, target, imagined)


def real_stand_in(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], like: StandIn
) -> StandIn | None:
    """A copy whose tensors are real, for programs that look at numbers; None if there are none."""
    tensors = [*module_tensors(model), *leaf_tensors((args, kwargs))]
    is_real = all(not isinstance(t, FakeTensor) and t.device.type != "meta" for t in tensors)
    if not is_real or (like.imagined and any(t.device.type != "cpu" for t in tensors)):
        return None
    program = _copy_module(model, {}) if isinstance(model, torch.nn.Module) else model
    copies = pytree.tree_map_only(torch.Tensor, _clone, (args, kwargs))
    return dataclasses.replace(
        like, program=program, args=copies[0], kwargs=copies[1], fake_mode=None
    )


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def target_device(present: set[str], device_type: str | None = None) -> str:
    """The device type whose autocast is meant for tensors on some device types."""
    known = autocast_device_types()
    if device_type is not None:
        if device_type not in known:
            raise OptionError(
                f"device_type={device_type!r} is not one that autocast knows: {', '.join(known)}"
            )
        return device_type
    found = [name for name in known if name in present]
    if found:
        return found[0]
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator is not None and "meta" in present else "cpu"


def is_usable(device_type: str) -> bool:
    """Returns True if there is a device of an accelerator's type."""
    module = getattr(torch, device_type, None)
    return module is not None and bool(module.is_available())


def module_tensors(model: Any) -> list[torch.Tensor]:
    """Parameters, buffers and tensors that modules have as plain attributes."""
    if not isinstance(model, torch.nn.Module):
        return []
    plain = (value for module in model.modules() for value in vars(module).values())
    return [
        *model.parameters(),
        *model.buffers(),
        *(value for value in plain if isinstance(value, torch.Tensor)),
    ]


def shared_weights(model: Any, outputs: Any) -> tuple[str, ...]:
    """Names of parameters and buffers whose memory is known elsewhere too."""
    if not isinstance(model, torch.nn.Module):
        return ()
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    holders = Counter(map(storage_id, (*(tensor for _, tensor in named), *leaf_tensors(outputs))))
    return tuple(name for name, tensor in named if holders[storage_id(tensor)] > 1)


def leaf_tensors(values: Any) -> Iterable[torch.Tensor]:
    """The tensors in nested arguments."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def fake_copy(
    tensor: torch.Tensor, mode: FakeTensorMode, moved_to: str | None, target: str = "cpu"
) -> torch.Tensor:
    """A fake tensor like another, on ``moved_to`` or where that is; on ``target`` for ``meta``."""
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta" or moved_to is not None:
        device = moved_to or (target if tensor.device.type == "meta" else tensor.device)
        with mode, torch.no_grad():
            made = _empty_like(tensor, device)
    else:
        made = mode.from_tensor(tensor, static_shapes=True)
        made = made.detach() if not made.is_leaf else made
    if isinstance(tensor, torch.nn.Parameter):
        if isinstance(made, torch.nn.Parameter):
            return made
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _empty_like(tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _copy_module(model: torch.nn.Module, made: dict[int, torch.Tensor]) -> torch.nn.Module:
    """A deep copy with some tensors replaced."""
    memo: dict[int, Any] = dict(made)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in model.modules()):
            raise UnsupportedError(
                f"{type(model).__name__} is sharded: explain it before fully_shard, on the meta "
                "device if it is large; the paths of weights stay the same"
            ) from error
        raise UnsupportedError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}); explain "
            "runs a copy, so that the model itself does not change: give it a function that "
            "calls the model"
        ) from error


@dataclasses.dataclass
class Capture:
    """The graphs that Dynamo captured."""

    graphs: list[SeenGraph]
    other_breaks: list[str]
    is_whole: bool
    outputs: Any

    def release(self) -> None:
        """Frees the graphs: entries in Dynamo's cache outlive the call."""
        for graph in self.graphs:
            vars(graph).clear()
        self.graphs.clear()
        self.outputs = None


def run_stand_in(
    stand_in: StandIn,
    options: Mapping[str, Any],
    region: Callable[[], contextlib.AbstractContextManager[Any]],
    *,
    wants_backward: bool,
    watch: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Capture:
    """Captures the graphs of one call."""
    seen: list[SeenGraph] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if stand_in.imagined:
            _move_regions(gm, stand_in.device_type)
        parsed = Options.parse(options)
        seen.append(SeenGraph(gm, start_state(gm, parsed)))
        compiled_with = dataclasses.replace(parsed, compiler="inductor")
        recorder = GraphRecorder(
            seen[-1],
            wants_backward=wants_backward,
            options=compiled_with,
            is_imagined=stand_in.imagined,
        )
        found = rewrite(gm, plain_inputs(example_inputs), parsed, recorder)
        with no_autocast():
            run = called_in(watch, recorder.finish(found, example_inputs))
            return called_in(no_autocast, run)

    before = Counter(counters["graph_break"])
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=()))
        stack.enter_context(isolated())
        stack.enter_context(without_meta_errors())
        # A graph may fail between nodes that change the state of the thread and change it back.
        for restored in (markers_left_on_error(), functorch_levels_restored()):
            stack.enter_context(restored)
        stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
        if stand_in.fake_mode is not None:
            stack.enter_context(stand_in.fake_mode)
        stack.enter_context(region())
        outputs = optimized(backend)(stand_in.program)(*stand_in.args, **stand_in.kwargs)
        new = Counter(counters["graph_break"]) - before
    reasons: list[Any] = [graph.captured.compile_subgraph_reason for graph in seen]
    ended = Counter(str(reason.reason) for reason in reasons if reason.graph_break)
    is_whole = not new and _is_all(seen, stand_in.program)
    return Capture(seen, [*(new - ended).elements()], is_whole, outputs)


def _is_all(seen: Sequence[SeenGraph], program: Callable[..., Any]) -> bool:
    """Returns True if a single graph was captured, from the program's own frame.

    Dynamo runs a frame that it skips as it is, without a graph break, and captures what that
    calls. Hooks of the outermost module are frames of their own.
    """
    if len(seen) != 1 or seen[0].fallback:
        return False
    frame = seen[0].frame
    if isinstance(program, torch.nn.Module):
        is_own = frame.root is program and len(frame.stack) == 1
        return is_own and not has_hooks(program)
    return frame.function is not None and frame.function is getattr(program, "__code__", None)


def has_hooks(module: torch.nn.Module) -> bool:
    """Returns True if a call of a module runs more than its ``forward``, such as global hooks.

    Relies on ``nn.Module._call_impl`` looking at these dictionaries.
    """
    own = module._forward_hooks or module._forward_pre_hooks
    return bool(own) or has_global_module_hooks()


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Compiles what is compiled inside as if for the first time, and forgets it afterwards.

    However often the program was compiled, it may be compiled once more (see ``optimized``).
    Relies on ``isolate_recompiles`` of ``torch._dynamo.optimize``.
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
    """Captures the given sizes, also if earlier calls had others, and leaves no trace of them.

    Relies on ``torch._dynamo.pgo`` keeping what it has seen in one dictionary.
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
    """Returns ``torch._dynamo.optimize`` with entries of its own in Dynamo's cache."""
    return optimize(backend, isolate_recompiles=True, **kwargs)


def _move_regions(gm: fx.GraphModule, device_type: str) -> None:
    """Turns regions for an imagined device into regions for the CPU, which stands for it."""
    from amp_fx.torch_private.autocast import enter_autocast

    for node in gm.graph.find_nodes(op="call_function", target=enter_autocast):
        if node.args[0] != device_type:
            continue
        dtype = node.args[1] if len(node.args) > 1 else None
        node.args = ("cpu", dtype or torch.get_autocast_dtype(device_type), *node.args[2:])
