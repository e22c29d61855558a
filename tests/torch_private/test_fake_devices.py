"""Private names of torch with which a program is captured for a device that is missing."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_fx.csrc.guards import add_guards
from amp_fx.torch_private.autocast import entered_devices, with_cuda_regions
from amp_fx.torch_private.fake_tensors import fake_tensors_on


def test_fake_tensors_on_another_device() -> None:
    add_guards()
    real, mode = nn.Parameter(torch.randn(4, 8)), FakeTensorMode()
    part = real.detach()[:, ::2]
    device = torch.device("cuda", 0)
    with fake_tensors_on(device):
        fake = mode.from_tensor(real)
        view = mode.from_tensor(part)
        with mode:
            new = torch.zeros(3)
    assert [t.device for t in (fake, view, new)] == [device] * 3
    assert (fake.shape, view.stride(), fake.requires_grad) == (real.shape, (8, 2), True)
    assert FakeTensorMode().from_tensor(real).device.type == "cpu"


def test_guards_let_fake_tensors_be_indexed() -> None:
    add_guards()
    with FakeTensorMode():
        x = torch.empty(4, 4, device="cuda:0", requires_grad=True)
        assert (x[:, None, ::2].contiguous() * 2).device == x.device


@pytest.mark.skipif(torch.cuda.is_available(), reason="regions are enabled")
def test_regions_for_cuda_without_cuda() -> None:
    with with_cuda_regions(), torch.autocast("cuda", torch.bfloat16):
        assert torch.is_autocast_enabled("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        region = torch.autocast("cuda")
    with region:
        assert not torch.is_autocast_enabled("cuda")
        assert "cuda" in entered_devices()


def test_optimizer_of_torch_onnx_keeps_batch_norms() -> None:
    pytest.importorskip("onnxscript")
    from onnxscript import rewriter

    from amp_fx.torch_private.onnx import without_folded_batch_norms

    before = rewriter._DEFAULT_REWRITE_RULES
    with without_folded_batch_norms():
        removed = set(map(id, before)) - set(map(id, rewriter._DEFAULT_REWRITE_RULES))
        names = {type(r).__name__ + str(r) for r in before if id(r) in removed}
    assert len(names) == len(removed) >= 3
    assert rewriter._DEFAULT_REWRITE_RULES is before


def test_fake_tensors_of_other_threads_stay_where_they_are() -> None:
    real = torch.randn(2)
    with fake_tensors_on(torch.device("cuda", 0)), ThreadPoolExecutor(1) as pool:
        fake = pool.submit(FakeTensorMode().from_tensor, real).result()
    assert fake.device.type == "cpu"
