"""``numerics="eager"``: code of inductor has the bits of eager ``torch.autocast``.

The oracle is the eager program. Outputs, gradients and all state after the run are compared bit
for bit. The models are those of ``tests.parity``, which tests them with the inner compiler "eager".
Programs of several graphs whose bits differ are compared with eager casts in each graph.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import amp_fx
from amp_fx.backend import numerics
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.errors import OptionError
from amp_fx.passes.keep_eager_kernels import needs_kernel
from tests import needs
from tests.parity import oracle
from tests.parity.cases import CASES
from tests.parity.families import CASES as ALL
from tests.parity.oracle import Way
from tests.programs import assert_same_bits, run_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

assert ALL is CASES
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a C++ compiler"),
]

TRAINING = {
    "aliases_stay_aliases": "AOTAutograd makes outputs views of one, whose gradients add up first",
    "dynamic_decoder": "inductor adds up the gradient of an embedding in another order",
    "gradient_penalty": "AOTAutograd does not differentiate twice",
    "two_calls_in_one_region": "each call casts its weights: their gradients add up in float32",
    "vmap": "the batched product of a weight's gradient is another one in AOTAutograd's graph",
    "vmap_of_shared_weight_only": "as vmap",
}
INFERENCE = {
    "flex_attention_in_eval": "inductor has a kernel of its own, eager code a sum of parts"
}
"""By case, why it has other bits."""
FAST = {
    "activation_checkpoint",
    "aliasing_outputs",
    "backward_inside_the_region",
    "complex_numbers",
    "cond",
    "graph_break_in_the_middle",
}
FAST_IN_INFERENCE = {"aliasing_outputs", "complex_numbers", "cond", "graph_break_in_the_middle"}
"""Cases that compile quickly: they are not slow."""


def cases(exceptions: dict[str, str], fast: set[str]) -> list[Any]:
    found = []
    for name, case in CASES.items():
        if Way.AMBIENT in case.ways:
            why = exceptions.get(name)
            marks = [pytest.mark.xfail(strict=True, reason=why)] if why else []
            marks += [] if name in fast else [pytest.mark.slow]
            found.append(pytest.param(name, marks=marks, id=name))
    return found


def compiled(program: Any, *, options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    options = {"numerics": "eager", **(options or {})}
    return torch.compile(program, backend="amp_fx", options=options, **kwargs)


def check(name: str, context: Callable[[], Any], *, differentiate: bool) -> None:
    chosen = CASES[name]

    def run(wrap: Callable[[Any], Any]) -> oracle.Result:
        torch.manual_seed(oracle.SEED)
        subject = chosen.build()
        with context():
            return oracle.run(subject, torch.bfloat16, wrap, differentiate=differentiate)

    try:
        expected = run(lambda program: program)
    except RuntimeError as error:
        pytest.skip(f"eager code cannot do that: {error}")
    oracle.reset()
    actual = run(lambda program: compiled(program, **chosen.compile_options))
    found = oracle.difference(expected, actual)
    if found is not None and not oracle.is_one_graph():
        # A weight gets its gradients from each graph in float32.
        oracle.reset()
        reference = functools.partial(
            oracle.compile_reference, way=Way.AMBIENT, dtype=torch.bfloat16
        )
        expected = run(functools.partial(reference, **chosen.compile_options))
        found = oracle.difference(expected, actual)
    assert found is None, found


@pytest.mark.parametrize("name", cases(TRAINING | INFERENCE, FAST))
def test_training_has_the_bits_of_eager_code(name: str) -> None:
    check(name, contextlib.nullcontext, differentiate=True)


@pytest.mark.parametrize("name", cases(INFERENCE, FAST_IN_INFERENCE))
def test_inference_has_the_bits_of_eager_code(name: str) -> None:
    check(name, torch.no_grad, differentiate=False)


def test_steps_with_float16_and_a_scaler_have_the_bits_of_eager_code() -> None:
    def train(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 8))
        called = wrap(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = amp_fx.GradScaler("cpu", init_scale=2.0**10)
        for _ in range(4):
            for _ in range(2):
                with torch.autocast("cpu", torch.float16):
                    y = called(torch.randn(16, 32))
                    loss = functional.cross_entropy(y, torch.randint(8, (16,)))
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    pairs = zip(train(lambda model: model), train(compiled), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@needs.PACKING
def test_frozen_graphs_round_as_strict_native_ones() -> None:
    """An activation in oneDNN's kernel would be computed before the product is rounded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh()).eval()
    x = torch.randn(8, 64)
    amp_fx.weight_cache.clear()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        strict = torch.compile(model, backend="amp_fx", options={"numerics": "strict"})
        assert torch.equal(strict(x), expected)
        assert not torch.equal(torch.compile(model, backend="amp_fx")(x), expected)
    assert amp_fx.weight_cache.stats().bytes > 0  # and it is frozen


@pytest.mark.parametrize(
    ("layer", "size", "is_dynamic"),
    [
        (nn.Linear(257, 1000), (8, 257), True),
        (nn.Conv2d(16, 8, 3, groups=4), (1, 16, 12, 9), False),
    ],
    ids=["linear of a dynamic batch", "convolution"],
)
@torch.no_grad()
def test_float32_layers_beside_low_ones(
    layer: nn.Module, size: tuple[int, ...], is_dynamic: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(size)
    model = nn.Sequential(nn.Linear(size[-1], size[-1]), layer)
    policy = amp_fx.Policy.default("cpu").with_modules({"1": "fp32"})
    with torch.autocast("cpu"):
        hidden = model[0](x)
    expected = layer(hidden.float())
    options: dict[str, Any] = {"numerics": "eager", "policy": policy}
    program = torch.compile(model, backend="amp_fx", dynamic=is_dynamic, options=options)
    assert torch.equal(program(x), expected)


@pytest.mark.parametrize("verify", ["sample", "full"])
@torch.no_grad()
def test_float32_products_beside_low_ones(verify: str) -> None:
    """MKL's packed weights make other sums than ATen, for rows and sizes of all kinds."""
    torch.manual_seed(0)
    sizes = [(1, 64), (3, 8), (4, 16), (4, 768), (7, 100), (32, 64), (100, 384)]
    layers = nn.ModuleList(
        nn.Linear(depth, columns, bias=bias)
        for _, depth in sizes
        for columns in (1, 16, 100)
        for bias in (False, True)
    )
    inputs = [torch.randn(size) for size in sizes for _ in range(6)]
    low = nn.Linear(8, 8)

    def program(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.autocast("cpu", enabled=False):
            results = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return [*results, low(inputs[6])]

    expected = program(inputs)
    call = compiled(program, options={"verify": verify})
    for _ in range(2):
        torch.testing.assert_close(call(inputs), expected, rtol=0, atol=0)


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("size", [(8,), (1, 8), (1, 1, 8), (2, 1, 8)])
@torch.no_grad()
def test_layers_of_vectors_and_single_rows(size: tuple[int, ...], *, is_dynamic: bool) -> None:
    layer, other = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return layer(x), other(layer(x)).sin(), layer(x).flatten(), layer(x.flatten()[:8])

    x = torch.randn(size)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = program(x)
        found = compiled(program, dynamic=is_dynamic)(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@needs.FROZEN_GRAPHS
@pytest.mark.parametrize("activation", [torch.relu, functional.relu6, functional.hardsigmoid])
@torch.no_grad()
def test_activations_of_packed_products_keep_nan(activation: Callable[..., Any]) -> None:
    """With other numerics, oneDNN's kernels compute these activations and may return numbers."""
    conv, linear = nn.Conv2d(8, 16, 3), nn.Linear(64, 80)
    images, rows = torch.randn(3, 8, 9, 9), torch.randn(500, 64)
    images[1], rows[1] = torch.nan, -torch.nan

    def program(images: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return activation(conv(images)), activation(linear(rows))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = compiled(program)(images, rows)
        for result, expected in zip(results, program(images, rows), strict=True):
            assert torch.equal(result.isnan(), expected.isnan())


def added_into(x: torch.Tensor, weight: torch.Tensor, index: torch.Tensor) -> Any:
    """Inductor reuses the memory of what an op that it calls wrote in place."""
    y = x @ weight
    out = x.new_zeros(8, 16)
    out.index_put_((index,), (y.float() * 2)[index], accumulate=True)
    return out, y.gather(1, index[:, None]), torch.where(y > 0, y, x), y.sort(-1).values


def strided(x: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> Any:
    """Kernels compute numbers with gaps between them one by one, and contiguous ones in vectors."""
    gaps, repeated = (x * 2)[..., ::2], (x[:, :1] * 2).expand(64, 96)
    ops = (torch.norm, functional.gelu, functional.silu, lambda x: x.norm(dim=1))
    return *[op(value) for op in ops for value in (gaps, repeated)], rows.mT @ weight.t()


def in_vectors(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Bits do not depend on which elements vector code computes."""
    functions = (torch.sigmoid, torch.log1p, torch.expm1, torch.lgamma, functional.softplus)
    return [*(f(x) for f in functions), torch.exp2(x), torch.atan2(x, y)]


def complex_and_sequences(x: torch.Tensor) -> Any:
    sequences = [torch.linspace(0, 1, 50, dtype=d) for d in (torch.float32, torch.bfloat16)]
    return [x.sgn(), x.angle(), *sequences, torch.arange(0.3, 100, 0.7)]


INFERRED: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], torch.dtype | None]] = {
    "added into": (
        added_into,
        (torch.randn(8, 16), torch.randn(16, 16), torch.arange(8).flip(0)),
        torch.bfloat16,
    ),
    "chunks that are still read": (
        nn.GRUCell(8, 8).requires_grad_(False),
        (torch.randn(1, 8), torch.randn(1, 8)),
        torch.bfloat16,
    ),
    "strided": (
        strided,
        (
            torch.linspace(-3, 3, 64 * 96).view(64, 96),
            torch.randn(3, 4, 32, 5),
            torch.randn(24, 32),
        ),
        torch.float16,
    ),
    "in vectors": (in_vectors, torch.randn(2, 128, 64).abs()[:, :, :37].unbind(), None),
    "complex": (complex_and_sequences, (torch.randn(97, dtype=torch.complex64),), None),
}


@pytest.mark.parametrize("name", INFERRED)
@torch.no_grad()
def test_inferred_programs_have_the_bits_of_eager_code(name: str) -> None:
    program, args, dtype = INFERRED[name]
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        actual = compiled(program, options={"weight_cache": False})(*args)
        torch.testing.assert_close(actual, program(*args), rtol=0, atol=0)


@pytest.mark.parametrize(
    "given", [{"weight_grads": "float32"}, {"range_guard": True}, {"fold_batch_norm": True}]
)
def test_what_changes_numbers_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(given))):
        amp_fx.compile(nn.Linear(2, 2), numerics="eager", options=given)


ACTIVATIONS: tuple[Callable[..., Any], ...] = (
    nn.ELU(),
    nn.Hardsigmoid(),
    nn.Hardswish(),
    nn.Hardtanh(),
    nn.Softplus(),
    torch.logit,
)


def test_gradients_of_other_strides_than_their_inputs() -> None:
    """Computes gradients whose strides torch's fake kernels do not predict."""

    def forward(*inputs: torch.Tensor) -> Any:
        pairs = zip(ACTIVATIONS, inputs, strict=True)
        return [(activation(x * 1.0) * 1.0).mT.contiguous() for activation, x in pairs]

    x = torch.linspace(0.1, 0.9, 512).view(4, 8, 16)
    inputs = [x.clone().requires_grad_() for _ in ACTIVATIONS]
    assert_same_bits(run_program(compiled(forward), inputs), run_program(forward, inputs))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_results_of_other_strides_than_their_inputs(*, is_transposed: bool) -> None:
    norm = nn.BatchNorm2d(8).eval()
    ops: tuple[Callable[..., Any], ...] = (
        norm,
        functional.logsigmoid,
        functional.glu,
        functional.leaky_relu,
        lambda x: functional.batch_norm(x, None, None, training=True),
        lambda x: functional.layer_norm(x, (6,)),
        lambda x: functional.threshold(x, 0.1, 0.2),
        lambda x: functional.mse_loss(x, x.detach() * 2, reduction="none"),
        lambda x: functional.huber_loss(x, x.detach() * 2, reduction="none"),
        lambda x: torch.xlogy(x, x.detach().abs().mT.contiguous().mT),
    )

    def run(program: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        values = program(x)
        return [*values, *torch.autograd.grad(sum(y.square().sum() for y in values), [x])]

    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        return [op(x * 1.0) * 1.0 for op in ops]

    torch.manual_seed(0)
    x = torch.randn(4, 8, 5, 6)
    if is_transposed:
        x = x.transpose(0, 2).clone().transpose(0, 2)
    else:
        x = x.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        assert all(map(torch.equal, compiled(forward)(x), forward(x)))
    assert all(map(torch.equal, run(compiled(forward), x), run(forward, x)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_batch_norm_whose_gradient_is_transposed(dtype: torch.dtype) -> None:
    """Computes a gradient with the strides of the input, which torch's fake kernel mispredicts."""

    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        y = functional.batch_norm(x, None, None, weight, bias, training=True)
        return y.mT.contiguous().relu().mT.contiguous() * x

    x = torch.randn(4, 8, 16).to(dtype).requires_grad_()
    args = [x, torch.ones(8, requires_grad=True), torch.zeros(8, requires_grad=True)]
    assert_same_bits(run_program(compiled(forward), args), run_program(forward, args))


def test_what_cannot_be_had_on_another_device_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    numerics._warn_strict.cache_clear()
    for _ in range(2):
        numerics.check_devices({"cpu", "cuda"})
    [record] = caplog.records
    assert record.getMessage().startswith("on cuda, numerics='eager' means inductor's 'strict'")


def pointwise_ops() -> Iterator[Any]:
    """Every functional pointwise op of ATen."""
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in getattr(packet, "overloads", list)():
            op = getattr(packet, overload)
            is_functional = not op._schema.is_mutable and "out" not in overload
            if torch.Tag.pointwise in op.tags and is_functional and not name.startswith("special_"):
                yield op


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Every number of a low dtype; random bit patterns and numbers around 1 of float32."""
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    # ``digamma`` differs for two numbers in a million.
    bits = torch.randint(-(2**31), 2**31 - 1, (2**20,)).to(torch.int32).view(dtype)
    return torch.cat([bits, torch.randn(2**20) * 3])


def arguments(op: Any, dtype: torch.dtype) -> list[Any] | None:
    """Arguments for an op; None if some type is not known."""
    found: list[Any] = []
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if argument.has_default_value() or argument.kwarg_only:
            break
        tensor = numbers(dtype)
        if found:
            tensor = tensor[torch.randperm(len(tensor))]
        known = {"Tensor": tensor, "number": 0.75, "float": 0.75, "int": 2}
        if kind not in known:
            return None
        found.append(known[kind])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("code", ["vector", "scalar"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_generated_code_has_atens_bits_for_ops_that_count_as_exact(
    dtype: torch.dtype, code: str
) -> None:
    """Excludes ops that eager code never calls alone."""
    options = {"cpp.simdlen": 1} if code == "scalar" else {}
    torch.manual_seed(0)
    chosen = []
    for op in pointwise_ops():
        args = arguments(op, dtype)
        is_internal = op._schema.name == "aten::native_dropout_backward"
        if args is None or is_internal or needs_kernel(op, args):
            continue
        try:
            chosen.append((op, args, op(*args)))
        except RuntimeError:
            continue  # not for this dtype
    assert len(chosen) > 60
    wrong = []
    for start in range(0, len(chosen), 20):
        part = chosen[start : start + 20]
        ops = [op for op, _, _ in part]

        def call(all_args: list[Any], ops: list[Any] = ops) -> list[Any]:
            return [op(*args) for op, args in zip(ops, all_args, strict=True)]

        torch._dynamo.reset()
        with torch.no_grad():
            results = compiled(call, options=options)([args for _, args, _ in part])
        for (op, _, expected), actual in zip(part, results, strict=True):
            if difference := oracle.leaf_difference(expected, actual):
                wrong.append(f"{op}: {difference}")
    assert not wrong


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("compiler", ["inductor", "aot_eager"])
def test_ops_that_torch_decomposes_early_have_the_bits_of_eager_code(
    compiler: str, align_corners: bool
) -> None:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        modes = {"linear": x[0], "bilinear": x, "bicubic": x, "trilinear": x[None]}
        kwargs: dict[str, Any] = {"scale_factor": 1.7, "align_corners": align_corners}
        resized = [functional.interpolate(y, mode=mode, **kwargs) for mode, y in modes.items()]
        return [*resized, functional.softshrink(x), functional.dropout(x @ x, 0.3)]

    def gradients(function: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            outs = function(x)
        return [*outs, *(torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in outs)]

    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    options: dict[str, Any] = {"numerics": "eager", "compiler": compiler}
    function = torch.compile(program, backend="amp_fx", options=options)
    assert all(map(torch.equal, gradients(function), gradients(program)))


def test_low_tensors_with_wider_numbers_have_the_bits_of_eager_code() -> None:
    def program(
        x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, number: float
    ) -> list[torch.Tensor]:
        y = x @ weight
        scaled = [y * scale, y / scale, y + scale, scale - y, y * scale.double()]
        return [*scaled, y * number, y / number, y + number, number - y]

    def results(function: Callable[..., Any], number: float) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            outs = function(x, weight, scale, number)
        loss = sum(out.float().square().mean() for out in outs)
        return [*outs, *torch.autograd.grad(loss, [x, weight, scale])]

    torch.manual_seed(0)
    x, weight = torch.randn(7, 8, requires_grad=True), torch.randn(8, 9, requires_grad=True)
    scale = torch.tensor(3.01, requires_grad=True)
    function = compiled(program, dynamic=True)  # the number is a symbol
    for number in (0.289, 30.1):
        expected = results(program, number)
        assert all(map(torch.equal, results(function, number), expected))
