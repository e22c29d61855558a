"""User programs with autocast, on the device of ``docs/examples/my_device``."""

from __future__ import annotations

import importlib
import itertools
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils._pytree import tree_leaves, tree_map_only

import amp_fx
from amp_fx import csrc, preset
from amp_fx.accelerators.samples import sample_arguments
from amp_fx.regions.autocast_kernels import find_op
from amp_fx.tables.presets import device_table
from tests.parity.oracle import bits
from tests.tables.measure import measured_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
DEVICE = "my_device"
LOW = (torch.bfloat16, torch.float16)
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32

PROGRAMS: dict[str, Callable[[], None]] = {}


def program(function: Callable[[], None]) -> Callable[[], None]:
    """Adds a function to the programs."""
    PROGRAMS[function.__name__] = function
    return function


def prepare() -> None:
    """Loads the device, and gives it autocast."""
    sys.path.insert(0, str(EXAMPLES))
    importlib.import_module("my_device")
    amp_fx.register_device(DEVICE, dtypes=LOW)
    csrc.load()


def make_model() -> nn.Sequential:
    """Returns a small network with low and float32 ops, with the same weights in each call."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(3, 4, 1),
        nn.Flatten(),
        nn.Linear(8, 8),
        nn.LayerNorm(8),
        nn.GELU(),
        nn.Linear(8, 2),
    ).to(DEVICE)


def make_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a batch and its classes."""
    torch.manual_seed(1)
    return torch.randn(6, 3, 2).to(DEVICE), torch.randint(2, (6,)).to(DEVICE)


def compiled(function: Any, **options: Any) -> Any:
    """Returns a function compiled by amp_fx for a device that inductor does not know."""
    return torch.compile(function, backend="amp_fx", options={"compiler": "aot_eager", **options})


def is_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Returns True if two tensors have the same dtype, device and bits."""
    same = left.dtype is right.dtype and left.device == right.device
    return same and torch.equal(bits(left.detach().cpu()), bits(right.detach().cpu()))


def trained(
    forward: Callable[[nn.Module], Any], dtype: torch.dtype, scaler: Any
) -> dict[str, torch.Tensor]:
    """Returns the weights after three steps."""
    model = make_model()
    run = forward(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = make_inputs()
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype):
            loss = F.cross_entropy(run(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return dict(model.state_dict())


@program
def the_device_conforms() -> None:
    """Among others regions, custom functions, checkpoints and gradients, in eager code."""
    report = amp_fx.conformance(DEVICE)
    assert report.passed, str(report)


@program
def the_lists_hold_in_eager_code() -> None:
    """Measured at the Autograd kernels, as the tables of torch's own devices are."""
    assert measured_table(DEVICE) == device_table()
    assert preset("torch").tables[DEVICE] == device_table()


@program
def listed_ops_compile_to_the_bits_of_eager_autocast() -> None:
    for dtype, kind in itertools.product(LOW, (torch.float32, None)):
        found = (listed_call(name, kind or dtype, dtype) for name in device_table())
        calls = [call for call in found if call]
        assert len(calls) > 110
        for start in range(0, len(calls), 20):
            ops, arguments = zip(*calls[start : start + 20], strict=True)

            def run(arguments: Any, ops: Any = ops) -> list[Any]:
                return [op(*args) for op, args in zip(ops, arguments, strict=True)]

            with torch.autocast(DEVICE, dtype), torch.no_grad():
                native = tree_leaves(run(arguments))
                ours = tree_leaves(compiled(run, compiler="eager")(arguments))
            assert len(native) == len(ours) >= len(ops)
            assert all(map(is_equal, native, ours)), ops


def listed_call(name: str, kind: torch.dtype, dtype: torch.dtype) -> tuple[Any, Any] | None:
    """Returns an op and arguments with a dtype; None if it is banned, or has no kernel."""
    op: Any = find_op(name)
    args = tree_map_only(
        torch.Tensor,
        lambda t: t.to(DEVICE, kind if t.is_floating_point() else t.dtype),
        sample_arguments(op),
    )
    try:
        with torch.autocast(DEVICE, dtype), torch.no_grad():
            op(*args)
    except RuntimeError:
        return None
    return op, args


@program
def training_compiled_gives_the_bits_of_eager_training() -> None:
    for dtype in LOW:
        for scaler in (torch.amp.GradScaler, amp_fx.GradScaler):
            eager = trained(lambda model: model, dtype, scaler(DEVICE))
            low = trained(compiled, dtype, scaler(DEVICE))
            assert eager.keys() == low.keys()
            assert all(is_equal(eager[name], low[name]) for name in eager), dtype


@program
def cached_casts_follow_writes() -> None:
    model: Any = make_model().eval()
    run = compiled(model)
    x, _ = make_inputs()
    for write in (
        lambda: None,
        lambda: model[2].weight.data.mul_(2),
        lambda: nn.init.ones_(model[5].weight),
        lambda: model.load_state_dict(make_model().state_dict()),
        lambda: (
            model[0]
            .weight.untyped_storage()
            .copy_(torch.ones_like(model[0].weight).untyped_storage())
        ),
    ):
        write()
        with torch.no_grad(), torch.autocast(DEVICE, bf16):
            assert is_equal(run(x), model(x))


@program
def regions_nest_and_turn_off() -> None:
    x = torch.ones(4, 4, device=DEVICE)

    def products(x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield x @ x
        with torch.autocast(DEVICE, bf16):
            yield x @ x
            with torch.autocast(DEVICE, enabled=False):
                yield x @ x
                with torch.autocast(DEVICE, f16):
                    yield x @ x
            with torch.autocast("cpu", f16):
                yield x @ x
            yield x @ x
        yield x @ x

    expected = [f32, bf16, f32, f16, bf16, bf16, f32]
    assert [out.dtype for out in products(x)] == expected
    run = compiled(lambda x: list(products(x)), bare_region=False)
    assert [out.dtype for out in run(x)] == expected
    assert not torch.is_autocast_enabled(DEVICE)


@program
def scalers_skip_steps_that_overflow() -> None:
    for scaler_type in (torch.amp.GradScaler, amp_fx.GradScaler):
        for bad in (float("inf"), float("-inf"), float("nan")):
            scaler: Any = scaler_type(DEVICE, init_scale=8.0)
            params = [
                nn.Parameter(torch.ones(3, device=where)) for where in (DEVICE, DEVICE, "cpu")
            ]
            optimizer = torch.optim.SGD(params, lr=1.0)
            for at_fault in (None, *range(3)):
                before = [param.detach().clone() for param in params]
                optimizer.zero_grad()
                scale = scaler.get_scale()
                for number, param in enumerate(params):
                    factor = torch.ones(3)
                    factor[-1] = bad if number == at_fault else 1.0
                    torch.autograd.backward(scaler.scale((param * factor.to(param.device)).sum()))
                scaler.step(optimizer)
                scaler.update()
                moved = [not torch.equal(p, b) for p, b in zip(params, before, strict=True)]
                assert moved == [at_fault is None] * 3
                assert scaler.get_scale() == (scale if at_fault is None else scale / 2)


@program
def the_ban_holds_in_eager_and_compiled_code() -> None:
    p, y = torch.rand(2, 4, device=DEVICE), torch.ones(2, 4, device=DEVICE)
    for call in (F.binary_cross_entropy, compiled(F.binary_cross_entropy)):
        with torch.autocast(DEVICE, enabled=False):
            call(p, y)
        with (
            torch.autocast(DEVICE, bf16),
            pytest.raises((RuntimeError, BackendCompilerFailed), match="unsafe to autocast"),
        ):
            call(p, y)


@program
def reports_know_the_device() -> None:
    model = make_model()
    x, y = make_inputs()
    explanation = amp_fx.explain(model, dtype=bf16)(x)
    assert "aten.linear" in str(explanation) or "linear" in str(explanation)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE, bf16):
            return F.cross_entropy(model(x), y)

    assert str(amp_fx.accuracy(step)(x, y))
    assert str(amp_fx.audit(step)(x, y))


@program
def exported_programs_run_on_the_device() -> None:
    model = make_model().eval()
    x, _ = make_inputs()
    program = amp_fx.export(model, (x,), dtype=bf16)
    with torch.no_grad(), torch.autocast(DEVICE, bf16):
        expected = model(x).float()
    assert is_equal(program.module()(x), expected)


@program
def inductor_says_that_it_cannot() -> None:
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("amp_fx").addHandler(handler)
    model = make_model()
    x, _ = make_inputs()
    run = torch.compile(model, backend="amp_fx")
    with torch.autocast(DEVICE, bf16):
        assert is_equal(run(x), model(x))
    assert len(records) == 1
    assert "inductor has no code generator for 'my_device'" in records[0]


@program
def a_backend_of_dynamo_gets_the_graph_with_its_casts() -> None:
    model = make_model()
    x, _ = make_inputs()
    graphs = []

    def my_backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    run = compiled(model, compiler=my_backend)
    with torch.autocast(DEVICE, bf16):
        assert is_equal(run(x), model(x))
    assert "_to_copy" in graphs[0].code
