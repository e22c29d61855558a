"""Measuring what the installed torch's autocast does to an op, with and without a device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from amp_fx.errors import PolicyError
from amp_fx.tables.presets import measured_file, torch_version
from tests.tables.measure import measure, measured_table, registered_ops

ROOT = Path(__file__).parents[2]


def test_the_file_of_the_installed_torch_is_what_is_measured(tmp_path: Path) -> None:
    """Measures in a separate process, because other tests register kernels on Autocast keys."""
    command = [sys.executable, "-m", "tests.tables.measure", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    [fresh] = tmp_path.iterdir()
    committed = measured_file(torch_version())
    assert fresh.name == committed.name
    assert fresh.read_text().splitlines() == committed.read_text().splitlines()


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "xpu", "mps"])
def test_leaves_the_op_and_the_autocast_state_unchanged(device_type: str) -> None:
    was = torch.get_autocast_dtype(device_type)
    torch.set_autocast_dtype(device_type, torch.float16)
    try:
        measure("aten::mm", device_type)
        assert torch.get_autocast_dtype(device_type) is torch.float16
        assert not torch.is_autocast_enabled(device_type)
        assert torch.is_autocast_cache_enabled()
    finally:
        torch.set_autocast_dtype(device_type, was)
    x = torch.eye(2, requires_grad=True)
    [grad] = torch.autograd.grad(torch.mm(x, x).sum(), x)
    assert torch.equal(grad, torch.full((2, 2), 2.0))


def test_a_kernel_unlike_every_policy_is_an_error() -> None:
    with torch.library._scoped_library("amp_fx_test_measure", "DEF") as library:
        library.define("f(Tensor x) -> Tensor")
        off = torch._C._ExcludeDispatchKeyGuard

        def always_half(x: torch.Tensor) -> torch.Tensor:
            with off(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
                result: torch.Tensor = torch.ops.amp_fx_test_measure.f(x.half())
            return result

        library.impl("f", always_half, "AutocastCPU")
        with pytest.raises(
            PolicyError, match="describes the effect of autocast on amp_fx_test_measure::f on cpu"
        ):
            measure("amp_fx_test_measure::f", "cpu")
        assert measure("amp_fx_test_measure::f", "cuda") is None


def test_kernels_of_cuda_builds_and_of_other_libraries_are_left_out() -> None:
    """CUDA builds register cuDNN's RNN, with a kernel that no cast policy describes."""

    def own_kernel(*args: object) -> None:
        raise NotImplementedError(args)

    key = "AutocastCUDA"
    with (
        torch.library._scoped_library("aten", "IMPL") as aten,
        torch.library._scoped_library("amp_fx_test_measure", "DEF") as library,
    ):
        if "aten::_cudnn_rnn" not in torch._C._dispatch_get_registrations_for_dispatch_key(key):
            aten.impl("_cudnn_rnn", own_kernel, key)
        library.define("f(Tensor x) -> Tensor")
        library.impl("f", lambda x: x, key)
        found = registered_ops("cuda")
    assert "aten::linear" in found
    assert not {"aten::_cudnn_rnn", "amp_fx_test_measure::f"} & set(found)


def test_an_op_of_maia_alone_is_an_error() -> None:
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("relu", lambda x: x, "AutocastMAIA")
        with pytest.raises(PolicyError, match=r"aten::relu on maia cannot be measured"):
            measured_table("maia")
