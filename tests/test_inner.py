"""inner: which compiler gets the graph, and what is relied on of inductor."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor import config

from amp_fx.backend import numerics
from amp_fx.backend.disk_caches import region_markers_cacheable
from amp_fx.options import Options
from tests.programs import compiled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.programs import Program


@pytest.fixture
def x(rng: torch.Generator) -> torch.Tensor:
    return torch.randn(4, 4, generator=rng)


@pytest.fixture
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(numerics, "has_cpp_compiler", lambda: False)
    numerics._warn_no_compiler.cache_clear()
    yield
    numerics._warn_no_compiler.cache_clear()


@pytest.mark.usefixtures("_no_compiler")
def test_without_a_compiler_one_line_and_aot_eager(
    x: torch.Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("inductor was called")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", refuse)
    programs: list[Program] = [lambda x: x @ x, lambda x: (x @ x).relu()]
    with caplog.at_level(logging.WARNING, "amp_fx"):
        for program in programs:
            result = compiled(program, compiler="inductor")(x)
            with torch.autocast("cpu", torch.bfloat16):
                expected = program(x).float()
            torch.testing.assert_close(result, expected, rtol=0, atol=0)
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert "no C++ compiler" in lines[0]


@pytest.mark.usefixtures("_no_compiler")
def test_graphs_without_cpu_tensors_need_no_compiler() -> None:
    assert numerics.uses_inductor({"meta"}, Options())
    assert not numerics.uses_inductor({"cpu"}, Options())


def test_region_markers_are_cacheable_while_compiling_only() -> None:
    """Relies on ``torch._inductor.config.unsafe_marked_cacheable_functions``."""
    before = dict(config.unsafe_marked_cacheable_functions)
    with region_markers_cacheable():
        marked = dict(config.unsafe_marked_cacheable_functions)
    assert dict(config.unsafe_marked_cacheable_functions) == before
    added = set(marked) - set(before)
    # The names under which AOTAutograd's cache looks functions up.
    for name in added:
        module, _, function = name.rpartition(".")
        assert callable(getattr(sys.modules[module], function))
    assert {name.rpartition(".")[2] for name in added} == {"_enter_autocast", "_exit_autocast"}


def make_and_train(compiler: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Returns the result of a network under autocast, and its gradients."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4))
    run = model if compiler is None else compiled(model, compiler=compiler)
    with torch.autocast("cpu", torch.bfloat16):
        out = run(x).softmax(-1)
    return [out, *torch.autograd.grad(out.float().square().sum(), [*model.parameters()])]


def plain_backend(gm: Any, example_inputs: Any) -> Any:
    """Returns a backend of Dynamo that calls the graph as it is."""
    assert example_inputs
    assert "_to_copy" in gm.code
    return gm.forward


def aot_backend(gm: Any, example_inputs: Any) -> Any:
    """Returns a backend of Dynamo that lets AOTAutograd differentiate the graph."""
    assert not torch.is_autocast_enabled("cpu")
    return aot_autograd(fw_compiler=make_boxed_func_of, bw_compiler=make_boxed_func_of)(
        gm, example_inputs
    )


def make_boxed_func_of(gm: Any, _: Any) -> Any:
    return make_boxed_func(gm.forward)


@pytest.mark.parametrize("backend", [plain_backend, aot_backend])
def test_a_backend_of_dynamo_compiles_the_rewritten_graph(backend: Any, x: torch.Tensor) -> None:
    for ours, native in zip(make_and_train(backend, x), make_and_train(None, x), strict=True):
        torch.testing.assert_close(ours, native, rtol=0, atol=0)


@pytest.mark.falls_back
def test_a_backend_that_fails_is_named(x: torch.Tensor, caplog: pytest.LogCaptureFixture) -> None:
    def broken_chip(*_: Any) -> Any:
        raise ValueError("no code for this graph")

    with caplog.at_level(logging.WARNING, "amp_fx"):
        made = make_and_train(broken_chip, x)
    torch.testing.assert_close(made, make_and_train(None, x), rtol=0, atol=0)
    assert "compiled with 'broken_chip': ValueError: no code for this graph" in caplog.text
