"""``amp_fx.export``: what the program holds, what it leaves alone, and what it refuses."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

import amp_fx
from amp_fx.errors import ArgumentTypeError, OptionError, PolicyError, UnsupportedError
from amp_fx.exporting.program import weight_bytes
from tests.composed import Composed
from tests.exporting.oracle import saved_and_loaded
from tests.programs import compiled

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

CAST = torch.ops.aten._to_copy.default


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1234)


def square(**settings: Any) -> nn.Linear:
    return nn.Linear(8, 8, **settings)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 8)).eval()


def eager(model: nn.Module, *args: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    with torch.no_grad(), torch.autocast("cpu", dtype):
        return model(*args)


def same_bits(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def dtypes(program: ExportedProgram) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in program.state_dict.items()}


def casts_of_weights(program: ExportedProgram) -> list[str]:
    weights = {*program.graph_signature.parameters, *program.graph_signature.buffers}
    names = {**program.graph_signature.inputs_to_parameters}
    return [
        names[node.args[0].name]
        for node in program.graph.find_nodes(op="call_function", target=CAST)
        if names.get(node.args[0].name) in weights
    ]


def test_weights_that_are_read_low_take_half_the_bytes_in_a_file_too() -> None:
    model, x = mlp(), torch.randn(3, 16)
    program = amp_fx.export(model, (x,), dtype=torch.float16)
    low, full = torch.float16, torch.float32
    assert dtypes(program) == {
        "0.weight": low,
        "0.bias": low,
        "2.weight": full,
        "2.bias": full,
        "3.weight": low,
        "3.bias": low,
    }
    assert casts_of_weights(program) == []
    before = sum(p.numel() * p.itemsize for p in model.parameters())
    norms = 2 * 64 * 4
    loaded = saved_and_loaded(program)
    assert weight_bytes(program) == weight_bytes(loaded) == (before - norms) // 2 + norms
    same_bits(loaded.module()(x), eager(model, x, dtype=torch.float16).float())


def test_float32_weights_stay_with_their_casts() -> None:
    model, x = mlp(), torch.randn(3, 16)
    program = amp_fx.export(model, (x,), dtype="bf16", weights="float32")
    assert set(dtypes(program).values()) == {torch.float32}
    assert len(casts_of_weights(program)) == 4
    assert program.state_dict["0.weight"].data_ptr() == model.get_parameter("0.weight").data_ptr()
    same_bits(program.module()(x), eager(model, x).float())


@pytest.mark.parametrize("strict", [False, True])
def test_tied_weights_are_stored_once(strict: bool) -> None:
    model: Any = Composed(lambda m, x: m.b(m.a(x)), a=square(bias=False), b=square(bias=False))
    model.b.weight = model.a.weight
    program = amp_fx.export(model, (torch.randn(2, 8),), dtype="bf16", strict=strict)
    a, b = program.state_dict["a.weight"], program.state_dict["b.weight"]
    assert a.dtype == torch.bfloat16
    assert a.data_ptr() == b.data_ptr()
    assert weight_bytes(program) == 64 * 2


def test_a_weight_that_is_read_in_float32_too_stays() -> None:
    table, head = nn.Embedding(32, 8), nn.Linear(8, 32, bias=False)
    model = Composed(lambda m, tokens: m.head(m.table(tokens)), table=table, head=head)
    head.weight = table.weight
    tokens = torch.randint(32, (2, 4))
    program = amp_fx.export(model, (tokens,), dtype="bf16")
    assert dtypes(program)["head.weight"] == torch.float32
    assert casts_of_weights(program) == ["head.weight"]
    same_bits(program.module()(tokens), eager(model, tokens).float())


def test_views_of_weights_are_views_of_the_low_ones() -> None:
    def views(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = model.weight.chunk(3)
        strided = x @ model.rows[:, ::2]  # whose cast is laid out otherwise
        return x @ q.t() + x @ k.t() + x @ v.t() + strided @ model.returned, model.returned

    sizes = {"weight": (24, 8), "rows": (8, 16), "returned": (8, 8)}
    weights = {name: nn.Parameter(torch.randn(size)) for name, size in sizes.items()}
    model, x = Composed(views, **weights), torch.randn(3, 8)
    program = amp_fx.export(model, (x,), dtype="bf16", output_dtype="autocast")
    assert dtypes(program) == {
        "weight": torch.bfloat16,
        "rows": torch.float32,
        "returned": torch.float32,
    }
    same_bits(program.module()(x), eager(model, x))


def test_the_model_stays_as_it_was() -> None:
    def counts(model: Any, x: Tensor) -> Any:
        model.calls += 1
        return model.layer(x)

    model, x = Composed(counts, layer=square(), calls=nn.Buffer(torch.zeros(()))), torch.randn(2, 8)
    before = copy.deepcopy(model.state_dict())
    kind, attributes = type(model), set(vars(model))
    program = amp_fx.export(model, (x,), dtype="bf16")
    module = program.module()
    module(x)
    module(x)
    assert module.get_buffer("calls") == 2
    assert (type(model), set(vars(model)), model.training) == (kind, attributes, True)
    same_bits(dict(model.state_dict()), dict(before))
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("strict", [False, True])
def test_sizes_that_change(strict: bool) -> None:
    model = mlp()
    shapes = ({0: Dim("batch", min=2, max=32)},)
    program = amp_fx.export(
        model, (torch.randn(3, 16),), dtype="bf16", dynamic_shapes=shapes, strict=strict
    )
    for found in (program, saved_and_loaded(program)):
        x = torch.randn(7, 16)
        same_bits(found.module()(x), eager(model, x).float())
        with pytest.raises((AssertionError, RuntimeError)):
            found.module()(torch.randn(64, 16))


def test_keyword_arguments() -> None:
    model = Composed(lambda m, x, *, scale: {"y": m.layer(x) * scale}, layer=square())
    x, scale = torch.randn(2, 8), torch.randn(8)
    program = amp_fx.export(model, (x,), {"scale": scale}, dtype="bf16")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(x, scale=scale)
    same_bits(program.module()(x, scale=scale), expected)


def regions(model: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Regions of another dtype and without autocast, the former inside ``no_grad``."""
    x = model.a(x)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        y = model.b(x)
    with torch.autocast("cpu", enabled=False):
        z = model.c(x.float())
    return x, y, z


@pytest.mark.parametrize("strict", [False, True])
def test_regions_of_the_model_hold(strict: bool) -> None:
    model, x = Composed(regions, a=square(), b=square(), c=square()), torch.randn(3, 8)
    program = amp_fx.export(model, (x,), dtype="bf16", output_dtype="autocast", strict=strict)
    first = int(strict)  # strict capture takes the first output for the same as its ``float()``
    same_bits(program.module()(x)[first:], eager(model, x)[first:])
    found = dtypes(program)
    assert found["a.weight"] == torch.bfloat16
    assert found["b.weight"] == torch.float16
    assert found["c.weight"] == torch.float32
    original = amp_fx.export(model, (x,), dtype="bf16", strict=strict).module()(x)
    assert [y.dtype for y in original] == [torch.float32, torch.float16, torch.float32]


def test_the_region_around_the_call_holds() -> None:
    model, x = mlp(), torch.randn(3, 16)
    with torch.autocast("cpu", torch.float16):
        program = amp_fx.export(model, (x,), dtype="bf16")
    same_bits(program.module()(x), eager(model, x, dtype=torch.float16))
    with torch.autocast("cpu", enabled=False):
        program = amp_fx.export(model, (x,), dtype="bf16")
    same_bits(program.module()(x), model(x))


def test_a_policy_by_module_and_by_region() -> None:
    model, x = mlp(), torch.randn(3, 16)
    policy = amp_fx.preset("torch").with_modules({"3": "fp32"})
    program = amp_fx.export(model, (x,), dtype="bf16", policy=policy)
    assert dtypes(program)["0.weight"] == torch.bfloat16
    assert dtypes(program)["3.weight"] == torch.float32
    with torch.no_grad(), amp_fx.autocast("cpu", torch.bfloat16, policy=policy):
        expected = compiled(model)(x)
        program = amp_fx.export(model, (x,))
    same_bits(program.module()(x), expected)


def test_of_a_compiled_model_what_was_compiled() -> None:
    model, x = mlp(), torch.randn(3, 16)
    program = amp_fx.export(amp_fx.compile(model, dtype="fp16"), (x,))
    assert dtypes(program)["0.weight"] == torch.float16
    same_bits(program.module()(x), eager(model, x, dtype=torch.float16).float())


def written() -> Any:
    """Writes a buffer that it reads, and has one that it only reads, and a constant."""

    def forward(model: Any, x: Tensor) -> Any:
        model.state.lerp_((x.mT @ x).float(), 0.5)
        model.last.copy_(model.layer(x))
        return model.layer(x) @ model.state.clone() @ model.mask @ model.constant

    model = Composed(forward, layer=square(), constant=torch.randn(8, 8))
    model.register_buffer("state", torch.zeros(8, 8))
    model.register_buffer("last", torch.zeros(3, 8))
    model.register_buffer("mask", torch.randn(8, 8), persistent=False)
    return model


@pytest.mark.parametrize("is_decomposed", [False, True])
@pytest.mark.parametrize("is_ambient", [False, True])
def test_an_exported_program_is_rewritten(is_decomposed: bool, is_ambient: bool) -> None:
    model, x = written(), torch.randn(3, 8)
    given = torch.export.export(copy.deepcopy(model), (x,))
    if is_decomposed:
        given = given.run_decompositions()
    text = str(given.graph)
    if is_ambient:
        with torch.autocast("cpu", torch.bfloat16):
            program = amp_fx.export(given)
    else:
        program = amp_fx.export(given, dtype="bf16")
    assert str(given.graph) == text
    module = saved_and_loaded(program).module()
    expected = eager(model, x)
    same_bits(module(x), expected if is_ambient else expected.float())
    buffers = dict(module.named_buffers())
    same_bits((buffers["state"], buffers["last"]), (model.state, model.last))
    assert {name: t.dtype for name, t in program.constants.items()} == {
        "mask": torch.bfloat16,
        "constant": torch.bfloat16,
    }


def test_written_buffers_keep_their_dtype() -> None:
    def adds(model: Any, x: Tensor) -> Any:
        model.state.addmm_(x.mT, x)
        return x @ model.state

    x = torch.randn(3, 8)
    given = torch.export.export(
        Composed(adds, state=nn.Buffer(torch.zeros(8, 8))), (x,)
    ).run_decompositions()
    with torch.autocast("cpu", torch.bfloat16):
        program = amp_fx.export(given)
    state, y = program.graph.output_node().args[0]
    assert (state.meta["val"].dtype, y.meta["val"].dtype) == (torch.float32, torch.bfloat16)
    assert program.module()(x).dtype == torch.bfloat16


def test_a_program_that_has_casts_of_weights_is_stored_low() -> None:
    def around(model: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model.inner(x)

    model, x = Composed(around, inner=mlp()), torch.randn(3, 16)
    native = torch.export.export(model, (x,)).run_decompositions()
    program = amp_fx.export(native, output_dtype="autocast")
    assert dtypes(program)["inner.0.weight"] == torch.bfloat16
    same_bits(program.module()(x), native.module()(x))


def branches(model: Any, x: Tensor) -> Any:
    return model.c(torch.cond(x.sum() > 0, lambda v: model.a(v) + model.c(v), model.b, (x,)))


def test_weights_of_branches_are_stored_low() -> None:
    model = Composed(branches, a=square(), b=square(), c=square())
    program = amp_fx.export(model, (torch.ones(2, 8),), dtype="bf16")
    assert set(dtypes(program).values()) == {torch.bfloat16}
    [cond] = program.graph.find_nodes(op="call_function", target=torch.ops.higher_order.cond)
    for body in (program.graph_module.get_submodule(str(arg.target)) for arg in cond.args[1:3]):
        assert isinstance(body, fx.GraphModule)
        inputs = [node.meta["val"].dtype for node in body.graph.find_nodes(op="placeholder")]
        assert inputs == [node.meta["val"].dtype for node in cond.args[3]]
    for x in (torch.rand(2, 8), -torch.rand(2, 8)):
        same_bits(saved_and_loaded(program).module()(x), eager(model, x).float())


@torch.library.custom_op("amp_fx_export_tests::scale", mutates_args=())
def scale(x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() * weight.float()).to(x.dtype)


@scale.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(x)


@torch.library.custom_op("amp_fx_export_tests::bump", mutates_args=("x",))
def bump(x: Tensor, y: Tensor) -> None:
    x.add_(y.float().sum())


@pytest.mark.parametrize("is_decomposed", [False, True])
def test_custom_ops_run_as_in_eager_autocast(is_decomposed: bool) -> None:
    """A program that was captured elsewhere gets the mixed inputs of custom ops in float32."""

    def custom(model: Any, x: Tensor) -> Any:
        y = model.layer(x)
        y = scale(y.float() if model.gets_float32 else y, model.weight)
        bump(model.total, y)
        return model.layer(y) + model.total

    weight, total = nn.Parameter(torch.randn(8)), nn.Buffer(torch.zeros(8))
    model: Any = Composed(custom, layer=square(), weight=weight, total=total, gets_float32=False)
    x = torch.randn(3, 8)
    given: Any = copy.deepcopy(model)
    program = amp_fx.export(given, (x,), dtype="bf16")
    if is_decomposed:
        given = torch.export.export(given, (x,)).run_decompositions()
        program = amp_fx.export(given, dtype="bf16")
    model.gets_float32 = is_decomposed
    same_bits(program.module()(x), eager(model, x).float())
    assert dtypes(program)["weight"] == torch.float32


def test_a_transform_is_refused_with_its_name_and_the_way_around_it() -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = square()

        def forward(self, x: Tensor) -> Any:
            return torch.vmap(self.layer)(x)

    model, x = Mapped(), torch.randn(3, 8)
    with pytest.raises(
        UnsupportedError, match=r"%_vmap_increment_nesting.*test_export.py:\d+"
    ) as found:
        amp_fx.export(model, (x,))
    assert "run_decompositions({})" in str(found.value)
    resolved = torch.export.export(model, (x,)).run_decompositions({})
    assert dtypes(amp_fx.export(resolved))["layer.weight"] == torch.bfloat16


def test_an_opaque_node_is_rejected_with_its_name() -> None:
    from torch._higher_order_ops.while_loop import while_loop

    def loop(model: Any, x: Tensor) -> Any:
        body = lambda i, v: (i + 1, model.layer(v).float())  # noqa: E731
        return while_loop(lambda i, _: i < 3, body, (torch.zeros(()), x))  # type: ignore[no-untyped-call]

    with pytest.raises(UnsupportedError, match=r"%while_loop.*higher-order op.*enabled=False"):
        amp_fx.export(Composed(loop, layer=square()), (torch.randn(3, 8),))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x: amp_fx.export(m, (x,), dtype="int8"), "not a dtype to autocast to"),
        (lambda m, x: amp_fx.export(m, (x,), weights="half"), "'low', 'float32'"),
        (lambda m, x: amp_fx.export(m, (x,), output_dtype="low"), "'original', 'autocast'"),
        (lambda m, x: amp_fx.export(m, (x,), policy="none"), "there is no preset 'none'"),
        (lambda _, x: amp_fx.export(torch.relu, (x,)), "a torch.nn.Module or an exported program"),  # type: ignore[arg-type]
        (
            amp_fx.export,
            r"^the example inputs must be a tuple.*: write amp_fx.export\(model, \(x,\)\)",
        ),
        (
            lambda m, x: amp_fx.export(torch.export.export(m, (x,)), (x,)),
            "do not apply to an exported program",
        ),
    ],
)
def test_wrong_arguments(call: Callable[..., Any], message: str) -> None:
    with pytest.raises((ArgumentTypeError, OptionError, PolicyError), match=message):
        call(mlp(), torch.randn(3, 16))


def test_sizes_of_interpolation_that_are_dynamic() -> None:
    def resize(model: Any, x: Tensor) -> Any:
        size = (x.shape[2] * 2, x.shape[3] * 2)
        return model.conv(nn.functional.interpolate(x, size, mode="bilinear"))

    model = Composed(resize, conv=nn.Conv2d(3, 4, 3)).eval()
    sizes = {2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    program = amp_fx.export(model, (torch.randn(1, 3, 8, 9),), dynamic_shapes={"x": sizes})
    x = torch.randn(1, 3, 6, 7)
    assert torch.equal(program.module()(x), eager(model, x).float())
