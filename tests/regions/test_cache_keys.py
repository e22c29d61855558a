"""What tells policies apart in on-disk caches; across processes: ``tests/test_caches.py``."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch
from torch import nn
from torch._functorch._aot_autograd import autograd_cache

import amp_fx
from amp_fx import Policy
from amp_fx.regions.cache_keys import digest, put_policies_in_keys

LOW = Policy.default().with_ops({"softmax": "lower_precision_fp"})


def test_a_digest_is_that_of_the_content() -> None:
    same = Policy.loads(str(LOW))
    others = [
        Policy.default(),
        amp_fx.preset("lean"),
        Policy.default().with_ops({"softmax": "fp32"}),
        LOW.with_dtype("float16"),
        LOW.with_args("index_add", {"source": "same_as:self"}),
    ]
    assert digest(same) == digest(LOW)
    assert len({digest(policy) for policy in (LOW, *others)}) == 1 + len(others)


def test_a_digest_is_the_same_in_another_process() -> None:
    program = (
        "from amp_fx import Policy; from amp_fx.regions.cache_keys import digest\n"
        "print(digest(Policy.default().with_ops({'softmax': 'lower_precision_fp'})))\n"
        "print(digest(Policy.default().with_modules({'head': 'fp32'})))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    plain, with_modules = done.stdout.split()
    assert plain == digest(LOW)
    assert with_modules != digest(Policy.default().with_modules({"head": "fp32"}))


def test_keys_name_policies_around_and_inside(monkeypatch: Any) -> None:
    """Relies on the class whose attributes are the key; without a policy it is as torch has it."""
    found: list[Any] = []

    def record(_: object, gm: torch.fx.GraphModule, *__: object) -> None:
        found.append(gm)

    def keyed(gm: torch.fx.GraphModule, _: object) -> Any:
        kind: Any = autograd_cache.AOTAutogradCacheDetails
        details = kind(gm, (), None, {})
        found.append(getattr(details, "amp_fx_policies", None))
        return gm.forward

    monkeypatch.setattr("amp_fx.regions.cache_keys._done", [])
    monkeypatch.setattr(autograd_cache.AOTAutogradCacheDetails, "__init__", record)
    put_policies_in_keys()  # around what does nothing but take a graph
    region = amp_fx.autocast("cpu", torch.bfloat16, policy=LOW)
    x = torch.ones(2, 2)
    layer = nn.Linear(2, 2)
    torch.compile(layer, backend=keyed)(x)
    with region:
        torch.compile(layer, backend=keyed)(x)
    torch.compile(region(lambda x: x @ x), backend=keyed)(x)
    assert found[1::2] == [None, [digest(LOW)], [digest(LOW)]]
