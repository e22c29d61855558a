"""Programs that run ``amp_fx.conformance`` on a faulty device, and with invalid arguments."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import amp_fx
from amp_fx.commands.cli import main
from amp_fx.errors import AmpFxError, OptionError, PolicyError, RegionError, UnsupportedError
from tests.accelerators.planted_faults import KERNEL, implement, on_cpu, prepare
from tests.regions.device_programs import DEVICE, LOW

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ("PROGRAMS", "prepare")

aten = torch.ops.aten


def state() -> tuple[object, ...]:
    """Returns the state of autocast and other defaults that programs can see."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    flags = [
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in (DEVICE, "cpu", "cuda")
    ]
    defaults = torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    draws = torch.random.get_rng_state().tolist()
    return depth, flags, torch.is_autocast_cache_enabled(), defaults, draws


@contextlib.contextmanager
def in_a_busy_program() -> Iterator[None]:
    """A program that has changed all defaults and is in regions, which must stay as they are."""
    torch.set_default_dtype(torch.float64)
    has_autocast = hasattr(getattr(torch, DEVICE), "get_amp_supported_dtype")
    with (
        torch.autocast("cpu", torch.float16, cache_enabled=False),
        torch.autocast(DEVICE, torch.bfloat16) if has_autocast else contextlib.nullcontext(),
        torch.no_grad(),
        torch.device("meta"),  # the default device
    ):
        before = state()
        yield
        assert state() == before
    torch.set_default_dtype(torch.float32)


def the_state_stays() -> None:
    """After a report, also of a device that fails, and after an interruption at many places."""
    amp_fx.register_device(DEVICE, dtypes=LOW)
    with in_a_busy_program():
        assert amp_fx.conformance(DEVICE, "bf16").passed
    for number in (5, 60):
        for error in (KeyboardInterrupt, RuntimeError):
            _raise_in_call(number, error)
            with in_a_busy_program():
                report = None
                with contextlib.suppress(KeyboardInterrupt):
                    report = amp_fx.conformance(DEVICE, "bf16")
                assert (report is None) is (error is KeyboardInterrupt)
                assert report is None or not report.passed
    _raise_in_call(0, RuntimeError)
    assert amp_fx.conformance(DEVICE, "bf16").passed


_calls: dict[str, Any] = {"until": 0, "error": RuntimeError}


def _raise_in_call(number: int, error: type[BaseException]) -> None:
    """Makes the call of a product with this number fail; 0 for none."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        _calls["until"] -= 1
        if _calls["until"] == 0:
            raise _calls["error"]("interrupted")
        return on_cpu(aten.mm, *args, **kwargs)

    if "is_implemented" not in _calls:
        implement("mm", kernel, KERNEL)
    _calls.update(until=number, error=error, is_implemented=True)


def memory_runs_out() -> None:
    """The report ends with one line, and the device works again when there is memory."""
    amp_fx.register_device(DEVICE, dtypes=LOW)
    device: Any = torch.my_device  # type: ignore[attr-defined]
    for num_bytes in (0, 100, 400):
        in_use = device.limit_memory(1 << 40)
        device.limit_memory(in_use + num_bytes)
        with (
            in_a_busy_program(),
            pytest.raises(UnsupportedError, match=r"^.*out of memory.*$") as raised,
        ):
            amp_fx.conformance(DEVICE)
        assert "\n" not in str(raised.value)
    device.limit_memory(1 << 40)
    assert amp_fx.conformance(DEVICE, "bf16").passed


def the_device_gets_lost() -> None:
    """A device that fails in all calls after some of them."""
    amp_fx.register_device(DEVICE, dtypes=LOW)
    calls = []

    def add(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) > 5:
            raise RuntimeError("device is busy. Details follow\nhere")
        return on_cpu(aten.add, *args, **kwargs)

    implement("add.Tensor", add, KERNEL)
    with (
        in_a_busy_program(),
        pytest.raises(
            UnsupportedError,
            match=r"^my_device stopped working: .* \(RuntimeError: device is busy\. .*\)$",
        ),
    ):
        amp_fx.conformance(DEVICE)


def wrong_arguments() -> None:
    """Each gives one line that says what is allowed."""
    refuse(RegionError, "'nothing' cannot autocast; use", "nothing")
    refuse(RegionError, "'meta' cannot autocast; use", "meta")
    refuse(RegionError, "without an index", "cpu:0")
    refuse(UnsupportedError, "cannot use 'cuda'", "cuda")
    refuse(OptionError, r"get_amp_supported_dtype\(\) does not exist", DEVICE)
    amp_fx.register_device(DEVICE, dtypes=[torch.bfloat16])
    allowed = "'my_device' cannot autocast to {}; it can autocast to bfloat16"
    for dtype in ("float16", "float8_e4m3fn", "int8", "bfloat17"):
        refuse(OptionError, allowed.format(repr(dtype)), DEVICE, dtype)
    refuse(OptionError, allowed.format("torch.float16"), DEVICE, [torch.bfloat16, torch.float16])
    refuse(PolicyError, "there is no preset 'torhc'", DEVICE, policy="torhc")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lists.toml"
        for text, message in (
            ('"aten::sofmax" = "fp32"', "no op 'aten::sofmax'; similar names: aten::softmax"),
            ('"aten::softmax" = "fp33"', "got 'fp33'; did you mean 'fp32'"),
        ):
            path.write_text(f'base = "torch"\n[ops]\n{text}\n', encoding="utf-8")
            refuse(PolicyError, message, DEVICE, policy=path)


def refuse(error: type[AmpFxError], message: str, *args: Any, **kwargs: Any) -> None:
    """Calls ``conformance`` with arguments that it rejects."""
    with in_a_busy_program(), pytest.raises(error, match=message) as raised:
        amp_fx.conformance(*args, **kwargs)
    assert "\n" not in str(raised.value)


def a_device_whose_dtype_cannot_be_computed() -> None:
    """Rows say so; the device goes on."""
    amp_fx.register_device(DEVICE, dtypes=LOW)

    def mm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float16:
            raise RuntimeError("mm: float16 is not implemented")
        return on_cpu(aten.mm, x, y)  # type: ignore[no-any-return]

    implement("mm", mm, KERNEL)
    assert amp_fx.conformance(DEVICE, "bfloat16").passed
    report = amp_fx.conformance(DEVICE, ["bfloat16", "float16"])
    others = [result.op for result in report.failures if result.dtype == "bfloat16"]
    assert others == ["aten::mm in nested regions"]  # in which regions of float16 are
    assert any("float16 is not implemented" in result.got for result in report.failures)


def a_chip_without_float64() -> None:
    """It cannot hold such tensors, so that autocast cannot cast them."""
    amp_fx.register_device(DEVICE, dtypes=LOW)
    move, refused = torch.Tensor.to, []

    def to(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.dtype is torch.float64 and DEVICE in args:
            refused.append(x)
            raise RuntimeError("my_device has no float64")
        return move(x, *args, **kwargs)

    torch.Tensor.to = to  # type: ignore[assignment, method-assign]
    report = amp_fx.conformance(DEVICE, "bfloat16")
    assert report.passed, report
    assert refused


def lists_of_ones_own() -> None:
    """A policy file changes what is expected; so does a table of ``register_device``."""
    policy = amp_fx.preset("torch").with_ops({"softmax": "lower_precision_fp"})
    amp_fx.register_device(DEVICE, dtypes=LOW)
    report = amp_fx.conformance(DEVICE, "bf16", policy=policy)
    assert {result.op for result in report.failures} == {"aten::softmax.int (float32)"}
    assert "register aten::softmax.int as lower_precision_fp" in report.failures[0].mend


def registered_tables_hold() -> None:
    """The table of the vendor is what is checked, with policies of amp_fx's own in it."""
    table = {"mm": "lower_precision_fp", "gelu": "same_as_input", "linear": "keep"}
    amp_fx.register_device(DEVICE, LOW, table | {"exp": "banned"})
    report = amp_fx.conformance(DEVICE, "bf16")
    assert report.passed, report


def the_command_prints_tables_and_json() -> None:
    """Exit codes: 0, 1 for a device that does not conform, 2 for wrong input."""
    amp_fx.register_device(DEVICE, dtypes=LOW)
    assert _run("conformance", DEVICE, "--dtype", "bf16")[0] == 0
    code, out, _ = _run("conformance", DEVICE, "--json")
    loaded = json.loads(out)
    assert (code, loaded["passed"]) == (0, True)
    assert {result["check"] for result in loaded["results"]} >= {"lists", "scaler"}
    implement("exp", torch.zeros_like, KERNEL)
    code, out, _ = _run("conformance", DEVICE)
    assert code == 1
    assert "2 failures" in out
    code, out, _ = _run("conformance", DEVICE, "--json")
    assert code == 1
    failed = [result for result in json.loads(out)["results"] if not result["passed"]]
    assert {result["op"] for result in failed} == {"aten::exp (float32)"}
    assert {result["mend"] for result in failed} == {"mend the kernel of aten::exp"}
    code, out, error = _run("conformance", "nothing")
    assert (code, out, error.count("\n")) == (2, "", 1)
    code, out, error = _run("conformance", DEVICE, "--import", "no_such_module")
    assert (code, out) == (2, "")
    assert "--import: ModuleNotFoundError: No module named 'no_such_module'" in error


def _run(*arguments: str) -> tuple[int, str, str]:
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = main(arguments)
    return code, out.getvalue(), error.getvalue()


PROGRAMS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        the_state_stays,
        memory_runs_out,
        the_device_gets_lost,
        wrong_arguments,
        a_device_whose_dtype_cannot_be_computed,
        a_chip_without_float64,
        lists_of_ones_own,
        registered_tables_hold,
        the_command_prints_tables_and_json,
    )
}
