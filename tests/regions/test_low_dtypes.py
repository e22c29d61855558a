"""low_dtypes: what a region that names no dtype runs in, on devices old and new."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import symbolic_trace

from amp_fx.backend.rewrite import graph_devices, start_state
from amp_fx.devices.low_dtypes import forget_devices
from amp_fx.errors import DtypeWarning, OptionError
from amp_fx.front.settings import RegionSettings
from amp_fx.options import Options, default_dtype
from amp_fx.policies.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import fx

CAPABILITIES = {"Tesla P100": (6, 0), "Tesla T4": (7, 5), "A100": (8, 0), "H200": (9, 0)}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes a machine of some CUDA devices, by name, of what torch says about them."""

    def make(*names: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(names))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda index: CAPABILITIES[names[index]]
        )
        monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
        forget_devices()

    yield make
    forget_devices()


def graph_on(device: str) -> fx.GraphModule:
    """Returns a graph with a product of tensors on a device, as Dynamo records values."""
    gm = symbolic_trace(lambda x: x @ x)
    with FakeTensorMode():
        value = torch.empty(2, 2, device="meta")
        value.fake_device = torch.device(device)  # type: ignore[attr-defined]
    for node in gm.graph.nodes:
        if node.op != "output":
            node.meta["example_value"] = value
    return gm


def bare_dtype(device: str = "cuda:0", **options: Any) -> torch.dtype:
    state = start_state(graph_devices(graph_on(device)), Options.parse(options))
    return state.low_dtype("cuda")


@pytest.mark.parametrize("name", ["A100", "H200"])
def test_bfloat16_where_the_device_has_it(machine: Callable[..., None], name: str) -> None:
    machine(name)
    assert bare_dtype() is torch.bfloat16


def test_a_device_that_is_not_here_is_taken_for_a_new_one(machine: Callable[..., None]) -> None:
    machine()
    assert default_dtype("cuda") is torch.bfloat16


def test_float16_with_one_warning_where_it_has_not(machine: Callable[..., None]) -> None:
    machine("Tesla T4")
    with pytest.warns(DtypeWarning, match=r"Tesla T4 \(compute .* 7\.5\).*GradScaler") as caught:
        found = {bare_dtype(), bare_dtype()}
    assert found == {torch.float16}
    assert len(caught) == 1


def test_a_dtype_that_was_given_is_not_warned_of(machine: Callable[..., None]) -> None:
    machine("Tesla T4")
    assert bare_dtype(dtype="fp16") is torch.float16
    policy = Policy.default("cuda", dtype=torch.float16)
    assert bare_dtype(policy=policy) is torch.float16


def test_the_devices_of_the_graph_decide(machine: Callable[..., None]) -> None:
    machine("A100", "Tesla T4")
    assert bare_dtype("cuda:0") is torch.bfloat16
    with pytest.warns(DtypeWarning, match="Tesla T4"):
        assert bare_dtype("cuda:1") is torch.float16


@pytest.mark.parametrize("name", ["A100", "Tesla T4"])
def test_amp_fx_compile_chooses_alike(machine: Callable[..., None], name: str) -> None:
    machine(name)
    settings = RegionSettings("cuda", None, None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        region: Any = settings.region(None, (), {})
    assert region.fast_dtype is (torch.bfloat16 if name == "A100" else torch.float16)
    assert [w.category for w in caught] == ([] if name == "A100" else [DtypeWarning])


def test_a_region_around_the_call_beats_the_default(machine: Callable[..., None]) -> None:
    machine("A100")
    settings = RegionSettings("cuda", None, None)
    with torch.autocast("cuda", torch.float16):
        region: Any = settings.region(None, (), {})
    assert region.fast_dtype is torch.float16


def test_the_policy_beats_the_default(machine: Callable[..., None]) -> None:
    machine("A100")
    policy = Policy.default("cuda", dtype="half")
    region: Any = RegionSettings("cuda", None, policy).region(None, (), {})
    assert region._region.fast_dtype is torch.float16


def test_what_torch_was_told_beats_the_default(machine: Callable[..., None]) -> None:
    machine("Tesla T4")
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        assert default_dtype("cuda") is torch.bfloat16
    finally:
        torch.set_autocast_dtype("cuda", before)


def test_bfloat16_is_refused_where_inductor_makes_no_kernels(machine: Callable[..., None]) -> None:
    machine("Tesla T4")
    with pytest.raises(OptionError, match=r"Tesla T4 .*inductor.*float16.*GradScaler"):
        bare_dtype(dtype="bf16")


def test_emulated_bfloat16_is_warned_of_once(machine: Callable[..., None]) -> None:
    machine("Tesla T4")
    options = {"dtype": "bf16", "compiler": "eager"}
    with pytest.warns(DtypeWarning, match=r"Tesla T4 .*emulated") as caught:
        assert bare_dtype(**options) is bare_dtype(**options) is torch.bfloat16
    assert len(caught) == 1


def test_a_region_of_the_users_own_is_warned_of(machine: Callable[..., None]) -> None:
    machine("Tesla P100")
    with torch.autocast("cuda", torch.bfloat16), pytest.warns(DtypeWarning, match="Tesla P100"):
        bare_dtype()


@pytest.mark.parametrize("device_type", ["mps", "mtia"])
def test_float16_of_other_devices_is_warned_of(device_type: str) -> None:
    forget_devices()
    if device_type not in Options().policy.tables:
        pytest.skip(f"no table for {device_type}")
    with pytest.warns(DtypeWarning, match=f"'{device_type}'.*GradScaler"):
        assert default_dtype(device_type, warns=True) is torch.float16
    forget_devices()


def test_the_cpu_is_bfloat16_and_is_warned_of_nowhere() -> None:
    assert default_dtype("cpu", warns=True) is torch.bfloat16
