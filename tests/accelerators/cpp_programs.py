"""The device with autocast from generated C++, and not from Python."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import amp_fx
from amp_fx import csrc, preset
from amp_fx.accelerators.cpp import autocast_cpp, device_lists
from tests.accelerators import planted_faults
from tests.regions.device_programs import DEVICE, LOW
from tests.tables.measure import measured_table

if TYPE_CHECKING:
    from collections.abc import Callable

POLICY = preset("torch").with_ops(
    {
        "softmax": "lower_precision_fp",  # this chip sums in float32
        "hypot": "promote",
        "gelu": "fp32",
        "mish": "banned",
    }
)
"""The reference lists with changes of a vendor: each cast policy has ops."""

MODULE = """
#include <torch/csrc/python_headers.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "my_autocast", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit_my_autocast() {
  return PyModule_Create(&definition);
}
"""


def prepare() -> None:
    """Loads the device and the C++, as ``import my_device`` of a vendor would."""
    planted_faults.prepare()
    device: Any = torch.my_device  # type: ignore[attr-defined]
    device.get_amp_supported_dtype = lambda: list(LOW)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "autocast.cpp"
        source.write_text(autocast_cpp(POLICY, DEVICE) + MODULE, encoding="utf-8")
        csrc.imported("my_autocast", source)


def ops_have_the_policies_of_the_table() -> None:
    """Measured at the Autograd kernels, in C++ alone, and with what Python adds to it."""
    table = device_lists(POLICY, DEVICE)
    assert measured_table(DEVICE) == table
    amp_fx.register_device(DEVICE)
    assert measured_table(DEVICE) == table


def the_device_conforms() -> None:
    """It follows the vendor's policy, and not the reference lists."""
    report = amp_fx.conformance(DEVICE, policy=POLICY)
    assert report.passed, report
    failed = {result.op.partition(" ")[0] for result in amp_fx.conformance(DEVICE).failures}
    changed = {"aten::gelu", "aten::hypot", "aten::mish", "aten::softmax.int"}
    assert failed == changed


def a_weight_that_is_used_twice_gets_the_gradient_of_eager_autocast() -> None:
    """Its cast is shared in C++, so that gradients are added in the low dtype, also if compiled."""
    amp_fx.register_device(DEVICE)
    for dtype in LOW:
        grads = []
        for compiler in (None, "eager", "aot_eager"):
            torch.manual_seed(0)
            linear = torch.nn.Linear(8, 8).to(DEVICE)
            run: Any = lambda x, f=linear: f(f(f(x)))  # noqa: E731
            if compiler:
                run = torch.compile(run, backend="amp_fx", options={"compiler": compiler})
            with torch.autocast(DEVICE, dtype):
                out = run(torch.randn(4, 8).to(DEVICE))
            grads.append(torch.autograd.grad(out.float().square().sum(), linear.weight)[0])
        assert all(torch.equal(grads[0].cpu(), grad.cpu()) for grad in grads)


def banned_ops_say_so() -> None:
    """With PyTorch's words for PyTorch's own ban."""
    x = torch.rand(2, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        with pytest.raises(RuntimeError, match="BCEWithLogitsLoss"):
            torch.nn.functional.binary_cross_entropy(x, x)
        with pytest.raises(RuntimeError, match="aten::mish is banned by the policy"):
            torch.nn.functional.mish(x)
    assert torch.nn.functional.mish(x).dtype is torch.float32


PROGRAMS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        ops_have_the_policies_of_the_table,
        the_device_conforms,
        a_weight_that_is_used_twice_gets_the_gradient_of_eager_autocast,
        banned_ops_say_so,
    )
}
