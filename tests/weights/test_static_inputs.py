"""The copies are inputs whose address is fixed, for inductor and its CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._guards import TracingContext

from amp_fx.backend import inner
from tests.weights.nets import compile_amp_fx, inputs, make_net

if TYPE_CHECKING:
    from collections.abc import Sequence


def test_added_placeholders_are_marked_static(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.fx.GraphModule, Sequence[Any]]] = []

    def recording(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *_: Any) -> Any:
        seen.append((gm, example_inputs))
        return gm.forward

    monkeypatch.setattr("amp_fx.backend.entry.compile_inner", recording)
    compile_amp_fx(make_net())(inputs())
    [(gm, example_inputs)] = seen
    placeholders = gm.graph.find_nodes(op="placeholder")
    added = [i for i, node in enumerate(placeholders) if "kept_input" in node.meta]
    assert added == [len(placeholders) - 3 + k for k in range(3)]
    for i in added:
        tensor_dict = placeholders[i].meta["tensor_dict"]
        assert tensor_dict["_dynamo_static_input_type"] == "unguarded"
        example = example_inputs[i]
        assert isinstance(example, torch._subclasses.FakeTensor)
        assert example.dtype == torch.bfloat16
        assert not example.requires_grad
        assert all(isinstance(size, int) for size in example.size())


@pytest.mark.parametrize("is_grad_enabled", [True, False])
def test_aotautograd_takes_them_for_static(
    monkeypatch: pytest.MonkeyPatch, is_grad_enabled: bool
) -> None:
    seen: list[list[int]] = []

    def compile_forward(gm: torch.fx.GraphModule, _: Sequence[Any]) -> Any:
        context = TracingContext.try_get()
        assert context is not None
        assert context.fw_metadata is not None
        seen.append(list(context.fw_metadata.static_input_indices))
        return gm.forward

    def through_aotautograd(
        gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *_: Any
    ) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        def compiler(graph: torch.fx.GraphModule, values: Sequence[Any]) -> Any:
            return make_boxed_func(compile_forward(graph, values))

        return aot_autograd(fw_compiler=compiler, bw_compiler=make_boxed)(gm, example_inputs)

    def make_boxed(gm: torch.fx.GraphModule, _: Sequence[Any]) -> Any:
        return make_boxed_func(gm.forward)

    monkeypatch.setattr(inner, "_aot_eager", through_aotautograd)
    # As on accelerators, where it matters.
    monkeypatch.setattr("amp_fx.backend.entry.trained_weights", lambda *_: frozenset())
    with torch.set_grad_enabled(is_grad_enabled):
        compile_amp_fx(make_net(), compiler="aot_eager")(inputs())
    # The copies of three parameters, and the parameters where gradients go to them.
    [static] = seen
    assert len(static) == (6 if is_grad_enabled else 3)


@pytest.mark.slow
def test_on_disk_caches_take_graphs_with_copies(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        compiled = compile_amp_fx(make_net(), compiler="inductor")
        compiled(inputs()).sum().backward()  # type: ignore[no-untyped-call]
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert counters["inductor"]["fxgraph_cache_miss"] == 0
