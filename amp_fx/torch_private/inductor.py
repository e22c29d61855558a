"""Inductor's graph compilers, lowerings and freezing."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor import aoti_compile_and_package, freezing, fx_utils, ir
from torch._inductor import compile_fx as compile_fx_module
from torch._inductor.codecache import CacheabilityValidator, FxGraphCachePickler
from torch._inductor.codegen import cpp_gemm_template, cpp_template_kernel
from torch._inductor.codegen.common import (
    KernelTemplate,
    get_scheduling_for_device,
    init_backend_registration,
)
from torch._inductor.codegen.cpp_gemm_template import CppGemmTemplate, expand_bias
from torch._inductor.codegen.cpp_micro_gemm import (
    CppMicroGemmAMX,
    CppMicroGemmFP32Vec,
    create_micro_gemm,
)
from torch._inductor.codegen.cpp_template_kernel import CppTemplateKernel
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.constant_folding import replace_node_with_constant
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.decomposition import decompositions, select_decomp_table
from torch._inductor.freezing_utils import enter_freezing, is_frozen_param, record_has_frozen_params
from torch._inductor.fx_passes import freezing_patterns, joint_graph, mkldnn_fusion
from torch._inductor.fx_passes.freezing_patterns import freezing_passes
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.kernel.bmm import tuned_bmm
from torch._inductor.lowering import (
    add_layout_constraint,
    constrain_to_fake_tensors,
    lowerings,
    make_fallback,
    make_pointwise,
    maybe_layout_constraints,
    register_lowering,
    to_dtype,
)
from torch._inductor.pattern_matcher import PatternMatcherPass
from torch._inductor.scheduler import SchedulerNode
from torch._inductor.select_algorithm import DataProcessorChoiceCallerWrapper
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.utils import Placeholder, parallel_num_threads
from torch._inductor.virtualized import V, ops

from amp_fx.replaced import replaced
from amp_fx.torch_private.inductor_passes import STORED

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = (
    "CacheabilityValidator",
    "CppGemmTemplate",
    "DataProcessorChoiceCallerWrapper",
    "FxGraphCachePickler",
    "GraphLowering",
    "PatternMatcherPass",
    "PythonWrapperCodegen",
    "SchedulerNode",
    "V",
    "aoti_compile_and_package",
    "compile_fx_module",
    "decompositions",
    "enter_freezing",
    "fall_back_where",
    "freezing",
    "freezing_passes",
    "freezing_patterns",
    "fx_utils",
    "has_code_generator",
    "ir",
    "is_frozen_param",
    "joint_graph",
    "lowerings",
    "make_pointwise",
    "mkldnn_fusion",
    "ops",
    "record_has_frozen_params",
    "register_lowering",
    "replace_node_with_constant",
    "select_decomp_table",
    "store_result",
    "to_dtype",
    "tuned_bmm",
    "view_to_reshape",
)


def has_code_generator(device_type: str) -> bool:
    """Returns True if inductor generates code for a device type.

    Out-of-tree backends register theirs with ``register_backend_for_device``.
    """
    init_backend_registration()
    return get_scheduling_for_device(device_type) is not None


@functools.cache
def fall_back_where(mark: str, op: Any) -> None:
    """Prepares inductor for nodes that call an op's kernel because ``node.meta`` has a key.

    Kernels sum in an order that depends on the strides of their inputs. So inputs of such nodes get
    the strides of their values in the graph, and an op that inductor only decomposes gets a
    lowering that calls its kernel.

    Relies on ``maybe_layout_constraints``.
    """
    constrain_others = maybe_layout_constraints(op)

    def constrain(node: torch.fx.Node, *args: Any, **kwargs: Any) -> Any:
        if mark not in node.meta:
            return constrain_others(node, *args, **kwargs) if constrain_others else (args, kwargs)
        values = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        exactly: Any = constrain_to_fake_tensors
        return exactly(args, kwargs, *values)

    if op not in lowerings:
        make: Any = make_fallback
        make(op, warn=False, override_decomp=True)
    add_layout_constraint(op, constrain)


def store_result(node: torch.fx.Node) -> None:
    """Makes inductor write a node's result to memory instead of computing it in each reader.

    Relies on ``inductor_realize_to_strides`` in ``node.meta``.
    """
    node.meta[STORED] = True


@dataclasses.dataclass(frozen=True)
class FewRowsKernel:
    """A kernel of the C++ template.

    Attributes:
        block: Columns of a block of the weight.
        uses_amx: Whether AMX units multiply. They read two rows of a block at once, interleaved.
    """

    block: int
    uses_amx: bool


def few_rows_kernel(
    dtype: torch.dtype, rows: int, columns: int, depth: int
) -> FewRowsKernel | None:
    """Returns the kernel of the C++ template that computes in float32 or with bfloat16's AMX units.

    Relies on ``create_micro_gemm``, by which the template chooses its kernel, reading nothing of
    the graph but ``sizevars``.
    """
    graph: Any = types.SimpleNamespace(sizevars=SizeVarAllocator())
    with V.set_graph_handler(graph):
        kernel = _micro_gemm(dtype, rows, columns, depth)
    uses_amx = type(kernel) is CppMicroGemmAMX and dtype is torch.bfloat16
    if not uses_amx and type(kernel) is not CppMicroGemmFP32Vec:
        return None
    return FewRowsKernel(kernel.register_blocking.block_n, uses_amx)


def _micro_gemm(dtype: torch.dtype, rows: int, columns: int, depth: int) -> Any:
    dtypes = {
        "input_dtype": dtype,
        "input2_dtype": dtype,
        "output_dtype": torch.float32,
        "compute_dtype": torch.float32,
    }
    threads = parallel_num_threads()
    kernel = create_micro_gemm("", rows, columns, depth, **dtypes, num_threads=threads)
    return _for_few_rows(kernel, rows, columns)


def _for_few_rows(kernel: Any, rows: int, columns: int) -> Any:
    """Adapts the block that a kernel keeps in registers to a few rows."""
    if type(kernel) is not CppMicroGemmFP32Vec:
        return kernel
    block = kernel.register_blocking
    # Inductor chooses one or two vectors for most sizes, whose sums wait for each other. g++ would
    # keep more sums than these in memory, which takes 1.2 to 1.7 times as long.
    lanes = pick_vec_isa().nelements()
    width = (4 if rows <= 2 else 3) * lanes
    if rows <= (4 if lanes == 16 else 3) and -columns % width <= columns // 16:
        block = block._replace(block_n=width)
    # A kernel is instantiated for each smaller number of rows as well: for one row, compiling all
    # eight takes twice as long, and seven of them never run.
    kernel.register_blocking = block._replace(block_m=min(block.block_m, rows))
    return kernel


_parsed_template = functools.cache(KernelTemplate._template_from_string)
_parsed_expression = functools.cache(cpp_template_kernel.parse_expr)  # type: ignore[attr-defined]


def _render_few_rows(rows: int, columns: int, render: Callable[..., str], **kwargs: Any) -> str:
    """Generates code for a product of few rows.

    Relies on ``create_micro_gemm``, by which the template chooses its kernel once more, and on
    ``_template_from_string`` and ``parse_expr``, which parse the same strings for each product: a
    third of the time that 49 products take.
    """

    def create(*args: Any, **kwargs: Any) -> Any:
        return _for_few_rows(create_micro_gemm(*args, **kwargs), rows, columns)

    with replaced(
        (cpp_gemm_template, "create_micro_gemm", create),
        (KernelTemplate, "_template_from_string", staticmethod(_parsed_template)),
        (cpp_template_kernel, "parse_expr", _parsed_expression),
    ):
        return render(**kwargs)


@functools.cache
def lower_few_rows_product(op: Any) -> None:
    """Makes inductor lower an op to its C++ template with a weight that is blocked already.

    The lowering stays for the process.

    Relies on ``CppGemmTemplate`` taking a blocked weight, as ``max_autotune`` passes it one, and on
    ``CppTemplateBuffer``. ``CppTemplate.generate`` would generate the code twice, to time it.

    Args:
        op: Takes rows, the blocked weight, a bias or None, the number of columns, and how many
            rows of a block are interleaved.
    """

    @register_lowering(op, type_promotion_kind=None)
    def lower(x: Any, blocked: Any, bias: Any, columns: int, _together: int) -> Any:
        x = ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x))
        rows, depth = map(int, x.get_size())
        inputs = [x, blocked]
        if bias is not None:
            inputs.append(expand_bias(ir.ExternKernel.realize_input(bias), x))
        kernel = _micro_gemm(x.get_dtype(), rows, columns, depth)
        template: Any = CppGemmTemplate(
            inputs,
            ir.FixedLayout(x.get_device(), x.get_dtype(), [rows, columns]),
            parallel_num_threads(),
            kernel.register_blocking,
            has_bias=bias is not None,
            name=type(kernel).__name__,
        )

        def make_render(node: Any, **kwargs: Any) -> Any:
            name = str(Placeholder.KERNEL_NAME)
            writer = CppTemplateKernel(name, template.num_threads)  # type: ignore[no-untyped-call]
            render = functools.partial(writer.render, template, template_buffer_node=node, **kwargs)
            return writer, functools.partial(_render_few_rows, rows, columns, render)

        buffer = ir.CppTemplateBuffer(template.layout, inputs, make_render, template, None)
        return ir.TensorBox.create(buffer)
