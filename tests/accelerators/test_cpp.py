"""C++ that registers a policy: what it says, that it compiles, and what its ops do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from amp_fx import preset
from amp_fx.accelerators.cpp import autocast_cpp, registered_lists
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.commands.cli import main
from amp_fx.errors import OptionError, PolicyError
from amp_fx.tables.presets import device_table
from tests.accelerators.cpp_programs import PROGRAMS
from tests.in_forks import failures_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TORCH = preset("torch")


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return failures_of("tests.accelerators.cpp_programs")


@pytest.mark.slow  # compiling a whole table takes half a minute
@pytest.mark.skipif(not has_cpp_compiler(), reason="needs a C++ compiler")
@pytest.mark.parametrize("name", PROGRAMS)
def test_in_a_process_with_that_cpp(name: str, failures: dict[str, str]) -> None:
    assert failures.get(name, "ended its process") == ""


def test_the_lists_of_a_new_device_are_the_reference_lists() -> None:
    expected = {name: policy.value for name, policy in device_table().items()}
    assert registered_lists(autocast_cpp(TORCH, "my_device")) == expected


def test_a_table_of_ones_own_comes_with_overrides() -> None:
    policy = TORCH.with_device("my_device", {"relu": "fp32", "cat": "promote"})
    text = autocast_cpp(policy.with_ops({"relu": "lower_precision_fp"}), "my_device")
    lists = {"aten::relu": "lower_precision_fp", "aten::cat": "promote"}
    assert registered_lists(text) == lists
    assert "TORCH_CHECK" not in text


def test_ops_that_torch_no_longer_has_are_left_out() -> None:
    gone = set(preset("ipex").gone("cpu"))
    table = preset("ipex").tables["cpu"]
    text = autocast_cpp(TORCH.with_device("my_device", table), "my_device")
    assert gone
    assert {*registered_lists(text)} == {*table} - gone


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: autocast_cpp(TORCH, "cuda"), OptionError, "name of a new device"),
        (lambda: autocast_cpp(TORCH, "my device"), OptionError, "name of a new device"),
        (
            lambda: autocast_cpp(TORCH.with_ops({"gelu": "same_as_input"}), "my_device"),
            PolicyError,
            r"aten::gelu is same_as_input, .* policies in C\+\+ are lower_precision_fp, fp32",
        ),
        (
            lambda: autocast_cpp(
                TORCH.with_device("my_device", {"prims::exp": "fp32"}), "my_device"
            ),
            PolicyError,
            "prims::exp is not an op of PyTorch",
        ),
    ],
)
def test_what_cpp_cannot_say_is_an_error(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


def test_the_command_prints_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "--cpp", "my_device"]) == 0
    text = capsys.readouterr().out
    path = tmp_path / "autocast.cpp"
    check = ["policy", "--cpp", "my_device", "--check", str(path)]

    path.write_text(text, encoding="utf-8")
    assert main(check) == 0
    assert "registers the lists of policy 'torch'" in capsys.readouterr().out

    edited = text.replace("KERNEL_PRIVATEUSEONE(mm, ", "KERNEL_PRIVATEUSEONE(relu, ")
    edited = edited.replace("KERNEL_PRIVATEUSEONE(sum, dim_IntList, fp32_set_opt_dtype)", "")
    edited = edited.replace("(vdot, promote)", "(\n  vdot,  fp32)")
    path.write_text(edited.replace("KERNEL_PRIVATEUSEONE(exp,", "// KERNEL_PRIVATEUSEONE(exp,"))
    assert main(check) == 1
    assert capsys.readouterr().out.splitlines() == [
        "aten::exp: fp32 in the policy, not registered",
        "aten::mm: lower_precision_fp in the policy, not registered",
        "aten::relu: not listed in the policy, lower_precision_fp registered",
        "aten::sum.dim_IntList: fp32_set_opt_dtype in the policy, not registered",
        "aten::vdot: promote in the policy, fp32 registered",
    ]

    path.unlink()
    assert main(check) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["policy", "--check", str(path)]) == 2
    assert "--cpp DEVICE" in capsys.readouterr().err


def test_handwritten_registrations_are_read() -> None:
    """Reads the registrations of the example in PyTorch's documentation."""
    text = """
    TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
      KERNEL_PRIVATEUSEONE(mm, lower_precision_fp) /* all of these:
      KERNEL_PRIVATEUSEONE(exp, fp32) */
      KERNEL_PRIVATEUSEONE(softmax, int, fp32_set_opt_dtype)
      m.impl(TORCH_SELECTIVE_NAME("aten::binary_cross_entropy"), TORCH_FN(banned));
    }
    """
    assert registered_lists(text) == {
        "aten::mm": "lower_precision_fp",
        "aten::softmax.int": "fp32_set_opt_dtype",
        "aten::binary_cross_entropy": "banned",
    }
