"""Runs one program in eager autocast and through amp_fx, and reports the first difference.

The oracle is eager ``torch.autocast``. Dynamo changes a few programs by itself: it decomposes
some ops and evaluates dtype-dependent Python during capture. So if the direct comparison differs,
the graphs that Dynamo captured run in eager autocast. If these differ from the eager program as
well, the difference is Dynamo's, and amp_fx is compared with them instead. A measurement decides
this for each program, never a list. In the same way, programs of several graphs or calls are
compared with eager autocast that casts separately in each graph.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    Program = Callable[..., Any]

LOW_DTYPES = (torch.bfloat16, torch.float16)
SEED = 1234


class Way(enum.Enum):
    """The two ways into amp_fx."""

    AMBIENT = "ambient"
    """Under ``torch.autocast``: outputs keep autocast's dtypes."""
    BARE = "bare"
    """No ambient autocast: outputs come back in the dtypes of the uncompiled program."""


@dataclasses.dataclass
class Result:
    """Outputs, gradients and state after one run of a program."""

    outputs: list[Any]
    """Leaves of the returned tree, detached."""
    requires_grad: list[bool]
    """Of each leaf."""
    grads: list[torch.Tensor | None] | None
    """Of each differentiable leaf of the state; None where eager cannot differentiate."""
    state: list[torch.Tensor]
    """The inputs and the module's tensors after the run."""


def compile_amp_fx(
    program: Program, way: Way, dtype: torch.dtype, *, compiler: str = "eager", **kwargs: Any
) -> Program:
    """Returns the program compiled by amp_fx; the ambient way takes its dtype from the region."""
    options: dict[str, Any] = {"compiler": compiler}
    if way is Way.BARE:
        options["dtype"] = dtype
    return torch.compile(program, backend="amp_fx", options=options, **kwargs)


def region_of(device: str, dtype: torch.dtype | None, **kwargs: Any) -> AbstractContextManager[Any]:
    """Returns an autocast region, for CUDA also on machines without CUDA; None means no region."""
    if dtype is None:
        return contextlib.nullcontext()
    if device == "cuda" and not torch.cuda.is_available():
        return fake_cuda_region(dtype)
    return torch.autocast(device, dtype, **kwargs)


@contextlib.contextmanager
def fake_cuda_region(dtype: torch.dtype) -> Iterator[None]:
    """Enters a CUDA autocast region, because ``torch.autocast`` disables itself without CUDA."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def compile_reference(
    program: Program, way: Way, dtype: torch.dtype, *, device: str = "cpu", **kwargs: Any
) -> Program:
    """Compiles a program to the graphs that Dynamo captures, which run in eager autocast.

    Each call of a graph casts separately: the gradients of a weight that several calls use are
    added in float32, but one eager region adds them in the low dtype (``docs/limits.md``).
    """

    def run_in_region(gm: torch.fx.GraphModule, _: Sequence[torch.Tensor]) -> Program:
        if way is Way.AMBIENT:
            return functools.partial(call_with_own_casts, gm)
        captured = [
            getattr(leaf, "meta", {}).get("example_value")
            for leaf in tree_flatten(gm.graph.output_node().args[0])[0]
        ]

        def forward(*args: Any) -> Any:
            with region_of(device, dtype):
                outputs = gm(*args)
            return [cast_like(out, ref) for out, ref in zip(outputs, captured, strict=True)]

        return forward

    return torch.compile(program, backend=run_in_region, **kwargs)


def call_with_own_casts(gm: torch.fx.GraphModule, *args: Any) -> Any:
    """Calls a graph with an empty cache of casts, and leaves it empty."""
    torch.clear_autocast_cache()
    try:
        return gm(*args)
    finally:
        torch.clear_autocast_cache()


def cast_like(out: object, reference: object) -> object:
    """``out`` in the real or complex dtype of ``reference``; anything else as it is."""
    if not isinstance(out, torch.Tensor) or not isinstance(reference, torch.Tensor):
        return out
    both_real = out.is_floating_point() and reference.is_floating_point()
    both_complex = out.is_complex() and reference.is_complex()
    return out.to(reference.dtype) if both_real or both_complex else out


def fresh(tree: Any) -> Any:
    """Returns a copy of a tree whose tensors are new leaves with the same ``requires_grad``.

    A tensor that occurs twice is copied once.
    """
    copies: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            with torch.no_grad():
                new = tensor.detach().clone()
            copies[id(tensor)] = new.requires_grad_(tensor.requires_grad)
        return copies[id(tensor)]

    return tree_map_only(torch.Tensor, copy, tree)


def tensors_of(tree: object) -> list[torch.Tensor]:
    """Returns all tensors of a tree, each once."""
    found = {id(t): t for t in tree_flatten(tree)[0] if isinstance(t, torch.Tensor)}
    return list(found.values())


def cotangent(out: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns a gradient for ``out``: the same numbers for the same generator state."""
    dtype = torch.complex64 if out.is_complex() else torch.float32
    made = torch.randn(out.shape, generator=generator, dtype=dtype, device="cpu")
    return made.to(out.device, out.dtype)


@dataclasses.dataclass
class Subject:
    """A program with fresh inputs, to be run once."""

    program: Program
    """A function or a module: what is compiled."""
    args: tuple[Any, ...]
    """Its inputs, a tree; its tensors are compared after the run as well."""
    module: torch.nn.Module | None = None
    """Holds further tensors, if the program is not itself a module."""
    drive: Callable[..., Any] = lambda program, *args: program(*args)
    """Calls the program, compiled or not, and returns the outputs."""
    has_one_region: bool = False
    """Whether one region spans the drive, and not each call of the program one of its own."""
    cache_enabled: bool = True
    """Of the regions."""
    device: str = "cpu"
    """The device type of the regions."""

    def state(self) -> list[torch.Tensor]:
        """Returns the tensors the program may read and write."""
        state = tensors_of(self.args)
        for module in (self.program, self.module):
            if isinstance(module, torch.nn.Module):
                state += [*module.parameters(), *module.buffers()]
        return state


def in_float64(subject: Subject) -> Subject:
    """Returns a subject whose weights and inputs are float64."""
    for module in (subject.program, subject.module):
        if isinstance(module, torch.nn.Module):
            module.double()
    args = tuple(
        arg.detach().double().requires_grad_(arg.requires_grad)
        if isinstance(arg, torch.Tensor) and arg.is_floating_point()
        else arg
        for arg in subject.args
    )
    return dataclasses.replace(subject, args=args)


def errors(exact: Result, result: Result) -> list[float]:
    """Returns the largest error of each output and gradient, relative to its largest number."""
    assert exact.grads is not None
    assert result.grads is not None
    pairs = [*zip(exact.outputs, result.outputs, strict=True)]
    pairs += zip(exact.grads, result.grads, strict=True)
    return [
        float((a - b.double()).abs().max() / (a.abs().max() + 1e-12))
        for a, b in pairs
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.is_floating_point()
    ]


def check_inductor(build: Callable[[], Subject], way: Way, dtype: torch.dtype) -> None:
    """Checks that errors to float64 are within twice those of ``torch.compile`` under autocast."""
    exact = run(in_float64(build()), None)
    reset()
    native = run(build(), dtype, torch.compile)
    reset()
    ours = run(
        build(),
        dtype if way is Way.AMBIENT else None,
        lambda f: compile_amp_fx(f, way, dtype, compiler="inductor"),
    )
    pairs = zip(errors(exact, ours), errors(exact, native), strict=True)
    for i, (found, allowed) in enumerate(pairs):
        assert found <= 2 * allowed + 1e-2, f"leaf {i}: {found:g}, native {allowed:g}"
    if way is Way.AMBIENT:
        for mine, theirs in zip(ours.outputs, native.outputs, strict=True):
            assert getattr(mine, "dtype", None) == getattr(theirs, "dtype", None)


def run(
    subject: Subject,
    dtype: torch.dtype | None,
    wrap: Callable[[Program], Program] = lambda program: program,
    *,
    cast_to: Iterator[Any] | None = None,
    record: list[Any] | None = None,
    differentiate: bool = True,
) -> Result:
    """Run a subject once, forward and backward; the backward outside of any region.

    Args:
        subject: It is used up by the run.
        dtype: The dtype of the autocast regions; None for none.
        wrap: Compiles the program.
        cast_to: For each call of the program, outputs whose dtypes its outputs are brought to.
        record: Is given the outputs of each call of the program.
        differentiate: Run the backward.
    """
    program = wrap(subject.program)
    state = subject.state()

    def region() -> AbstractContextManager[Any]:
        return region_of(subject.device, dtype, cache_enabled=subject.cache_enabled)

    def call(*args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if subject.has_one_region else region():
            outputs = program(*args, **kwargs)
        if record is not None:
            record.append(outputs)
        return outputs if cast_to is None else tree_map(cast_like, outputs, next(cast_to))

    torch.default_generator.manual_seed(SEED)
    if subject.device == "cuda":
        torch.cuda.manual_seed(SEED)
    with region() if subject.has_one_region else contextlib.nullcontext():
        leaves = tree_flatten(subject.drive(call, *subject.args))[0]
    inputs = [t for t in state if t.is_leaf and t.requires_grad]
    grads: list[torch.Tensor | None] | None = None
    outs = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    if differentiate and outs and inputs:
        generator = torch.Generator().manual_seed(SEED)
        seeds = [cotangent(out, generator) for out in outs]
        grads = list(torch.autograd.grad(outs, inputs, seeds, allow_unused=True))
    return Result(
        outputs=[t.detach().clone() if isinstance(t, torch.Tensor) else t for t in leaves],
        requires_grad=[isinstance(t, torch.Tensor) and t.requires_grad for t in leaves],
        grads=grads,
        state=[t.detach().clone() for t in state],
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's numbers as integers, every NaN as one number."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point():
        return tensor
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return tensor.view(integer).masked_fill(tensor.isnan(), torch.iinfo(integer).min + 1)


def leaf_difference(expected: object, actual: object, *, values: bool = True) -> str | None:
    """Describes how two leaves differ in type, dtype, shape or bits; None if they do not."""
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        same = type(expected) is type(actual) and (
            not isinstance(expected, (bool, int, float, str)) or repr(expected) == repr(actual)
        )
        return None if same else f"{expected!r} expected, got {actual!r}"
    for name in ("dtype", "shape", "layout"):
        left, right = getattr(expected, name), getattr(actual, name)
        if left != right:
            return f"{name} {left} expected, got {right}"
    if not values:
        return None
    wrong = bits(expected) != bits(actual)
    if not wrong.any():
        return None
    error = (
        expected.to_dense().to(torch.complex128) - actual.to_dense().to(torch.complex128)
    ).abs()
    return (
        f"{int(wrong.sum())} of {wrong.numel()} numbers differ, by at most {error.max().item():g}"
    )


def difference(expected: Result, actual: Result, *, values: bool = True) -> str | None:
    """Returns the first difference between two runs; None if they are the same bit for bit."""
    if len(expected.outputs) != len(actual.outputs):
        return f"{len(expected.outputs)} outputs expected, got {len(actual.outputs)}"
    sides = [("output", expected.outputs, actual.outputs)]
    sides.append(("state", list(expected.state), list(actual.state)))
    if expected.grads is not None:
        if actual.grads is None:
            return "gradients expected, got none"
        sides.append(("gradient", list(expected.grads), list(actual.grads)))
    for what, left, right in sides:
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            found = leaf_difference(a, b, values=values)
            if found:
                return f"{what} {i}: {found}"
    if expected.requires_grad != actual.requires_grad:
        return f"requires_grad {expected.requires_grad} expected, got {actual.requires_grad}"
    return None


def check(
    build: Callable[[], Subject],
    way: Way,
    dtype: torch.dtype,
    *,
    values: bool = True,
    **compile_options: Any,
) -> str | None:
    """Describes how amp_fx differs from the oracle on a program; None if it does not.

    Args:
        build: Builds the same subject for each run.
        way: The way into amp_fx.
        dtype: The low dtype.
        values: Compare numbers, not only dtypes and shapes.
        compile_options: For ``torch.compile``.
    """
    expected = run_eager(build(), build(), way, dtype)
    device = build().device

    def compiled(kind: Callable[..., Program]) -> Result:
        reset()
        return run(
            build(),
            dtype if way is Way.AMBIENT else None,
            lambda program: kind(program, way, dtype, **compile_options),
            differentiate=expected.grads is not None,
        )

    try:
        actual = compiled(compile_amp_fx)
    except Exception as error:  # noqa: BLE001, reported below, with its cause
        try:
            compiled(functools.partial(compile_reference, device=device))
        except Exception:  # noqa: BLE001, Dynamo cannot run the program with any backend
            return None
        return f"raised {type(error).__name__}: {error}"
    direct = difference(expected, actual, values=values)
    if direct is None:
        return None
    if difference(expected, run_eager(build(), build(), way, dtype)) is not None:
        return difference(expected, actual, values=False)  # eager does not even repeat itself
    captured = copy.deepcopy(counters)
    try:
        reference = compiled(functools.partial(compile_reference, device=device))
    except Exception:  # noqa: BLE001, a dtype baked in: eager cannot run the captured graph
        return difference(expected, actual, values=False)
    counters.clear()
    counters.update(captured)
    if difference(expected, reference, values=values) is None:
        return direct
    found = difference(reference, actual, values=values)
    return found and f"against the captured graphs: {found}"


def run_eager(subject: Subject, plain: Subject, way: Way, dtype: torch.dtype) -> Result:
    """The oracle: eager autocast, in the bare way with outputs in the plain program's dtypes."""
    if way is Way.AMBIENT:
        return run(subject, dtype)
    outputs: list[Any] = []
    run(plain, None, record=outputs, differentiate=False)
    return run(subject, dtype, cast_to=iter(outputs))


def is_one_graph() -> bool:
    """Returns True if Dynamo captured the last program as one graph."""
    return counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def reset() -> None:
    """Forget all compiled code and the counters."""
    torch._dynamo.reset()
    counters.clear()
