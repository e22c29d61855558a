"""torch_private.dynamo, tracing, fake_tensors, aot_autograd and inductor: what is relied on."""

from __future__ import annotations

import inspect
import logging
import operator
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import fx
from torch._inductor.fx_passes import mkldnn_fusion
from torch._inductor.lowering import lowerings, make_pointwise
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch._inductor.virtualized import V
from torch.overrides import BaseTorchFunctionMode

import amp_fx.weights.cpu.few_rows  # noqa: F401 (registers an op)
from amp_fx.torch_private import (
    aot_autograd,
    dynamo,
    fake_tensors,
    inductor,
    inductor_build,
    inductor_config,
    inductor_passes,
    modules,
    patches,
    tracing,
)
from tests import needs

if TYPE_CHECKING:
    from pathlib import Path


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


@pytest.mark.parametrize("error", [dynamo.Unsupported, dynamo.SkipFrame, dynamo.RestartAnalysis])
def test_errors_of_dynamo_are_exceptions(error: type[BaseException]) -> None:
    assert issubclass(error, Exception)


def test_a_failing_backend_is_named_by_this_error() -> None:
    def backend(*_: Any) -> Any:
        raise ValueError("on purpose")

    with pytest.raises(dynamo.BackendCompilerFailed):
        compiled(lambda x: x + 1, backend, torch.ones(2))


def test_a_program_that_fails_on_fake_tensors_is_named_by_this_error() -> None:
    with pytest.raises(dynamo.TorchRuntimeError):
        compiled(lambda x: x @ torch.ones(3, 3), "eager", torch.ones(2, 2), fullgraph=True)


def test_compiled_modules_are_of_this_class_and_take_a_decorator() -> None:
    module = torch.nn.Linear(2, 2)
    assert isinstance(torch.compile(module, backend="eager"), dynamo.OptimizedModule)
    wrapped = dynamo.OptimizedModule(module, dynamo.NullDecorator())  # type: ignore[arg-type]
    torch.testing.assert_close(wrapped(torch.ones(2)), module(torch.ones(2)))


def test_the_innermost_backend_is_what_the_user_gave() -> None:
    def backend(gm: fx.GraphModule, _: Any) -> Any:
        return gm.forward

    def wrapper(gm: fx.GraphModule, inputs: Any) -> Any:
        return backend(gm, inputs)

    wrapper._torchdynamo_orig_backend = backend  # type: ignore[attr-defined]
    assert dynamo.innermost_backend(wrapper) is backend


def test_a_translator_refuses_frames_under_transforms_in_this_method() -> None:
    assert callable(dynamo.InstructionTranslator._throw_if_in_functorch)
    error = dynamo.Unsupported("x")
    dynamo.skip_this_call(error)
    assert error.frame_exec_strategy is not None


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


def test_counters_count_graphs_and_the_state_of_sizes_can_be_read() -> None:
    dynamo.counters.clear()
    compiled(lambda x: x + 1, "eager", torch.ones(2))
    assert dynamo.counters["stats"]["unique_graphs"] == 1
    assert isinstance(dynamo.pgo.get_code_state(), dict)


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


def test_functions_marked_by_disable_run_as_they_are() -> None:
    seen: list[bool] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def ask(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_dynamo_compiling())
        return x

    compiled(lambda x: ask(x + 1), "eager", torch.ones(2))
    assert seen == [False]


def test_function_modes_of_the_frame_are_kept_while_dynamo_compiles() -> None:
    seen: list[int] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        seen.append(len(dynamo.captured_function_modes()))
        return gm.forward

    compiled(lambda x: x + 1, backend, torch.ones(2))
    with BaseTorchFunctionMode():
        compiled(lambda x: x + 2, backend, torch.ones(2))
    assert seen[1] - seen[0] == 1


def test_fake_tensors_have_metadata_only() -> None:
    mode = fake_tensors.FakeTensorMode()
    x = torch.ones(2, 3)
    fake = mode.from_tensor(x)
    assert type(fake) is fake_tensors.FakeTensor
    with fake_tensors.enable_python_dispatcher(), mode:
        assert (fake @ fake.t()).shape == (2, 2)
        with fake_tensors.unset_fake_temporarily():
            assert type(torch.ones(2)) is torch.Tensor
    with mode, pytest.raises(fake_tensors.DataDependentOutputException):
        fake.sum().item()
    with mode, pytest.raises(fake_tensors.DynamicOutputShapeException):
        fake.nonzero()
    assert issubclass(fake_tensors.UnsupportedFakeTensorException, RuntimeError)


def test_the_tracer_of_make_fx_takes_these_settings() -> None:
    names = set(inspect.signature(tracing.MakefxTracer.__init__).parameters)
    assert {"decomposition_table", "tracing_mode", "pre_dispatch"} <= names


def test_structured_traces_take_a_text_when_asked() -> None:
    asked: list[str] = []

    def text() -> str:
        asked.append("text")
        return "text"

    tracing.trace_structured("artifact", payload_fn=text)
    assert len(asked) <= 1  # none if no program listens


def test_aot_autograd_calls_boxed_compilers() -> None:
    seen: list[bool] = []

    def compile_inside(gm: fx.GraphModule, inputs: Any, **_: Any) -> Any:
        seen.append(gm.graph.output_node() is not None)
        return aot_autograd.boxed_nop(gm, inputs)

    def partition(*args: Any, **kwargs: Any) -> Any:
        return aot_autograd.min_cut_rematerialization_partition(*args, **kwargs)

    backend = aot_autograd.aot_autograd(
        fw_compiler=compile_inside, bw_compiler=compile_inside, partition_fn=partition
    )
    x = torch.ones(2, requires_grad=True)
    compiled(lambda x: x.sin(), backend, x).sum().backward()
    assert seen == [True, True]
    assert x.grad is not None
    boxed = aot_autograd.make_boxed_func(lambda a: (a + 1,))
    assert boxed([1]) == (2,)


def test_autograds_caches_can_be_turned_off() -> None:
    with aot_autograd.config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False):
        assert not aot_autograd.config.enable_autograd_cache


def test_equal_nodes_are_merged_except_these_ops() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    a, b = (graph.call_function(torch.ops.aten.sin.default, (x,)) for _ in range(2))
    graph.output((a, b))
    merged = aot_autograd.compile_utils.fx_graph_cse(graph)
    assert len(merged.find_nodes(op="call_function", target=torch.ops.aten.sin.default)) == 1
    assert torch.ops.aten.bernoulli in aot_autograd.compile_utils.rand_ops


def test_settings_of_inductor_are_known_by_name() -> None:
    assert "max-autotune" in inductor_config.list_mode_options()
    with inductor_config.config.patch(freezing=True):
        assert inductor_config.config.freezing
    wrapper_class: Any = inductor_config.TorchCompileInductorWrapper
    wrapper = wrapper_class("max-autotune", None, None)
    assert wrapper.config["max_autotune"]
    with pytest.raises(RuntimeError, match="no_such_setting"):
        wrapper_class(None, {"no_such_setting": 1}, None)


def test_passes_have_an_identity_for_caches() -> None:
    for kind in (inductor_passes.CustomGraphPass, inductor_passes.CustomPartitionerFn):
        assert inspect.isabstract(kind)
        assert {"__call__", "uuid"} <= kind.__abstractmethods__


def test_caches_of_inductor_lie_in_this_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert inductor_build.cache_dir() == str(tmp_path)
    assert issubclass(inductor_build.InvalidCxxCompiler, Exception)
    for name in ("CppBuilder", "CppTorchOptions", "get_cpp_compiler", "is_gcc"):
        assert callable(getattr(inductor_build, name))


def test_freezing_can_be_replaced_piece_by_piece() -> None:
    assert hasattr(inductor.freezing, "constant_fold")
    assert callable(inductor.freezing.enforce_as_strided_input_layout)
    assert (
        "layout_opt" not in inspect.signature(inductor.GraphLowering.decide_layout_opt).parameters
    )
    assert hasattr(inductor.freezing_patterns, "binary_folding_pass")
    assert isinstance(inductor.PatternMatcherPass(), inductor.PatternMatcherPass)
    with inductor.enter_freezing():
        pass


def test_constants_can_take_the_place_of_nodes() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.sin.default, (x,))
    graph.output(node)
    gm = fx.GraphModule({}, graph)
    inductor.replace_node_with_constant(gm, node, torch.ones(2))
    assert len(gm.graph.find_nodes(op="get_attr")) == 1
    gm.graph.lint()


def test_a_graph_remembers_frozen_parameters() -> None:
    gm = fx.GraphModule({}, fx.Graph())
    inductor.record_has_frozen_params(gm)
    assert gm._has_frozen_params
    frozen = torch.ones(2)
    assert not inductor.is_frozen_param(frozen)
    frozen._is_frozen_param = True  # type: ignore[attr-defined]
    assert inductor.is_frozen_param(frozen)


def test_devices_have_code_generators() -> None:
    assert inductor.has_code_generator("cpu")
    assert inductor.has_code_generator("cuda")
    assert not inductor.has_code_generator("a_new_device")


def test_decompositions_and_lowerings_are_tables_by_op() -> None:
    aten = torch.ops.aten
    assert aten.gelu.default in inductor.select_decomp_table()
    assert aten.gelu.default in inductor.decompositions
    assert aten.mm.default in lowerings
    for name in ("fall_back_where", "make_pointwise", "register_lowering"):
        assert callable(getattr(inductor, name))
    assert callable(inductor.tuned_bmm)
    assert hasattr(inductor.ops, "to_dtype")


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


def test_the_scheduler_forgets_renamed_buffers_in_this_method() -> None:
    method = inductor.SchedulerNode.recompute_size_and_body
    assert callable(method)


def test_templates_pass_their_inputs_through_this_class() -> None:
    names = inspect.signature(inductor.DataProcessorChoiceCallerWrapper.__init__).parameters
    assert {"wrapped", "preprocessor", "postprocessor"} <= set(names)


def test_float32_products_can_be_packed_for_onednn() -> None:
    """MKL's kernel keeps the weight beside its packed form."""
    source = inspect.getsource(mkldnn_fusion)
    assert source.count("V.aot_compilation") == 2
    with patches.packing_for_onednn():
        assert V.aot_compilation
    assert not V.aot_compilation


def test_float32_products_are_not_packed_without_mkl() -> None:
    source = inspect.getsource(mkldnn_fusion)
    assert source.count("and not torch._C.has_mkl") == 1
    with patches.packing_low_products():
        assert not torch._C.has_mkl


def test_the_sizes_of_vectors_have_a_product() -> None:
    """``tests/test_eager_numerics.py`` compares results."""
    assert inspect.getsource(mkldnn_fusion).count("reduce(") == 1
    with patches.packing_products_of_vectors():
        product: Any = vars(mkldnn_fusion)["reduce"]
        assert product(operator.mul, []) == 1
        assert product(operator.mul, [2, 3]) == 6


def test_the_kernel_of_a_template_is_known_before_there_is_a_graph() -> None:
    kernels = [inductor.few_rows_kernel(torch.bfloat16, 1, columns, 64) for columns in (96, 64, 16)]
    with_amx = {inductor.FewRowsKernel(block, uses_amx=True) for block in (32, 16)}
    with_avx512 = {inductor.FewRowsKernel(block, uses_amx=False) for block in (48, 32, 16)}
    with_avx2 = {inductor.FewRowsKernel(block, uses_amx=False) for block in (24, 16)}
    assert set(kernels) in (with_amx, with_avx512, with_avx2, {None})


def test_pairs_of_rows_are_not_interleaved_for_a_depth_that_is_odd() -> None:
    kernel = inductor.few_rows_kernel(torch.bfloat16, 1, 96, 63)
    assert kernel is None or not kernel.uses_amx


def test_a_template_takes_a_blocked_weight() -> None:
    """``tests/weights/test_few_rows.py`` compares results."""
    parameters = inspect.signature(inductor.CppGemmTemplate.__init__).parameters
    assert {"register_blocking", "has_bias", "should_block_weights"} <= set(parameters)
    assert parameters["should_block_weights"].default is True
    op = torch.ops.amp_fx.few_rows_product.default
    inductor.lower_few_rows_product(op)
    assert op in lowerings


def test_lowerings_of_packed_convolutions_wrap_functions_that_promote_no_dtypes() -> None:
    """``tests/weights/test_batch_norms.py`` compares results."""
    mkldnn = torch.ops.mkldnn
    for op, number in (
        (mkldnn._convolution_pointwise.default, 10),
        (mkldnn._convolution_pointwise.binary, 13),
        (mkldnn._convolution_pointwise_.binary, 13),
    ):
        function = inspect.unwrap(lowerings[op])
        assert function is not lowerings[op]
        assert len(inspect.signature(function).parameters) == number


def test_the_modules_of_dynamo_are_not_imported_with_amp_fx() -> None:
    code = "import sys, amp_fx; sys.exit('amp_fx.torch_private.dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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


def test_dynamo_names_the_function_at_its_recompile_limit() -> None:
    """Its warning has the text of ``describe_frame``, and comes once."""
    described, reported = [], []

    def backend(gm: Any, _: Any) -> Any:
        described.append(dynamo.describe_frame())
        return gm

    @torch.compile(backend=backend, dynamic=False)
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    dynamo.call_at_recompile_limit(lambda *args: reported.append(args))
    logger = logging.getLogger("torch._dynamo.convert_frame")
    try:
        with torch._dynamo.config.patch(recompile_limit=1):
            for size in range(1, 5):
                function(torch.ones(size))
    finally:
        logger.removeHandler(logger.handlers[-1])
    assert described[0] is not None
    assert described[0].startswith("'function' (")
    assert reported == [(described[0], "recompile_limit (1)")]


def test_inductor_rounds_marked_nodes() -> None:
    """``lowering.make_pointwise`` reads the key; ``test_round_compared.py`` compares results."""
    assert f'"{inductor_passes.ROUNDED}"' in inspect.getsource(make_pointwise)


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
    assert [code.count("assert_size_stride(") for code in codes] == [2, 1]


def test_a_compiled_function_calls_another_one_for_a_while() -> None:
    program = torch.compile(lambda x: x + 1, backend="eager")
    x = torch.zeros(2)
    with torch.compiler.set_stance("force_eager"):
        restore = dynamo.call_instead(program, lambda original: lambda x: original(x) * 10)
        assert program(x).tolist() == [10.0, 10.0]
        restore()
        assert program(x).tolist() == [1.0, 1.0]
