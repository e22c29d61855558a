"""The tables against the installed torch: which ops it registers, and what it does to each."""

from __future__ import annotations

import pytest
import torch

from amp_fx.policies.policy import Policy
from amp_fx.regions.drift import COMPARED, find_drift, registered_ops
from amp_fx.tables import DEVICES
from amp_fx.tables.cast_policy import CastPolicy


@pytest.mark.parametrize("device_type", DEVICES)
def test_the_tables_say_what_the_installed_torch_does(device_type: str) -> None:
    drift = find_drift(Policy.default(), [device_type])
    assert not drift, "\n".join(map(str, drift))


def _edited(device_type: str, **edits: CastPolicy | None) -> Policy:
    table = dict(Policy.default().tables[device_type])
    for name, policy in edits.items():
        if policy is None:
            del table[f"aten::{name}"]
        else:
            table[f"aten::{name}"] = policy
    return Policy("edited", {device_type: table})


@pytest.mark.parametrize(
    ("device_type", "name", "policy", "line"),
    [
        ("cuda", "layer_norm", None, "cuda: aten::layer_norm: missing here (fp32)"),
        ("cpu", "relu", CastPolicy.FP32, "cpu: aten::relu: missing in torch (fp32)"),
        ("cuda", "mm", CastPolicy.FP32, "other policy (fp32 here, lower_precision_fp in torch)"),
        ("mtia", "mm", None, "mtia: aten::mm: missing here (what torch does cannot be measured"),
    ],
)
def test_each_kind_of_difference_is_named(
    device_type: str, name: str, policy: CastPolicy | None, line: str
) -> None:
    [difference] = find_drift(_edited(device_type, **{name: policy}))
    assert difference.op == f"aten::{name}"
    assert line in str(difference)


def test_the_policy_of_every_op_is_looked_at() -> None:
    table = Policy.default().tables["cuda"]
    others = {op: _another(policy) for op, policy in table.items()}
    drift = find_drift(Policy("all wrong", {"cuda": others}))
    assert {d.op: (d.ours, d.torch) for d in drift} == {op: (others[op], table[op]) for op in table}


def _another(policy: CastPolicy) -> CastPolicy:
    return CastPolicy.PROMOTE if policy is CastPolicy.FP32 else CastPolicy.FP32


def test_kernels_of_cuda_builds_alone_are_no_drift() -> None:
    """CUDA builds register cuDNN's RNN, with a kernel that no cast policy describes."""

    def own_kernel(*args: object) -> None:
        raise NotImplementedError(args)

    with torch.library._scoped_library("aten", "IMPL") as library:
        if "aten::_cudnn_rnn" not in registered_ops("cuda"):
            library.impl("_cudnn_rnn", own_kernel, "AutocastCUDA")
        assert "aten::_cudnn_rnn" in registered_ops("cuda")
        assert not find_drift(Policy.default(), ["cuda"])


def test_kernels_of_other_libraries_are_no_drift() -> None:
    with torch.library._scoped_library("amp_fx_test_drift", "DEF") as library:
        library.define("f(Tensor x) -> Tensor")
        library.impl("f", lambda x: x, "AutocastMAIA")
        assert "amp_fx_test_drift::f" in registered_ops("maia")
        assert not find_drift(Policy.default(), ["maia"])


def test_a_kernel_that_torch_adds_is_drift() -> None:
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("relu", lambda x: x, "AutocastMAIA")
        assert [d.op for d in find_drift(Policy.default(), ["maia"])] == ["aten::relu"]


def test_devices_that_torch_registers_nothing_for_are_left_out() -> None:
    assert not find_drift(Policy("empty", {}).with_device("privateuseone"))


@pytest.mark.parametrize("device_type", COMPARED)
def test_torch_lists_registrations_for_every_device_in_every_build(device_type: str) -> None:
    assert len(registered_ops(device_type)) > 90
