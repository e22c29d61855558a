"""devices: a PrivateUse1 backend works like a built-in one, on fake tensors."""

from __future__ import annotations

import functools
import importlib

import pytest

from tests.in_forks import failures_of

SETUP = """
import sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
import amp_fx
from amp_fx import CastPolicy, preset
from amp_fx.errors import AmpFxError

_setup_privateuseone_for_python_backend("my_device")
F = torch.nn.functional
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32

def program(x, w):
    y = F.linear(x, w)
    return y, y.softmax(-1), torch.cat([y, x]), y.sum(), x + x

def dtypes(outputs):
    return [out.dtype for out in outputs]

def compiled(**options):
    return torch.compile(program, backend="amp_fx", options={"compiler": "eager", **options})

def inputs():
    return torch.empty(3, 4, device="my_device"), torch.empty(4, 4, device="my_device")

REFERENCE = [bf16, f32, f32, f32, f32]
"""

TEXTS = {
    "reference lists, eager and compiled, and a policy of a region": """
amp_fx.register_device("my_device", dtypes=[bf16, f16])
assert torch.my_device.get_amp_supported_dtype() == [bf16, f16]
with FakeTensorMode():
    args = inputs()
    with torch.autocast("my_device", bf16):
        assert dtypes(program(*args)) == REFERENCE, dtypes(program(*args))
        assert dtypes(compiled()(*args)) == REFERENCE
    assert dtypes(program(*args)) == [f32] * 5
    assert dtypes(compiled(dtype=bf16, output_dtype="autocast")(*args)) == REFERENCE
    assert dtypes(compiled(dtype=bf16)(*args)) == [f32] * 5
    inside = amp_fx.compile(program, dtype=bf16, options={"compiler": "eager"})
    assert dtypes(inside(*args)) == REFERENCE
    with torch.autocast("cpu", bf16):
        assert dtypes(program(*args)) == [f32] * 5
table = {**preset("torch").tables["my_device"], "aten::linear": CastPolicy.FP32}
policy = preset("torch").with_device("my_device", table)
with FakeTensorMode(), amp_fx.autocast("my_device", bf16, policy=policy):
    args = inputs()
    assert dtypes(compiled()(*args)) == [f32] * 5
""",
    "bad input, then dtypes of the module": """
WRONG = (
    (("cuda",), "not the name of torch's PrivateUse1 backend, which is 'my_device'"),
    (("other",), "rename_privateuse1_backend"),
    ((3,), "not the name"),
    (("my_device",), "get_amp_supported_dtype() does not exist: pass dtypes"),
    (("my_device", []), "must be floating-point dtypes"),
    (("my_device", [torch.int8]), "must be floating-point dtypes"),
    (("my_device", ["bfloat17"]), "must be floating-point dtypes"),
    (("my_device", [bf16], {"linaer": CastPolicy.FP32}), "similar names: aten::linear"),
    (("my_device", [bf16], {"aten::linear": "fp33"}), "did you mean 'fp32'"),
)
for args, message in WRONG:
    try:
        amp_fx.register_device(*args)
    except AmpFxError as error:
        assert message in str(error), error
    else:
        raise AssertionError(args)
assert "my_device" not in preset("torch").tables
assert not hasattr(torch.my_device, "get_amp_supported_dtype")
torch.my_device.get_amp_supported_dtype = lambda: [bf16]
amp_fx.register_device("my_device")
with FakeTensorMode():
    args = inputs()
    # float16 is what torch takes by default for such a device, and this one cannot.
    assert dtypes(compiled(output_dtype="autocast")(*args)) == REFERENCE
    try:
        compiled(dtype=f16)(*args)
    except Exception as error:
        assert "allowed: torch.bfloat16" in str(error), error
    else:
        raise AssertionError("float16 was taken")
""",
    "table of one's own": """
amp_fx.register_device("my_device", [f16], {"softmax.int": "lower_precision_fp"})
assert list(preset("torch").tables["my_device"]) == ["aten::softmax.int"]
with FakeTensorMode():
    args = inputs()
    for call in (program, compiled()):
        with amp_fx.autocast("my_device", f16):
            assert dtypes(call(*args)) == [f32, f16, f32, f32, f32]
""",
    "before the backend has a module": """
module = torch.my_device
del torch.my_device
del sys.modules["torch.my_device"]
try:
    amp_fx.register_device("my_device", dtypes=[bf16])
except AmpFxError as error:
    assert "torch.my_device does not exist yet: import the backend's package" in str(error), error
else:
    raise AssertionError("registered without a module")
assert "my_device" not in preset("torch").tables
torch._register_device_module("my_device", module)
amp_fx.register_device("my_device", dtypes=[bf16])
on_cpu = torch.compile(lambda x: x @ x, backend="amp_fx", options={"compiler": "eager"})
on_cpu(torch.ones(2, 2))
with FakeTensorMode(), torch.autocast("my_device", bf16):
    assert dtypes(program(*inputs())) == REFERENCE
""",
    "kernels of the backend's own stay": """
library = torch.library.Library("aten", "IMPL")
seen = []
def own(x, dim, dtype=None):
    seen.append(x.dtype)
    with torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    ):
        return torch.ops.aten.softmax.int(x, dim, dtype)
library.impl("softmax.int", own, "AutocastPrivateUse1")
amp_fx.register_device("my_device", dtypes=[bf16])
with FakeTensorMode(), torch.autocast("my_device", bf16):
    program(*inputs())
assert seen == [bf16]
""",
}


PROGRAMS = {name: functools.partial(exec, SETUP + text, {}) for name, text in TEXTS.items()}


def prepare() -> None:
    """Imports what takes most of the time, once for all programs."""
    importlib.import_module("torch._dynamo")


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return failures_of(__name__)


@pytest.mark.parametrize("name", PROGRAMS)
def test_in_a_process_of_its_own(name: str, failures: dict[str, str]) -> None:
    assert failures.get(name, "ended its process") == ""
