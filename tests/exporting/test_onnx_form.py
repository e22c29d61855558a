"""``amp_fx.for_onnx``: what onnxruntime loads, and that it gives eager autocast's numbers.

onnxruntime leaves out roundings, so numbers are also computed node by node (``onnx_nodes``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx.errors import ArgumentTypeError

if TYPE_CHECKING:
    from pathlib import Path

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from tests.composed import Composed  # noqa: E402
from tests.exporting import onnx_nodes  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:Mismatch dtype"
)

MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "layer_norm": (
        lambda: nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 8)),
        (4, 64),
    ),
    "other_norms": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.GroupNorm(2, 8),
            nn.InstanceNorm2d(8, affine=True),
            nn.Flatten(),
            nn.RMSNorm(288),
            nn.Linear(288, 8),
        ),
        (2, 3, 8, 8),
    ),
    "attention": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 5, 16)),
}


@pytest.fixture(autouse=True)
def _no_fast_path() -> Any:
    """Eager code would take another one than any exported program."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_onnxruntime_gives_the_numbers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(1234)
    make, shape = MODELS[name]
    model, x = make().eval(), torch.randn(shape)
    with torch.no_grad():
        exact = model.double()(x.double())
        model.float()
        with torch.autocast("cpu", dtype):
            expected = model(x).float()
    program = amp_fx.export(model, (x,), dtype=dtype)
    assert_mixed = str(program.graph)
    made = torch.onnx.export(amp_fx.for_onnx(program), dynamo=True, verbose=False)
    assert str(program.graph) == assert_mixed
    assert made is not None
    made.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    [found] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    # No nearer to eager autocast than that is to the exact numbers can anyone ask for; where
    # onnxruntime rounds where PyTorch does, all but a few numbers are the same.
    error = (expected.double() - exact).abs().max()
    [by_node] = onnx_nodes.run(onnx.load(tmp_path / "model.onnx"), x)
    for result in (torch.from_numpy(found), by_node):
        assert (result - expected).abs().max() <= 2 * error
    if name != "attention":  # which has more roundings than PyTorch's kernel
        torch.testing.assert_close(by_node, expected, rtol=0, atol=0)


def test_weights_stay_low_in_the_file(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256)), torch.randn(2, 256)
    for dtype, number in ((torch.bfloat16, onnx.TensorProto.BFLOAT16), (torch.float16, 10)):
        program = amp_fx.for_onnx(amp_fx.export(model, (x,), dtype=dtype))
        made = torch.onnx.export(program, dynamo=True, verbose=False)
        assert made is not None
        made.save(tmp_path / "model.onnx")
        loaded = onnx.load(tmp_path / "model.onnx")
        [weight] = [i for i in loaded.graph.initializer if list(i.dims) == [256, 256]]
        assert weight.data_type == number
        assert (tmp_path / "model.onnx").stat().st_size < 0.6 * 256 * 256 * 4


def test_what_a_runtime_can_do_is_left_to_it() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(2, 8)
    program = amp_fx.export(model, (x,), dtype="bf16", output_dtype="autocast")
    linear, norm = torch.ops.aten.linear.default, torch.ops.aten.layer_norm.default

    def dtypes(widened: torch.export.ExportedProgram) -> list[torch.dtype]:
        nodes = {node.target: node for node in widened.graph.nodes}
        return [nodes[op].meta["val"].dtype for op in (linear, norm)]

    assert dtypes(amp_fx.for_onnx(program)) == [torch.float32, torch.float32]
    only_norms = amp_fx.for_onnx(program, without_kernels=())
    assert dtypes(only_norms) == [torch.bfloat16, torch.float32]
    torch.testing.assert_close(only_norms.module()(x), program.module()(x), rtol=1e-2, atol=1e-2)


def writes(model: Any, x: torch.Tensor) -> Any:
    """Writes a low tensor in place, which another one is a view of, and a buffer."""
    y = model.layer(x)
    row = y[0]
    y.add_(1).mul_(0.3)
    model.total.add_(row)
    return model.norm(y), row * 2, model.total + 0


def test_programs_that_write() -> None:
    members = {"norm": nn.LayerNorm(8), "layer": nn.Linear(8, 8)}
    model, x = Composed(writes, **members, total=nn.Buffer(torch.zeros(8))), torch.randn(2, 8)
    program = amp_fx.export(model, (x,), dtype="bf16")
    modules = [amp_fx.for_onnx(program).module(), program.module()]
    for _ in range(2):
        found, expected = (module(x) for module in modules)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_what_is_no_program() -> None:
    with pytest.raises(ArgumentTypeError, match=r"create one with amp_fx\.export\(model, args\)"):
        amp_fx.for_onnx(nn.Linear(2, 2))  # type: ignore[arg-type]
