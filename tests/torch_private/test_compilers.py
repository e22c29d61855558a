"""torch_private.dynamo, tracing, fake_tensors, aot_autograd and inductor: what is relied on."""

from __future__ import annotations

import inspect
import operator
import re
import sys
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor.fx_passes import mkldnn_fusion
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch._inductor.virtualized import V
from torch.overrides import BaseTorchFunctionMode

import amp_fx.weights.cpu.few_rows  # noqa: F401 (registers an op)
from amp_fx.torch_private import (
    aot_autograd,
    dynamo,
    fake_tensors,
    inductor,
    inductor_config,
    modules,
    patches,
    tracing,
)
from tests import needs


def compiled(program: Any, backend: Any, *args: Any, **options: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(program, backend=backend, **options)(*args)  # type: ignore[no-untyped-call]


def test_a_backend_is_called_inside_of_these_contexts() -> None:
    seen: dict[str, Any] = {}

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        seen["trace"] = tracing.TracingContext.try_get()
        seen["compile"] = tracing.CompileContext.current_compile_id()
        seen["fake"] = fake_tensors.detect_fake_mode(inputs)
        seen["translator"] = dynamo.current_translator()
        return gm.forward

    assert tracing.TracingContext.try_get() is None
    compiled(lambda x: x + 1, backend, torch.ones(2))
    assert isinstance(seen["trace"], tracing.TracingContext)
    assert seen["compile"].frame_id >= 0
    assert isinstance(seen["fake"], fake_tensors.FakeTensorMode)
    assert isinstance(seen["translator"], dynamo.InstructionTranslator)
    assert tracing.TracingContext.try_get() is None


def test_guards_can_be_added_while_a_backend_runs() -> None:
    is_high, calls = [False], [0]

    def match(builder: Any, guard: Any) -> None:
        expected = is_high[0]
        builder.guard_manager.root.add_lambda_guard(
            lambda _: is_high[0] is expected, ["is_high"], guard.user_stack
        )

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        calls[0] += 1
        guard = tracing.Guard(dynamo.GlobalStateSource(), match)
        dynamo.install_guard(guard)
        return gm.forward

    torch.compiler.reset()
    call = torch.compile(lambda x: x + 1, backend=backend)
    call(torch.ones(2))
    call(torch.ones(2))
    assert calls == [1]
    is_high[0] = True
    call(torch.ones(2))
    assert calls == [2]


def test_a_local_variable_can_be_guarded_by_identity() -> None:
    assert callable(dynamo.GuardBuilder.ID_MATCH)
    code = (lambda *args: args).__code__
    assert dynamo.local_source(code, "args").name == "L['args']"
    assert dynamo.local_source(code, "args", 0).name == "L['args'][0]"


def test_names_of_modules_and_sources_lead_to_the_modules() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    seen: list[Any] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        [linear] = [node for node in gm.graph.nodes if "nn_module_stack" in node.meta][-1:]
        seen.append([modules.module_id(key) for key in linear.meta["nn_module_stack"]])
        translator: Any = dynamo.current_translator()
        source = gm.graph.find_nodes(op="placeholder")[0]._dynamo_source
        chain = dynamo.source_chain(source)
        seen.append([translator.output.resolve_source_value(part) for part in chain])
        return gm.forward

    compiled(lambda *args: args[0](args[1]), backend, net, torch.ones(1, 2))
    stack, values = seen
    assert stack == [id(net), id(net[0])]
    assert values[1] is net
    assert values[-1] is net[0].weight
    assert modules.module_id("L__self___0") == 0
    assert modules.module_id(f"{id(net)}@2") == id(net)
    assert dynamo.source_chain(None) == []


def test_frames_of_a_compiled_function() -> None:
    seen: list[Any] = []

    def program(x: torch.Tensor, *, scale: float) -> torch.Tensor:
        y = x * scale
        torch._dynamo.graph_break()
        return y + 1

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        frame, calls = sys._getframe(), []
        while frame.f_back is not None:
            frame = frame.f_back
            calls.append(dynamo.compiled_call(frame))
        translator: Any = dynamo.current_translator()
        seen.append((next(filter(None, calls)), translator.output.root_tx.f_code))
        return gm.forward

    x = torch.ones(2)
    torch.compiler.reset()
    torch.compile(program, backend=backend)(x, scale=2.0)
    (first, code), (second, resumed) = seen
    assert first == second == (program, (x,), {"scale": 2.0})
    assert code is program.__code__
    assert dynamo.is_resumed(resumed, program.__code__)
    assert not dynamo.is_resumed(code, program.__code__)
    assert not dynamo.is_resumed(resumed, compiled.__code__)


def test_isolated_recompiles_leave_other_callers_alone() -> None:
    calls: list[str] = []

    def named(name: str) -> Any:
        def backend(gm: fx.GraphModule, _: Any) -> Any:
            calls.append(name)
            return gm.forward

        return backend

    def program(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    torch.compiler.reset()
    first = torch.compile(program, backend=named("first"))
    first(torch.ones(2))
    dynamo.optimize(named("second"), isolate_recompiles=True)(program)(torch.ones(2))
    first(torch.ones(2))
    assert calls == ["first", "second"]


def test_skipped_code_is_not_compiled() -> None:
    calls: list[object] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        calls.append(gm)
        return gm.forward

    def program(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    dynamo.skip_code(program.__code__)
    compiled(program, backend, torch.ones(2))
    assert calls == []
    assert callable(dynamo.trace_rules.add)


def test_function_modes_of_the_frame_are_kept_while_dynamo_compiles() -> None:
    seen: list[int] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        seen.append(len(dynamo.captured_function_modes()))
        return gm.forward

    compiled(lambda x: x + 1, backend, torch.ones(2))
    with BaseTorchFunctionMode():
        compiled(lambda x: x + 2, backend, torch.ones(2))
    assert seen[1] - seen[0] == 1


@needs.CPP_COMPILER
@pytest.mark.parametrize("is_marked", [False, True])
def test_a_marked_result_is_written_to_memory(is_marked: bool) -> None:
    """Unmarked, the sine is computed in the loop that adds it up."""

    def mark(graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            if is_marked:
                inductor.store_result(node)

    torch.compiler.reset()
    program = torch.compile(lambda x: x.sin().sum(-1))
    with fresh_cache(), inductor_config.config.patch(post_grad_custom_pre_pass=mark):
        _, (code,) = run_and_get_code(program, torch.ones(3, 40))
    assert code.count(" = empty_strided_cpu((") == 1 + is_marked


def test_what_packing_patches_is_read_as_often_as_it_was() -> None:
    """``tests/test_eager_numerics.py`` compares results of packed products."""
    source = inspect.getsource(mkldnn_fusion)
    assert source.count("V.aot_compilation") == 2
    assert source.count("and not torch._C.has_mkl") == 1
    assert source.count("reduce(") == 1
    with patches.packing_for_onednn():
        assert V.aot_compilation
    assert not V.aot_compilation
    with patches.packing_low_products():
        assert not torch._C.has_mkl
    with patches.packing_products_of_vectors():
        product: Any = vars(mkldnn_fusion)["reduce"]
        assert (product(operator.mul, []), product(operator.mul, [2, 3])) == (1, 6)


def test_the_kernel_of_a_template_is_known_before_there_is_a_graph() -> None:
    kernels = [inductor.few_rows_kernel(torch.bfloat16, 1, columns, 64) for columns in (96, 64, 16)]
    with_amx = {inductor.FewRowsKernel(block, uses_amx=True) for block in (32, 16)}
    with_avx512 = {inductor.FewRowsKernel(block, uses_amx=False) for block in (48, 64, 16)}
    with_avx2 = {inductor.FewRowsKernel(block, uses_amx=False) for block in (32, 16)}
    assert set(kernels) in (with_amx, with_avx512, with_avx2, {None})


def test_pairs_of_rows_are_not_interleaved_for_a_depth_that_is_odd() -> None:
    kernel = inductor.few_rows_kernel(torch.bfloat16, 1, 96, 63)
    assert kernel is None or not kernel.uses_amx


def test_a_backward_overwrites_no_tensors_that_are_kept() -> None:
    donated: list[list[int] | None] = []

    def compile_inside(gm: fx.GraphModule, _: Any) -> Any:
        context: Any = tracing.TracingContext.try_get()
        donated.append(list(context.fw_metadata.bw_donated_idxs))
        outputs: Any = gm.graph.output_node().args[0]
        aot_autograd.keep_saved(range(len(outputs) - 1, len(outputs)))
        donated.append(list(context.fw_metadata.bw_donated_idxs))
        return aot_autograd.make_boxed_func(gm.forward)

    backend = aot_autograd.aot_autograd(
        fw_compiler=compile_inside,
        bw_compiler=lambda gm, _: aot_autograd.make_boxed_func(gm.forward),
        partition_fn=aot_autograd.min_cut_rematerialization_partition,
    )
    x = torch.ones(3, requires_grad=True)
    compiled(lambda x: x.cumsum(0).cumprod(0).cumsum(0), backend, x)
    assert donated[0]
    assert donated[1] == donated[0][:-1]


@needs.CPP_COMPILER
def test_checks_of_some_inputs_can_be_left_out() -> None:
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    codes = []
    for names in ((), ("arg1_1",)):
        with patches.without_input_asserts(names), fresh_cache():
            torch.compiler.reset()
            _, (code,) = run_and_get_code(torch.compile(add), torch.ones(4), torch.ones(4))
        codes.append(code)
    # One check of each input, or one of all.
    checks = [re.findall(r"assert_size_stride.*'input'\)", code) for code in codes]
    checked = [re.findall(r"arg\d_1", " ".join(lines)) for lines in checks]
    assert checked == [["arg0_1", "arg1_1"], ["arg0_1"]]


def test_a_compiled_function_calls_another_one_for_a_while() -> None:
    program = torch.compile(lambda x: x + 1, backend="eager")
    x = torch.zeros(2)
    with torch.compiler.set_stance("force_eager"):
        restore = dynamo.call_instead(program, lambda original: lambda x: original(x) * 10)
        assert program(x).tolist() == [10.0, 10.0]
        restore()
        assert program(x).tolist() == [1.0, 1.0]
