"""Leaves small products to ATen: their weights become inputs before weights are packed.

Before:
    graph(x):                                # 4 rows
        %frozen = get_attr[_frozen_param0]   # 16 x 16
        %y      = aten.mm(%x, %frozen)
After:
    graph(x, frozen_cached):
        %y = aten.mm(%x, %frozen_cached)

oneDNN takes 15 to 30 us to start a kernel, in which a processor multiplies more numbers than such a
product has. ATen knows that, and computes small low-precision products by a loop of its own, and
all float32 products with MKL, which starts in 2 us; the freezing passes of inductor pack all
weights that are constants. So products that ATen computes sooner stay what they are, and take the
time and have the bits of code that is not packed.

Left unchanged: larger products, and those of ``passes.block_few_rows``.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import torch

from amp_fx.graphs.metadata import VALUE
from amp_fx.graphs.sizes import num_elements
from amp_fx.passes.base import PassResult
from amp_fx.passes.constants_to_inputs import PRODUCTS, move_to_inputs

if TYPE_CHECKING:
    from torch import fx

    from amp_fx.weights.pack import Constants

MAX_MULTIPLICATIONS = 16**3
"""ATen gives low products of more multiplications to oneDNN (``mkldnn_gemm_min_size`` in ATen)."""
MAX_FLOAT32_WEIGHTS, MAX_FLOAT32_MULTIPLICATIONS = 2**16, 2**22
"""Elements of a weight, and multiplications, up to which MKL is faster: oneDNN's float32 kernels
take 1.2 to 8 times its time below a million multiplications, and 1.0 to 1.45 times below four
(AVX512, one thread). MKL reads larger weights once for each of a few rows."""


@dataclasses.dataclass(frozen=True)
class LeaveSmallProducts:
    """Makes small products read inputs, which no pass packs.

    Attributes:
        constants: The constants; receives the descriptions and the values of the new inputs.
    """

    name: ClassVar[str] = "leave_small_products"
    ops: ClassVar[frozenset[str]] = frozenset(op._schema.name for op in PRODUCTS)
    constants: Constants = dataclasses.field(repr=False)

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``small_products_inputs``."""
        count = move_to_inputs(gm, self.constants, _is_small_product)
        return PassResult(Counter(small_products_inputs=count))


def _is_small_product(node: fx.Node) -> bool:
    """Returns True for a product that ATen computes without oneDNN, and sooner."""
    if node.target not in PRODUCTS:
        return False
    weight: torch.Tensor = VALUE.of(node.all_input_nodes[-1])
    if weight.device.type != "cpu":
        return False
    # Rows that are symbolic count as in the call that is being compiled.
    num_multiplications = num_elements(VALUE.of(node)) * weight.size(0)
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if weight.dtype is torch.float32 and has_mkl:
        is_narrow = num_elements(weight) <= MAX_FLOAT32_WEIGHTS
        return is_narrow and num_multiplications <= MAX_FLOAT32_MULTIPLICATIONS
    return num_multiplications <= MAX_MULTIPLICATIONS
