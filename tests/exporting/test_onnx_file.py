"""``to_onnx`` and ``for_onnx``: files that are valid, with the numbers of eager autocast.

Numbers are checked node by node (``onnx_nodes``), since onnxruntime leaves out roundings.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx.errors import ArgumentTypeError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.export import ExportedProgram

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from tests.composed import Composed  # noqa: E402
from tests.exporting import onnx_nodes  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
    "ignore:Mismatch dtype",
    "ignore:The tensor attributes self.network._flat_weights",
)
LOW = (torch.float16, torch.bfloat16)
NUMBERS = {torch.float16: onnx.TensorProto.FLOAT16, torch.bfloat16: onnx.TensorProto.BFLOAT16}
DEVICES = ("cpu", "cuda")
REASON = "amp_fx.reason"


@pytest.fixture(autouse=True)
def _seed() -> Any:
    torch.manual_seed(1234)
    torch.backends.mha.set_fastpath_enabled(False)  # eager code would take another path
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def written(program: ExportedProgram, folder: Path, target: str = "tensorrt") -> Any:
    """Returns the file of a program, which is valid: one float type per type variable."""
    path = amp_fx.to_onnx(program, folder / "model.onnx", target=target)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    return model


def assert_same_numbers(
    program: ExportedProgram, x: Tensor, folder: Path, target: str = "tensorrt", atol: float = 0
) -> Any:
    """Fails unless a program's file has its numbers; returns the file."""
    file = written(program, folder, target)
    [found] = onnx_nodes.run(file, x)
    torch.testing.assert_close(found, program.module()(x), rtol=atol and 1e-6, atol=atol)
    return file


def ops(model: Any) -> collections.Counter[str]:
    return collections.Counter(node.op_type for node in model.graph.node)


def with_statistics(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.uniform_(-1, 1)
            module.running_var.uniform_(0.5, 2)
    return model.eval()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 10))


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.GroupNorm(2, 8),
        nn.Flatten(),
        nn.Linear(128, 8),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (4, 64)),
    "convolutions": (convolutions, (2, 3, 8, 8)),
}
FORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **MODELS,
    "other_norms": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.InstanceNorm2d(8, affine=True),
            nn.Flatten(),
            nn.RMSNorm(288),
            nn.Linear(288, 8),
        ),
        (2, 3, 8, 8),
    ),
    "attention": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 5, 16)),
}
"""Models that are written for onnxruntime."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("target", ["tensorrt", "onnxruntime"])
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("device_type", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_bits_of_the_program(
    name: str, device_type: str, dtype: torch.dtype, target: str, tmp_path: Path
) -> None:
    make, shape = MODELS[name]
    model, x = with_statistics(make()), torch.randn(shape)
    program = amp_fx.export(model, (x,), device_type=device_type, dtype=dtype)
    assert_same_numbers(program, x, tmp_path, target)
    if device_type == "cpu":
        with torch.no_grad(), torch.autocast("cpu", dtype):
            expected = model(x).float()
        torch.testing.assert_close(program.module()(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("device_type", DEVICES)
def test_products_are_low_for_tensorrt(
    device_type: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    x = torch.randn(2, 3, 8, 8)
    program = amp_fx.export(convolutions().eval(), (x,), device_type=device_type, dtype=dtype)
    model = written(program, tmp_path)
    assert model.opset_import[0].version >= 22
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    types = {v.name: v.type.tensor_type.elem_type for v in inferred.graph.value_info}
    products = [n for n in model.graph.node if n.op_type in ("Conv", "Gemm")]
    assert {types[node.output[0]] for node in products} == {NUMBERS[dtype]}
    ends = [*model.graph.input, *model.graph.output]
    assert {end.type.tensor_type.elem_type for end in ends} == {onnx.TensorProto.FLOAT}
    weights = {i.data_type for i in model.graph.initializer if len(i.dims) > 1}
    assert weights == {NUMBERS[dtype]}


@pytest.mark.parametrize("dtype", LOW)
def test_batch_norms_need_no_casts(dtype: torch.dtype, tmp_path: Path) -> None:
    model = convolutions()[:5]
    program = amp_fx.export(model.eval(), (torch.randn(2, 3, 8, 8),), dtype=dtype)
    assert ops(written(program, tmp_path)) == {
        "Cast": 2,
        "Conv": 2,
        "BatchNormalization": 2,
        "Relu": 1,
    }


def wider(op: Callable[[Tensor], Tensor]) -> nn.Module:
    """Returns an op that computes in float32 of a low input."""
    return Composed(lambda m, x: op(m.layer(x) * 8), layer=nn.Linear(8, 64))


def rotary(model: Any, x: Tensor) -> Any:
    """Attention with rotated queries and a float32 residual stream."""
    q = model.query(model.norm(x))
    rotated = torch.cat([-q[..., 4:], q[..., :4]], -1)
    q = q * model.angles.cos() + rotated * model.angles.sin()
    return x + torch.softmax(q @ q.mT, -1) @ q


def images(model: Any, x: Tensor) -> Any:
    """Images as sequences, and resized images."""
    y = model.out(nn.functional.interpolate(model.conv(x), scale_factor=2.0))
    sequence = model.norm(y.flatten(2).mT)
    resized = model.out(sequence.mT.reshape(y.shape))
    return model.linear(sequence) + resized.flatten(2).mT


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(("name", "num_casts"), [("rotary", 6), ("images", 4)])
def test_no_cast_is_superfluous(
    name: str, num_casts: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Computing any op in the other dtype of a cast would save none, or change its bits."""
    if name == "rotary":
        members: Any = {"query": nn.Linear(8, 8), "angles": nn.Parameter(torch.randn(4, 8))}
        model, x = Composed(rotary, norm=nn.LayerNorm(8), **members), torch.randn(2, 4, 8)
    else:
        members = {"conv": nn.Conv2d(3, 8, 3, padding=1), "out": nn.Conv2d(8, 8, 1)}
        model = Composed(images, norm=nn.LayerNorm(8), linear=nn.Linear(8, 8), **members)
        x = torch.randn(2, 3, 4, 4)
    program = amp_fx.export(model.eval(), (x,), device_type="cuda", dtype=dtype)
    assert ops(written(program, tmp_path))["Cast"] == num_casts


WIDER: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: torch.softmax(x, -1, dtype=torch.float32),
    "log_softmax": lambda x: torch.log_softmax(x, -1, dtype=torch.float32),
    "mean": lambda x: x.mean(-1, dtype=torch.float32),
    "sum": lambda x: x.sum(-1, dtype=torch.float32),
    "sum_of_all": lambda x: x.sum(dtype=torch.float32),
    "prod": lambda x: (x / 8).prod(-1, dtype=torch.float32),
    "cumsum": lambda x: x.cumsum(-1, dtype=torch.float32),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("target", ["tensorrt", "onnxruntime"])
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", WIDER)
def test_a_wider_dtype_is_a_cast_before_the_op(
    name: str, dtype: torch.dtype, target: str, tmp_path: Path
) -> None:
    model, x = wider(WIDER[name]), torch.randn(4, 8)
    program = amp_fx.export(model, (x,), dtype=dtype, output_dtype="autocast")
    [found] = onnx_nodes.run(written(program, tmp_path, target), x)
    with torch.no_grad(), torch.autocast("cpu", dtype):
        expected = model(x)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", LOW)
def test_ops_that_have_no_bfloat16_in_onnx(dtype: torch.dtype, tmp_path: Path) -> None:
    model, x = wider(lambda y: torch.topk(y, 3)[0] + torch.sort(y)[0][..., :3]), torch.randn(4, 8)
    assert_same_numbers(amp_fx.export(model, (x,), dtype=dtype), x, tmp_path)


@pytest.mark.parametrize("op", [torch.cat, torch.stack])
@pytest.mark.parametrize("device_type", DEVICES)
def test_lists_of_different_dtypes(device_type: str, op: Any, tmp_path: Path) -> None:
    def joined(model: Any, x: Tensor) -> Any:
        y = model.layer(x)
        return op([y, model.norm(y), x])

    model, x = Composed(joined, layer=nn.Linear(8, 8), norm=nn.LayerNorm(8)), torch.randn(2, 8)
    program = amp_fx.export(model, (x,), device_type=device_type, dtype=torch.float16)
    assert_same_numbers(program, x, tmp_path, atol=1e-6)


@pytest.mark.parametrize("device_type", DEVICES)
def test_a_policy_with_float32_results(device_type: str, tmp_path: Path) -> None:
    model, x = mlp(), torch.randn(4, 64)
    policy = amp_fx.preset("torch").with_modules({"0": "lower_precision_wide"})
    program = amp_fx.export(
        model, (x,), device_type=device_type, dtype=torch.float16, policy=policy
    )
    file = assert_same_numbers(program, x, tmp_path, atol=1e-7)
    assert ops(file)["MatMul"] == 1
    weight = model[0].get_parameter("weight").half().float()
    product = x.half().float() @ weight.mT
    values, _ = onnx_nodes.values(file, x)
    assert any(
        v.dtype == torch.float32 and v.shape == product.shape and torch.allclose(v, product)
        for v in values.values()
    )


def test_an_overflow_is_seen(tmp_path: Path) -> None:
    """Onnxruntime computes float16 in float32 on the CPU, and sees no overflow."""
    model = Composed(lambda m, x: m.layer(x) * 6e4 * 6e4 * 1e-9, layer=nn.Linear(8, 8))
    x = torch.randn(2, 8)
    program = amp_fx.export(model, (x,), dtype=torch.float16)
    [found] = onnx_nodes.run(written(program, tmp_path), x)
    assert not program.module()(x).isfinite().any()
    assert not found.isfinite().any()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "settings", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}]
)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    ("kind", "device_type"), [("LSTM", "cpu"), ("LSTM", "cuda"), ("GRU", "cuda")]
)
def test_recurrent_networks_are_one_op_per_layer(
    kind: str, device_type: str, dtype: torch.dtype, settings: dict[str, Any], tmp_path: Path
) -> None:
    network = getattr(nn, kind)(8, 16, **settings)
    layer = nn.Linear(32 if "bidirectional" in settings else 16, 4)
    model = Composed(lambda m, x: m.layer(m.network(x)[0]), network=network, layer=layer).eval()
    x = torch.randn(5, 3, 8)
    program = amp_fx.export(model, (x,), device_type=device_type, dtype=dtype)
    file = written(program, tmp_path)
    assert ops(file)[kind] == settings.get("num_layers", 1)
    [found] = onnx_nodes.run(file, x)
    with torch.no_grad():
        exact = model.double()(x.double())
    error = (program.module()(x) - exact).abs().max()
    assert (found - exact).abs().max() <= 2 * error


def test_weights_that_require_gradients(tmp_path: Path) -> None:
    """torch.onnx traces with gradients on, where attention with such a mask has other strides."""

    def biased(model: Any, x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:2], 2, 4).transpose(1, 2)
        distance = torch.arange(8)[:, None] - torch.arange(8)
        bias = model.table(distance.abs()).permute(2, 0, 1).unsqueeze(0)
        y = nn.functional.scaled_dot_product_attention(heads, heads, heads, bias)
        return y.transpose(1, 2).reshape(*x.shape)

    model = Composed(biased, table=nn.Embedding(8, 2)).eval()  # read in float32, as that of T5
    x = torch.randn(2, 8, 8)
    program = amp_fx.export(model, (x,), dtype=torch.float16)
    form = amp_fx.for_onnx(program)
    values = [node.meta["val"] for node in form.graph.find_nodes(op="placeholder")]
    assert not any(t.requires_grad for t in (*form.parameters(), *values))
    assert all(parameter.requires_grad for parameter in model.parameters())
    [found] = onnx_nodes.run(written(program, tmp_path), x)
    torch.testing.assert_close(found, program.module()(x), rtol=1e-2, atol=1e-2)


def test_names_and_reasons(tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, pixels: Tensor, scale: Tensor) -> dict[str, Any]:
            y = self.layer(pixels)
            return {"logits": y.softmax(-1), "hidden": [y, y * scale], "scale": scale + 1}

    inputs = torch.randn(2, 8), torch.randn(8)
    program = amp_fx.export(Named(), inputs, device_type="cuda", dtype=torch.float16)
    file = written(program, tmp_path)
    assert [value.name for value in file.graph.input] == ["pixels", "scale"]
    outputs = [value.name for value in file.graph.output]
    assert outputs == ["logits", "hidden_0", "hidden_1", "scale_output"]
    reasons = {
        node.op_type: prop.value
        for node in file.graph.node
        for prop in node.metadata_props
        if prop.key == REASON
    }
    assert set(reasons) == set(ops(file))
    assert reasons["Gemm"].startswith("linear: lower_precision_fp (cuda table)")
    assert "softmax.int: fp32_set_opt_dtype" in reasons["Softmax"]
    metadata = {prop.key: prop.value for prop in file.metadata_props}
    assert metadata["amp_fx.region"] == "cuda float16, policy 'torch'"


def test_a_program_from_a_file_has_no_reasons(tmp_path: Path) -> None:
    program = amp_fx.export(mlp(), (x := torch.randn(4, 64),), dtype=torch.float16)
    torch.export.save(program, tmp_path / "model.pt2")
    file = assert_same_numbers(torch.export.load(tmp_path / "model.pt2"), x, tmp_path)
    assert not any(p.key == REASON for node in file.graph.node for p in node.metadata_props)
    assert [value.name for value in file.graph.output] == ["output"]  # the only one


def test_wrong_arguments(tmp_path: Path) -> None:
    program = amp_fx.export(mlp(), (torch.randn(4, 64),), dtype=torch.float16)
    with pytest.raises(OptionError, match=r"'tensorrt'.*did you mean"):
        amp_fx.to_onnx(program, tmp_path / "model.onnx", target="tensort")
    with pytest.raises(OptionError, match=r"must end in \.onnx"):
        amp_fx.to_onnx(program, tmp_path / "model.pt2")
    with pytest.raises(OptionError, match="in an existing folder"):
        amp_fx.to_onnx(program, tmp_path / "nowhere" / "model.onnx")
    with pytest.raises(ArgumentTypeError, match="expects an exported program"):
        amp_fx.to_onnx(mlp(), tmp_path / "model.onnx")  # type: ignore[arg-type]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", LOW)
def test_folded_batch_norms(dtype: torch.dtype, has_bias: bool, tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=has_bias),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=2, bias=has_bias),
        nn.BatchNorm2d(8),
    )
    with_statistics(model)
    before, x = model.state_dict(), torch.randn(2, 3, 8, 8)
    program = amp_fx.export(model, (x,), dtype=dtype, fold_batch_norm=True)
    file = written(program, tmp_path)
    assert ops(file) == {"Cast": 2, "Conv": 2, "Relu": 1}
    with torch.no_grad():
        low = nn.Sequential(
            nn.utils.fuse_conv_bn_eval(model[0], model[1]),  # type: ignore[arg-type, type-var]
            nn.ReLU(),
            nn.utils.fuse_conv_bn_eval(model[3], model[4]),  # type: ignore[arg-type, type-var]
        ).to(dtype)
        expected = low(x.to(dtype)).float()
    [found] = onnx_nodes.run(file, x)
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-2)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_batch_norms_that_cannot_be_folded(tmp_path: Path) -> None:
    def kept(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = model.conv(x)
        return model.last(model.back(model.norm(y) + y)), model.wide(model.large(x))

    convolutions = {name: nn.Conv2d(3, 3, 1) for name in ("conv", "large")}
    norms = {name: nn.BatchNorm2d(3) for name in ("norm", "wide", "last")}
    model: Any = Composed(kept, **convolutions, **norms, back=nn.ConvTranspose2d(3, 3, 1)).eval()
    x = torch.randn(2, 3, 4, 4)
    model.wide.running_var.fill_(1e-12)
    model.wide.eps = 1e-12
    programs = [
        amp_fx.export(model, (x,), dtype=torch.float16, fold_batch_norm=folds)
        for folds in (True, False)
    ]
    files = [written(program, tmp_path) for program in programs]
    assert ops(files[0]) == ops(files[1])
    torch.testing.assert_close(programs[0].module()(x), programs[1].module()(x), rtol=0, atol=0)


@pytest.mark.parametrize(("preset", "name"), [("head", "lm_head"), ("router", "router")])
def test_presets_with_float32_results(preset: str, name: str, tmp_path: Path) -> None:
    model, x = nn.Sequential(), torch.randn(4, 8)
    model.add_module("first", nn.Linear(8, 8))
    model.add_module(name, nn.Linear(8, 4))
    program = amp_fx.export(
        model.eval(), (x,), device_type="cuda", dtype=torch.float16, policy=preset
    )
    file = assert_same_numbers(program, x, tmp_path, atol=1e-7)
    assert ops(file)["Gemm"] == ops(file)["MatMul"] == 1


def test_large_weights_are_in_a_second_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.onnx._internal.exporter import _onnx_program

    monkeypatch.setattr(_onnx_program, "_LARGE_MODEL_THRESHOLD", 1000)
    program = amp_fx.export(mlp(), (x := torch.randn(4, 64),), dtype=torch.bfloat16)
    assert_same_numbers(program, x, tmp_path)
    assert (tmp_path / "model.onnx.data").stat().st_size > 64 * 128 * 2


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", FORMS)
def test_onnxruntime_gives_the_numbers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make, shape = FORMS[name]
    model, x = make().eval(), torch.randn(shape)
    with torch.no_grad():
        exact = model.double()(x.double())
        model.float()
        with torch.autocast("cpu", dtype):
            expected = model(x).float()
    program = amp_fx.export(model, (x,), dtype=dtype)
    before = str(program.graph)
    file = written(program, tmp_path, "onnxruntime")
    assert str(program.graph) == before
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    [found] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    # No nearer to eager autocast than that is to the exact numbers can anyone ask for; where
    # onnxruntime rounds where PyTorch does, all but a few numbers are the same.
    error = (expected.double() - exact).abs().max()
    [by_node] = onnx_nodes.run(file, x)
    for result in (torch.from_numpy(found), by_node):
        assert (result - expected).abs().max() <= 2 * error
    if name != "attention":  # which has more roundings than PyTorch's kernel
        torch.testing.assert_close(by_node, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", LOW)
def test_weights_stay_low_in_the_file(dtype: torch.dtype, tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256)), torch.randn(2, 256)
    file = written(amp_fx.export(model, (x,), dtype=dtype), tmp_path, "onnxruntime")
    [weight] = [i for i in file.graph.initializer if list(i.dims) == [256, 256]]
    assert weight.data_type == NUMBERS[dtype]
    assert (tmp_path / "model.onnx").stat().st_size < 0.6 * 256 * 256 * 4


def test_what_a_runtime_can_do_is_left_to_it() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(2, 8)
    program = amp_fx.export(model, (x,), dtype="bf16", output_dtype="autocast")
    linear, norm = torch.ops.aten.linear.default, torch.ops.aten.layer_norm.default

    def dtypes(widened: ExportedProgram) -> list[torch.dtype]:
        nodes = {node.target: node for node in widened.graph.nodes}
        return [nodes[op].meta["val"].dtype for op in (linear, norm)]

    assert dtypes(amp_fx.for_onnx(program)) == [torch.float32, torch.float32]
    only_norms = amp_fx.for_onnx(program, without_kernels=())
    assert dtypes(only_norms) == [torch.bfloat16, torch.float32]
    torch.testing.assert_close(only_norms.module()(x), program.module()(x), rtol=1e-2, atol=1e-2)


def writes(model: Any, x: Tensor) -> Any:
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
