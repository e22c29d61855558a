"""``amp_fx.export(device_type=...)``: CUDA's lists for models on the CPU.

The oracle are ATen's kernels for autocast on CUDA, which act on fake CUDA tensors in every build.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import amp_fx
from amp_fx.csrc.guards import add_guards
from amp_fx.errors import OptionError
from amp_fx.torch_private.autocast import with_cuda_regions
from tests.composed import Composed

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

LOW = (torch.float16, torch.bfloat16)


OPS: dict[str, Callable[[Tensor], Any]] = {
    "mm": lambda x: x @ x,
    "linear": lambda x: functional.linear(x, x),
    "softmax": lambda x: torch.softmax(x, -1),
    "softmax_of_low": lambda x: torch.softmax(x @ x, -1),
    "log_softmax_of_low": lambda x: torch.log_softmax(x @ x, -1),
    "sum_of_low": lambda x: (x @ x).sum(),
    "mean_of_low": lambda x: (x @ x).mean(),
    "prod_of_low": lambda x: (x @ x).prod(),
    "cumsum_of_low": lambda x: (x @ x).cumsum(0),
    "norm_of_low": lambda x: (x @ x).norm(),
    "pow_of_low": lambda x: (x @ x) ** 2,
    "rsqrt_of_low": lambda x: (x @ x).abs().rsqrt(),
    "exp_of_low": lambda x: (x @ x).exp(),
    "layer_norm_of_low": lambda x: functional.layer_norm(x @ x, (8,)),
    "group_norm_of_low": lambda x: functional.group_norm(x @ x, 2),
    "gelu_of_low": lambda x: functional.gelu(x @ x),
    "softplus_of_low": lambda x: functional.softplus(x @ x),
    "upsample_of_low": lambda x: functional.interpolate((x @ x)[None, None], scale_factor=2.0),
    "cat_of_mixed": lambda x: torch.cat([x, x @ x]),
    "add_of_mixed": lambda x: x + x @ x,
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "cdist_of_low": lambda x: torch.cdist(x @ x, x),
    "attention": lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "indexed": lambda x: (x @ x)[:, None, ::2].contiguous(),
    "branch_on_dtype": lambda x: x if torch.softmax(x @ x, -1).dtype == x.dtype else x.double(),
    "branch_on_state": lambda x: x.double() if torch.is_autocast_enabled("cuda") else x,
}


def fake_autocast(op: Callable[..., Any], dtype: torch.dtype) -> Any:
    """Returns the result of an op under ``torch.autocast("cuda")``, as a fake tensor."""
    add_guards()
    with with_cuda_regions(), FakeTensorMode(), torch.no_grad():
        x = torch.empty(8, 8, device="cuda:0")
        with torch.autocast("cuda", dtype):
            return op(x)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", OPS)
def test_dtypes_are_those_of_autocast_on_cuda(name: str, dtype: torch.dtype) -> None:
    program = amp_fx.export(
        Composed(lambda _, x: OPS[name](x)),
        (torch.rand(8, 8),),
        device_type="cuda",
        dtype=dtype,
        output_dtype="autocast",
    )
    expected = fake_autocast(OPS[name], dtype)
    [result] = program.graph.output_node().args[0]
    assert result.meta["val"].dtype == expected.dtype
    values = [n.meta["val"] for n in program.graph.nodes if "val" in n.meta]
    assert {v.device.type for v in values if isinstance(v, Tensor)} == {"cpu"}
    assert program.module()(torch.rand(8, 8)).dtype == expected.dtype


class Network(nn.Module):
    """Its normalisation is in float32 on CUDA, and in the low dtype on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.constant = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x)) + self.constant + torch.arange(8)
        result: Tensor = self.b(x[:, :8])
        return result


def with_casts_by_hand(model: Network, x: Tensor, dtype: torch.dtype) -> Tensor:
    low = copy.deepcopy(model)
    low.a.to(dtype)
    low.b.to(dtype)
    with torch.no_grad():
        x = low.norm(low.a(x.to(dtype)).float()) + model.constant + torch.arange(8)
        result: Tensor = low.b(x.to(dtype)).float()
        return result


@pytest.mark.parametrize("way", ["module", "strict", "program", "dynamic"])
@pytest.mark.parametrize("dtype", LOW)
def test_a_model_on_the_cpu(way: str, dtype: torch.dtype) -> None:
    model, x = Network().eval(), torch.randn(3, 8)
    shapes = ({0: torch.export.Dim("batch", min=2, max=64)},)
    if way == "program":
        given = torch.export.export(model, (x,))
        program = amp_fx.export(given, device_type="cuda", dtype=dtype)
    else:
        program = amp_fx.export(
            model,
            (x,),
            device_type="cuda",
            dtype=dtype,
            strict=way == "strict",
            dynamic_shapes=shapes if way == "dynamic" else None,
        )
    if way == "dynamic":
        x = torch.randn(9, 8)
    expected = with_casts_by_hand(model, x, dtype)
    torch.testing.assert_close(program.module()(x), expected, rtol=0, atol=0)
    assert {t.device.type for t in program.state_dict.values()} == {"cpu"}


def test_a_region_for_cuda_inside_of_the_model() -> None:
    def inside(model: Any, x: Tensor) -> Any:
        with torch.autocast("cuda", torch.float16):
            return model.network(x)

    network, x = Network().eval(), torch.randn(3, 8)
    model = Composed(inside, network=network)
    with pytest.raises(OptionError, match=r"'cuda'.*on cpu.*device_type=\"cuda\""):
        amp_fx.export(model, (x,))
    amp_fx.export(model, (x,), device_type="cpu")  # as requested: the region has no effect there
    program = amp_fx.export(model, (x,), device_type="cuda", dtype=torch.bfloat16)
    expected = with_casts_by_hand(network, x, torch.float16)
    torch.testing.assert_close(program.module()(x).float(), expected, rtol=0, atol=0)


def test_a_policy_for_another_device_is_an_error() -> None:
    policy = amp_fx.Policy.default("cuda", torch.float16)
    model, x = Network().eval(), torch.randn(3, 8)
    with pytest.raises(OptionError, match=r"float16 on cuda.*for cpu.*device_type=\"cuda\""):
        amp_fx.export(model, (x,), policy=policy)
    program = amp_fx.export(model, (x,), policy=policy, device_type="cuda")
    expected = with_casts_by_hand(model, x, torch.float16)
    torch.testing.assert_close(program.module()(x), expected, rtol=0, atol=0)
    amp_fx.export(model, (x,), policy=amp_fx.Policy.default(dtype=torch.float16))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the region is enabled")
@pytest.mark.parametrize("device_type", [None, "cuda"])
def test_a_region_that_disables_itself_is_an_error(device_type: str | None) -> None:
    model, x = Network().eval(), torch.randn(3, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        region = torch.autocast("cuda", torch.float16)
    with region, pytest.raises(OptionError, match=r"disables itself.*outside of it"):
        amp_fx.export(model, (x,), device_type=device_type)


@pytest.mark.parametrize(
    ("region", "device_type", "message"),
    [
        ("cpu", "cuda", r"region around the call is for cpu.*for cuda"),
        (None, "cudda", r"'cudda' is not one of 'cpu', 'cuda'"),
    ],
)
def test_a_wrong_device_is_an_error(region: str | None, device_type: str, message: str) -> None:
    around = torch.autocast(region, torch.bfloat16) if region else contextlib.nullcontext()
    with around, pytest.raises(OptionError, match=message):
        amp_fx.export(Network().eval(), (torch.randn(3, 8),), device_type=device_type)


@pytest.mark.parametrize("dtype", LOW)
def test_fake_tensors_on_cuda(dtype: torch.dtype) -> None:
    add_guards()
    with FakeTensorMode():
        x = torch.empty(3, 8, device="cuda:0")
        weight = nn.Parameter(torch.empty(8, 8, device="cuda:0"))
        model = nn.Linear(8, 8, bias=False, device="meta")
        model.weight = weight
    program = amp_fx.export(
        nn.Sequential(model, nn.Softmax(-1)), (x,), dtype=dtype, output_dtype="autocast"
    )
    values = {node.name: node.meta["val"] for node in program.graph.nodes if "val" in node.meta}
    assert values["linear"].dtype == dtype
    assert values["linear"].device.type == "cuda"
    [result] = program.graph.output_node().args[0]
    assert result.meta["val"].dtype == torch.float32
