"""compiled: amp_fx.compile, a module in gives a module out, all of it in one precision."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import amp_fx
from amp_fx import CastPolicy, preset
from amp_fx.errors import AmpFxError, ArgumentTypeError, OptionError, PolicyError, RegionError
from amp_fx.regions.state import AutocastState
from tests.other_thread import compiling_elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
# torch's own, where a graph starts with an activation.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

EAGER: dict[str, Any] = {"options": {"compiler": "eager"}}


class Breaks(nn.Module):
    """Three graph breaks, one inside a region, one in a loop, and a disabled function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        # No weight is used twice: two graphs cast it twice, where eager code shares one cast.
        self.fourth, self.fifth = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.first(x)
        torch._dynamo.graph_break()
        with torch.autocast("cpu", f16):
            z = self.second(y)
            torch._dynamo.graph_break()
            z = (z @ z.t()) * self.scale
        with torch.autocast("cpu", enabled=False):
            y_wide = y.to(self.third.weight.dtype)
            w = disabled(y_wide, self.fifth) + self.third(y_wide)
        for _ in range(2):
            w = w @ w.t()
            torch._dynamo.graph_break()
        return y, z, w, disabled(x, self.fourth)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def disabled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


@pytest.fixture
def model() -> Breaks:
    torch.manual_seed(0)
    return Breaks()


@pytest.fixture
def x(rng: torch.Generator) -> torch.Tensor:
    return torch.randn(3, 4, generator=rng)


def eager(call: Callable[..., Any], *args: Any, dtype: torch.dtype = bf16) -> Any:
    with torch.autocast("cpu", dtype):
        return call(*args)


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def backward(outputs: tuple[torch.Tensor, ...]) -> None:
    torch.autograd.backward([out.float().sum() for out in outputs])


def test_breaks_and_disabled_functions(model: Breaks, x: torch.Tensor) -> None:
    other = copy.deepcopy(model)
    outputs, expected = amp_fx.compile(model, **EAGER)(x), eager(other, x)
    assert_same(outputs, expected)
    backward(outputs)
    backward(expected)
    assert_same([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])


def test_module_out(model: Breaks, x: torch.Tensor) -> None:
    ours: Any = amp_fx.compile(model, **EAGER)
    torchs: Any = torch.compile(model)
    assert isinstance(ours, nn.Module)
    assert isinstance(ours, type(torchs))
    assert list(ours.state_dict()) == list(torchs.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in torchs.named_parameters()]
    assert [id(p) for p in ours.parameters()] == [id(p) for p in model.parameters()]
    assert ours.scale == 2.0
    ours.scale = 3.0
    assert model.scale == 3.0
    assert ours.eval() is ours
    assert not model.training
    ours.train()
    assert model.training
    ours.to(torch.float64)
    assert model.first.weight.dtype == torch.float64
    assert ours(x.double())[0].dtype == torch.float64
    of_torch = {name for name in vars(torchs) if name.startswith("_torchdynamo")}
    assert set(dir(torchs)) - of_torch - {"get_compiler_config"} <= set(dir(ours))


def test_hooks_run_in_the_region(x: torch.Tensor) -> None:
    model = nn.Linear(4, 4)
    ours = amp_fx.compile(model, **EAGER)
    seen = []

    def look(_: nn.Module, __: tuple[torch.Tensor, ...]) -> None:
        seen.append(torch.is_autocast_enabled("cpu"))

    for module in (ours, model):
        module.register_forward_pre_hook(look)
    ours(x)
    assert seen == [True, True]


def test_deepcopy_and_pickle(model: Breaks, x: torch.Tensor) -> None:
    settings: dict[str, Any] = {"dtype": f16, "output_dtype": "original", **EAGER}
    ours = amp_fx.compile(model, **settings)
    expected = ours(x)
    assert expected[0].dtype == f32
    duplicate = copy.deepcopy(ours)
    assert duplicate.first.weight is not ours.first.weight
    stored = io.BytesIO()
    torch.save(ours, stored)
    stored.seek(0)
    for other in (
        duplicate,
        pickle.loads(pickle.dumps(ours)),
        torch.load(stored, weights_only=False),
    ):
        assert type(other) is type(ours)
        assert_same(other(x), expected)
    other = Breaks()
    fresh = amp_fx.compile(other, **settings)
    fresh.load_state_dict(ours.state_dict())
    assert_same(fresh(x), expected)


def test_function_out(x: torch.Tensor) -> None:
    def product(x: torch.Tensor, *, other: torch.Tensor) -> torch.Tensor:
        """Multiplies."""
        return x.t() @ other

    ours = amp_fx.compile(product, dtype="float16", **EAGER)
    assert (ours.__name__, ours.__doc__) == ("product", "Multiplies.")
    assert_same(ours(x, other=x), eager(lambda: product(x, other=x), dtype=f16))


def test_inside_other_compiled_code(x: torch.Tensor) -> None:
    module = amp_fx.compile(nn.Linear(4, 4), dtype=f16, **EAGER)
    function: Any = amp_fx.compile(lambda x: x.t() @ x, dtype=f16, **EAGER)

    def outer(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return module(x), function(x), x.t() @ x

    for backend in ("eager", "amp_fx"):
        torch._dynamo.reset()
        result = torch.compile(outer, backend=backend, fullgraph=True)(x)
        assert [out.dtype for out in result] == [f16, f16, f32]


@pytest.mark.parametrize("kind", ["module", "forward", "function"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "amp_fx"])
def test_torch_compile_keeps_the_region(kind: str, backend: str, x: torch.Tensor) -> None:
    layer = nn.Linear(4, 4)
    module = amp_fx.compile(layer, dtype=f16, **EAGER)

    @amp_fx.compile(dtype=f16, **EAGER)  # type: ignore[untyped-decorator]
    def function(x: torch.Tensor) -> Any:
        return layer(x)

    ours: Any = {"module": module, "forward": module.forward, "function": function}[kind]
    compiled: Any = torch.compile(ours, backend=backend)
    expected = eager(lambda: layer(x), dtype=f16)
    for _ in range(2):
        assert_same(compiled(x), expected)
    again: Any = amp_fx.compile(module.forward, dtype=bf16, **EAGER)
    assert_same(again(x), expected)  # the region of the method is the innermost one


def test_device_of_the_region(x: torch.Tensor) -> None:
    seen: list[tuple[str, ...]] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def look(*_: Any, **__: Any) -> None:
        seen.append(AutocastState.ambient().enabled)

    amp_fx.compile(look, **EAGER)(x)
    amp_fx.compile(look, **EAGER)()
    amp_fx.compile(look, **EAGER)(batch={"x": [x]})
    assert seen == [("cpu",)] * 3


def test_inside_a_disabled_region(x: torch.Tensor) -> None:
    """The region of a call is the innermost one, as regions of ``torch.autocast`` nest."""
    layer = nn.Linear(4, 4)
    with torch.autocast("cpu", enabled=False), torch.autocast("cpu", bf16):
        expected = layer(x)
    with torch.autocast("cpu", enabled=False):
        assert torch.equal(amp_fx.compile(layer, **EAGER)(x), expected)
        bare: Any = torch.compile(layer, backend="amp_fx", options={"compiler": "eager"})
        assert torch.equal(bare(x), layer(x))


def compiled_natively(program: Any) -> Any:
    return torch.compile(program, backend="eager")


def compiled_in_float16(program: Any) -> Any:
    return amp_fx.compile(program, dtype="float16", **EAGER)


@pytest.mark.parametrize("first", [compiled_natively, compiled_in_float16])
@pytest.mark.parametrize("is_module", [True, False])
def test_a_compiled_program_is_compiled_anew(first: Any, is_module: bool, x: torch.Tensor) -> None:
    """The settings are those of the last call alone."""
    layer = nn.Linear(4, 4)

    def program(x: torch.Tensor) -> Any:
        return layer(x)

    original: Any = layer if is_module else program
    ours = amp_fx.compile(first(original), **EAGER)
    assert torch.equal(ours(x), eager(lambda: layer(x)))
    assert isinstance(ours, nn.Module) == is_module
    again = amp_fx.compile(amp_fx.compile(ours, output_dtype="original", **EAGER), **EAGER)
    assert torch.equal(again(x), ours(x))
    assert again(x).dtype == bf16
    if is_module:
        assert [*ours.state_dict()] == [*first(layer).state_dict()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_cuda_its_region_is_off_and_one_sentence_says_so(x: torch.Tensor) -> None:
    with pytest.warns(UserWarning, match="omit device_type to follow the device") as warned:
        ours = amp_fx.compile(nn.Linear(4, 4), device_type="cuda", **EAGER)
    assert [warning.filename for warning in warned] == [__file__]
    assert ours(x).dtype == f32  # without another warning, which would be an error


def test_no_recompilation_when_nothing_changed(model: Breaks, x: torch.Tensor) -> None:
    ours = amp_fx.compile(model, **EAGER)
    backward(ours(x))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            for p in model.parameters():
                p.data.mul_(0.5)
            backward(ours(x))


def test_one_recompilation_when_the_dtype_changes(x: torch.Tensor) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    by_dtype = {d: amp_fx.compile(module, dtype=d, **EAGER) for d in (bf16, f16)}
    before = counters["stats"]["unique_graphs"]
    for dtype in (bf16, f16, bf16, f16):
        assert by_dtype[dtype](x).dtype == dtype
    assert counters["stats"]["unique_graphs"] == before + 2


class NoModule:
    pass


@pytest.mark.parametrize("target", [3, "model", NoModule(), [nn.Linear(1, 1)], nn.Linear])
def test_neither_module_nor_function(target: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="Module or a function, got"):
        amp_fx.compile(target)


WRONG: dict[str, tuple[dict[str, Any], type[AmpFxError], str]] = {
    "device type": ({"device_type": "nowhere"}, RegionError, "cannot autocast"),
    "device with index": ({"device_type": "cuda:1"}, RegionError, "without an index"),
    "dtype": ({"dtype": "float99"}, OptionError, "is not a dtype"),
    "float32": ({"dtype": f32}, OptionError, "not a dtype to autocast to: pass torch.bfloat16"),
    "an option": ({"freezing": False}, ArgumentTypeError, r"pass options=\{'freezing': ...\}"),
    "policy": ({"policy": 3}, PolicyError, "expected policy to be an amp_fx.Policy"),
    "preset": ({"policy": "nothing"}, PolicyError, "no preset"),
    "backend": ({"backend": "inductor"}, OptionError, "always uses backend='amp_fx'"),
    "option": ({"options": {"dtpye": 1}}, OptionError, "unknown option 'dtpye'"),
    "option twice": (
        {"options": {"dtype": "bfloat16"}},
        OptionError,
        "pass dtype as an argument of",
    ),
    "weight_cache": ({"weight_cache": 1}, OptionError, "not one of True, False"),
    "mode": ({"mode": "fastest"}, OptionError, "mode='fastest'"),
    "argument": ({"full_graph": True}, ArgumentTypeError, "did you mean 'fullgraph'"),
    "output_dtype": ({"output_dtype": "low"}, OptionError, "'low' is not one of 'original'"),
    "output_dtype as an option": (
        {"options": {"output_dtype": "original"}},
        OptionError,
        "pass output_dtype as an argument of",
    ),
}


@pytest.mark.parametrize(("kwargs", "kind", "message"), WRONG.values(), ids=WRONG)
def test_bad_input(kwargs: dict[str, Any], kind: type[AmpFxError], message: str) -> None:
    before = AutocastState.ambient()
    with pytest.raises(kind, match=message):
        amp_fx.compile(nn.Linear(1, 1), **kwargs)
    assert AutocastState.ambient() == before


def test_error_of_the_model_leaves_no_region(x: torch.Tensor) -> None:
    def fail(_: torch.Tensor) -> None:
        raise KeyError("of the user")

    before = AutocastState.ambient()
    with pytest.raises(KeyError, match="of the user"):
        amp_fx.compile(fail, **EAGER)(x)
    assert AutocastState.ambient() == before


SWITCHED_OFF = """
import torch, amp_fx
model = amp_fx.compile(torch.nn.Linear(4, 4))
x = torch.randn(2, 4)
assert isinstance(model, torch.nn.Module)
assert list(model.state_dict()) == ["_orig_mod.weight", "_orig_mod.bias"]
assert model(x).dtype == torch.bfloat16
assert amp_fx.compile(lambda x: x @ x.t())(x).dtype == torch.bfloat16
"""


@pytest.mark.slow
def test_dynamo_switched_off_by_the_environment() -> None:
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    subprocess.run([sys.executable, "-c", SWITCHED_OFF], env=environment, check=True)


def test_importing_amp_fx_does_not_import_dynamo() -> None:
    code = "import sys; from amp_fx import GradScaler, Policy, autocast, compile; "
    code += "sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


FIRST_USE = """
import threading
from concurrent.futures import ThreadPoolExecutor
import amp_fx
from torch import nn

barrier = threading.Barrier(8)

def run(_):
    barrier.wait()
    amp_fx.compile(nn.Linear(2, 2))

with ThreadPoolExecutor(8) as pool:
    list(pool.map(run, range(8)))
"""


@pytest.mark.slow
def test_first_use_in_eight_threads() -> None:
    """Starts a process where nothing was compiled, so that torch looks up the backend by name."""
    command = [sys.executable, "-c", FIRST_USE]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_eight_threads() -> None:
    """Compiles and runs in all threads at once, each with another model, region and dtype."""
    num_threads = 8
    barrier = threading.Barrier(num_threads, timeout=120)
    table = {**preset("torch").tables["cpu"], "aten::linear": CastPolicy.FP32}
    wide = preset("torch").with_device("cpu", table)

    def run(index: int) -> None:
        dtype = (bf16, f16)[index % 2]
        policy = wide if index % 4 >= 2 else None
        expected = f32 if policy is not None else dtype
        size = 3 + index

        def body(x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
            y: torch.Tensor = linear(x) + index
            torch._dynamo.graph_break()
            result: torch.Tensor = linear(y)
            return result

        # Autocast caches casts of leaves. If a thread leaves a region while another one traces
        # leaves, torch may deadlock (docs/limits.md).
        linear = nn.Linear(size, size).requires_grad_(False)
        x = torch.randn(2, size, requires_grad=True) + 0
        program = amp_fx.compile(body, dtype=dtype, policy=policy, **EAGER)
        with torch.autocast("cpu", dtype, enabled=policy is None):
            want = linear(linear(x) + index)
        barrier.wait()
        for _ in range(5):
            got = program(x, linear)
            assert got.dtype == expected, (index, got.dtype)
            assert torch.equal(got, want), index
            torch.autograd.backward(got.float().sum())
        assert not torch.is_autocast_enabled("cpu")

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(run, range(num_threads)))


class Named(nn.Module):
    """Outputs in containers: low, of the program's own float16, an input, and an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mine: torch.Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"low": y, "more": [y.sum(), mine], "index": y.argmax()}


def test_original_output_dtype_is_float32_for_what_the_region_made_low() -> None:
    model, x, mine = Named(), torch.randn(3, 4), torch.ones(2, dtype=f16)
    with torch.autocast("cpu", f16):
        expected = model(x, mine)
    inner = amp_fx.compile(model, dtype=f16, output_dtype="original", **EAGER)

    def calls_it(x: torch.Tensor, mine: torch.Tensor) -> Any:
        return inner(x, mine)

    for call in (
        amp_fx.compile(model, dtype=f16, output_dtype="original", **EAGER),
        amp_fx.compile(model.forward, dtype=f16, output_dtype="original", **EAGER),
        torch.compile(calls_it, backend="eager"),
    ):
        found = call(x, mine)
        torch.testing.assert_close(found["low"], expected["low"].float(), rtol=0, atol=0)
        assert found["more"][0].dtype == f32
        assert found["more"][1] is mine
        assert found["index"].dtype == torch.int64


@pytest.mark.parametrize("name", ["accuracy", "explain", "search", "store_low", "verify"])
def test_inputs_that_are_given_at_once(name: str) -> None:
    function: Any = getattr(amp_fx, name)
    with pytest.raises(TypeError, match=rf"returns a function.*amp_fx\.{name}\(model\)\(x\)"):
        function(nn.Linear(4, 4), torch.randn(2, 4))


def test_a_module_runs_compiled_while_another_thread_compiles() -> None:
    class Net(nn.Module):
        num_eager_calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_dynamo_compiling():
                self.num_eager_calls += 1
            return x @ x

    net, x = Net(), torch.randn(4, 4)
    fast = amp_fx.compile(net, **EAGER)
    fast(x)
    with compiling_elsewhere():
        assert fast(x).dtype == bf16
    assert net.num_eager_calls == 0


def test_repr_tells_the_policy_and_what_is_cached() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False)).eval()
    options = {"compiler": "aot_eager"}
    compiled = amp_fx.compile(model, policy="lean", dtype="bf16", options=options)
    assert "policy=lean, dtype=bfloat16, cached=0 bytes" in repr(compiled)
    with torch.no_grad():
        compiled(torch.randn(2, 4))
    assert "cached=32 bytes" in repr(compiled)  # 16 numbers in bfloat16
    assert "(0): Linear" in repr(compiled)
    assert "policy=default, dtype=default" in repr(amp_fx.compile(model))


class Generates(nn.Module):
    """Generator: Dynamo does not compile it, and its code runs after the call has returned."""

    def forward(self, x: torch.Tensor) -> Any:
        sent = yield x @ x.t()
        return (x @ x.t()) * sent


def drain(generator: Any) -> tuple[list[torch.Tensor], bool]:
    """Returns the two results of a generator, and whether autocast is on for its caller."""
    first = next(generator)
    is_on_outside = torch.is_autocast_enabled("cpu")
    with pytest.raises(StopIteration) as end:
        generator.send(2.0)
    return [first, end.value.value], is_on_outside


@pytest.mark.parametrize("program", [Generates(), Generates().forward], ids=["module", "function"])
@pytest.mark.parametrize("output_dtype", ["autocast", "original"])
def test_generators_resume_in_the_region(program: Any, output_dtype: str) -> None:
    x = torch.randn(4, 4)
    with torch.autocast("cpu", bf16):
        expected, _ = drain(program(x))
    results, is_on_outside = drain(amp_fx.compile(program, output_dtype=output_dtype, **EAGER)(x))
    assert not is_on_outside
    for result, like in zip(results, expected, strict=True):
        assert torch.equal(result.to(bf16), like)
    assert results[0].dtype == (bf16 if output_dtype == "autocast" else f32)
