"""backend: what ``torch.compile(..., backend="amp_fx")`` does with programs of all kinds."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from amp_fx.backend import amp_fx
from amp_fx.backend.rewrite import bare_state, graph_devices, region_device_type
from amp_fx.options import Options
from amp_fx.policies.policy import preset
from amp_fx.regions.state import AutocastState
from tests.programs import capture_program, compiled

if TYPE_CHECKING:
    from pathlib import Path

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32

WITHOUT_IMPORT = """
import sys, torch
assert "amp_fx" in torch.compiler.list_backends()
model = torch.nn.Linear(4, 4)
compiled = torch.compile(model, backend="amp_fx", options={"compiler": "eager"})
x = torch.randn(2, 4)
with torch.autocast("cpu", torch.bfloat16):
    expected = model(x)
assert torch.equal(compiled(x), expected.float())
"""


@pytest.mark.slow
def test_program_that_never_imports_amp_fx(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_IMPORT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2))


@pytest.fixture
def x(rng: torch.Generator) -> torch.Tensor:
    return torch.randn(3, 4, generator=rng)


def eager(model: nn.Module, x: torch.Tensor, dtype: torch.dtype = bf16) -> torch.Tensor:
    with torch.autocast("cpu", dtype):
        result: torch.Tensor = model(x)
    return result


def test_ambient_way_gives_the_dtypes_of_autocast(model: nn.Module, x: torch.Tensor) -> None:
    result = eager(compiled(model, dtype=bf16), x, f16)  # type: ignore[arg-type]
    assert result.dtype == f16
    assert torch.equal(result, eager(model, x, f16))


def test_output_dtype_autocast(model: nn.Module, x: torch.Tensor) -> None:
    result = compiled(model, output_dtype="autocast")(x)
    assert result.dtype == bf16
    assert torch.equal(result, eager(model, x))


def test_default_dtype_is_that_of_the_device(x: torch.Tensor) -> None:
    state = AutocastState.ambient()
    captured = capture_program(lambda x: x @ x, x[:, :3])
    options = Options.parse({})
    found = bare_state(graph_devices(captured.gm), state, options)
    assert found.enabled == ("cpu",)
    assert found.low_dtype("cpu") == torch.get_autocast_dtype("cpu")


def test_model_is_left_as_it_was(model: nn.Module, x: torch.Tensor) -> None:
    """Changes nothing in the model, except what ``torch.compile`` changes with any backend."""
    before = copy.deepcopy(model.state_dict())
    other = copy.deepcopy(model)
    torch.compile(other, backend="eager")(x)
    parameters = [id(p) for p in model.parameters()]
    compiled(model)(x).sum().backward()
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[k], v) and after[k].dtype == v.dtype for k, v in before.items())
    for ours, theirs in zip(model.modules(), other.modules(), strict=True):
        assert set(vars(ours)) == set(vars(theirs))
    assert [id(p) for p in model.parameters()] == parameters


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_hooks_on_saved_tensors_see_no_fake_tensors(
    compiler: str, model: nn.Module, x: torch.Tensor
) -> None:
    seen: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.compile(model, backend="amp_fx", options={"compiler": compiler})(x)
    assert seen
    assert not any(isinstance(tensor, FakeTensor) for tensor in seen)


def test_norm_in_half_precision(model: nn.Module, x: torch.Tensor) -> None:
    """The bare way must run what the uncompiled program runs."""
    assert compiled(model.half())(x.half()).dtype == f16


def test_empty_graph() -> None:
    graph = torch.fx.Graph()
    graph.output(())
    gm = torch.fx.GraphModule({}, graph)
    assert amp_fx(gm, [], options={"compiler": "eager"})() == ()


def test_device_that_autocast_does_not_know(model: nn.Module) -> None:
    model.to("meta")
    result = compiled(model)(torch.empty(3, 4, device="meta"))
    assert (result.shape, result.dtype, result.device.type) == ((3, 2), f32, "meta")
    captured = capture_program(lambda x: x + 1, torch.empty(2, device="meta"))
    assert region_device_type(graph_devices(captured.gm)) is None


def test_error_of_the_model_is_the_users(x: torch.Tensor) -> None:
    def program(_: torch.Tensor) -> torch.Tensor:
        raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user"):
        compiled(program)(x)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"dtpye": bf16}, "unknown option 'dtpye'; did you mean 'dtype'"),
    "compiler": ({"compiler": "gcc"}, "'inductor', 'aot_eager', 'eager'"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_wrong_options_end_in_one_clear_error(
    model: nn.Module, x: torch.Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(Exception, match=f"(?s){message}"):
        compiled(model, **options)(x)
    assert torch.isfinite(model(x)).all()


def test_mode_and_inductor_options_pass_through(
    x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relies on ``torch._TorchCompileInductorWrapper`` calling ``compile_fx`` with them."""
    patches = []

    def compile_fx(gm: Any, _: Any, *, config_patches: dict[str, Any], **__: Any) -> Any:
        patches.append(config_patches)
        return gm.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    gm = capture_program(lambda x: x.t() @ x, x).gm
    amp_fx(gm, [x], mode="max-autotune-no-cudagraphs", options={"epilogue_fusion": False})
    assert patches[0]["max_autotune"] is True
    assert patches[0]["epilogue_fusion"] is False


def test_autocast_is_off_while_the_compiled_graph_runs(x: torch.Tensor) -> None:
    """Runs under ambient autocast, which must cast nothing that the graph does not cast."""
    nothing = preset("torch").with_device("cpu", {})
    with torch.autocast("cpu", bf16):
        result = compiled(lambda x: x.t() @ x, policy=nothing)(x)
        assert torch.is_autocast_enabled("cpu")
    assert result.dtype == f32
