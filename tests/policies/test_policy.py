"""Policies: the rule of an op, presets by name, and copies with more devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from amp_fx.errors import PolicyError
from amp_fx.policies.policy import Policy, preset, preset_names
from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.presets import torch_version

aten = torch.ops.aten

# The lists as Intel's page gives them, in part: what differs from torch's own CPU lists, and a
# sample of what does not.
IPEX_LOW = "group_norm conv_tbc linear _native_multi_head_attention"
IPEX_FP32 = "fft_rfft fft_fft2 cross_entropy_loss linalg_svd cdist mse_loss ctc_loss quantile"
IPEX_PROMOTE = "cat stack index_copy"
ONLY_TORCH = "scaled_dot_product_attention prelu max_pool3d linalg_vecdot"


@pytest.mark.parametrize(
    ("op", "device_type", "policy"),
    [
        (aten.linear.default, "cpu", CastPolicy.LOWER_PRECISION_FP),
        (aten.softmax.int, "cuda", CastPolicy.FP32_SET_OPT_DTYPE),
        (aten.softmax.int, "cpu", None),
        (aten.norm.Scalar, "cuda", CastPolicy.FP32_APPEND_DTYPE),
        (aten.norm.ScalarOpt_dtype, "cuda", None),
        (aten.binary_cross_entropy.default, "cuda", CastPolicy.BANNED),
        (aten.binary_cross_entropy.default, "mps", None),
        (aten.mm.out, "cpu", None),
        (aten._convolution.default, "cpu", None),
        (aten._convolution.deprecated, "cpu", CastPolicy.LOWER_PRECISION_FP),
        (aten.mm.default, "hpu", None),
    ],
)
def test_the_rule_of_an_op(
    op: torch._ops.OpOverload, device_type: str, policy: CastPolicy | None
) -> None:
    assert Policy.default().rule(op, device_type) is policy


def test_the_default_is_the_installed_torchs() -> None:
    assert Policy.default() == preset("torch")
    name = "torch-{}.{}".format(*torch_version())
    if name in preset_names():
        assert preset(name) == Policy.default()
    assert preset("torch-2.13") != preset("torch-2.14")


def test_an_unknown_preset_lists_those_there_are() -> None:
    with pytest.raises(
        PolicyError, match=r"no preset .ipx.; the presets are torch, ipex, lean, torch"
    ):
        preset("ipx")
    with pytest.raises(PolicyError, match="did you mean 'ipex'"):
        preset("ipx")


def _overloads(packet: str) -> list[torch._ops.OpOverload]:
    """An oracle apart from the code's own: what the packet says of itself."""
    op = getattr(aten, packet)
    overloads = [getattr(op, name) for name in op.overloads()]
    return [overload for overload in overloads if not overload._schema.is_mutable]


@pytest.mark.parametrize(
    ("packets", "policy"),
    [
        (IPEX_LOW, CastPolicy.LOWER_PRECISION_FP),
        (IPEX_FP32, CastPolicy.FP32),
        (IPEX_PROMOTE, CastPolicy.PROMOTE),
        (ONLY_TORCH, None),
    ],
)
def test_ipex_has_its_own_cpu_lists(packets: str, policy: CastPolicy | None) -> None:
    ipex = preset("ipex")
    for packet in packets.split():
        for overload in _overloads(packet):
            assert ipex.rule(overload, "cpu") is policy, overload


def test_ipex_takes_every_functional_overload_and_no_other() -> None:
    ipex = preset("ipex")
    for overload in (aten.conv2d.default, aten.conv2d.padding, aten.conv_transpose2d.input):
        assert ipex.rule(overload, "cpu") is CastPolicy.LOWER_PRECISION_FP
    for overload in (aten.mm.out, aten.addmm_.default, aten.quantile.scalar_out):
        assert ipex.rule(overload, "cpu") is None


def test_ipex_is_as_torch_on_other_devices() -> None:
    assert preset("ipex").tables["cuda"] == Policy.default().tables["cuda"]
    assert preset("ipex").tables["cpu"] != Policy.default().tables["cpu"]


def test_ops_that_torch_has_removed_are_said_to_be_gone() -> None:
    ipex = preset("ipex")
    removed = {f"aten::{name}" for name in ("eig", "lstsq", "matrix_rank", "symeig")}
    assert removed <= set(ipex.gone("cpu"))
    assert all(ipex.tables["cpu"][op] is CastPolicy.FP32 for op in removed)
    assert not any(hasattr(aten, op.removeprefix("aten::")) for op in ipex.gone("cpu"))
    assert ipex.gone("cuda") == ipex.gone("no_such_device") == ()


def test_a_new_device_starts_from_the_reference_lists() -> None:
    policy = Policy.default()
    assert policy.rule(aten.linear.default, "my_device") is None
    extended = policy.with_device("my_device")
    assert policy.rule(aten.linear.default, "my_device") is None
    assert extended.rule(aten.linear.default, "my_device") is CastPolicy.LOWER_PRECISION_FP
    # As XPU, but for the ban, which the lists of the header do not have.
    xpu = {op: p for op, p in policy.tables["xpu"].items() if p is not CastPolicy.BANNED}
    assert extended.tables["my_device"] == xpu


def test_a_device_may_have_a_table_of_its_own() -> None:
    table = {"mylib::f": CastPolicy.PROMOTE}
    policy = Policy.default().with_device("cpu", table)
    table["mylib::f"] = CastPolicy.FP32
    assert policy.tables["cpu"] == {"mylib::f": CastPolicy.PROMOTE}
    assert policy.tables["cuda"] == Policy.default().tables["cuda"]


@pytest.mark.parametrize("device_type", ["", "cuda:0"])
def test_a_device_type_has_no_index(device_type: str) -> None:
    with pytest.raises(PolicyError, match=f"expected a device type .*, got {device_type!r}"):
        Policy.default().with_device(device_type)


@pytest.mark.parametrize("name", preset_names())
def test_tables_of_presets_stay_as_they_are(name: str) -> None:
    """Covers ops that this torch does not have."""
    for device_type, table in preset(name).tables.items():
        assert Policy.default().with_device(device_type, table).tables[device_type] == table


def test_qualified_names_win_over_others_in_a_table() -> None:
    for order in (1, -1):
        items = [("aten::softmax.int", "promote"), ("soft*", "fp32"), ("softplus", "keep")][::order]
        table = Policy.default().with_device("my_device", dict(items)).tables["my_device"]
        assert table["aten::softmax.int"] is CastPolicy.PROMOTE
        assert table["aten::softplus"] is CastPolicy.KEEP
        assert table["aten::softshrink"] is CastPolicy.FP32


def test_entries_are_checked() -> None:
    named: Any = {"linear": "fp32"}
    assert Policy("mine", {"cpu": named}).tables["cpu"] == {"aten::linear": CastPolicy.FP32}
    with pytest.raises(PolicyError, match=r"no op 'aten::linaer'; similar names: .*aten::linear"):
        Policy.default().with_device("cpu", {"aten::linaer": CastPolicy.FP32})
    with pytest.raises(PolicyError, match=r"op 'aten::exp': expected one of .*'fp33'.*'fp32'"):
        Policy.default().with_device("cpu", {"aten::exp": "fp33"})
    with pytest.raises(PolicyError, match=r"op 'exp': expected one of .*'fp33'.*'fp32'"):
        Policy("mine", {"cpu": named | {"exp": "fp33"}})


def test_a_policy_cannot_be_changed() -> None:
    policy: Any = Policy.default()
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.name = "mine"
    with pytest.raises(TypeError):
        policy.tables["cpu"] = {}
    with pytest.raises(TypeError):
        policy.tables["cpu"]["aten::exp"] = CastPolicy.FP32
