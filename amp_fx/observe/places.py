"""Maps a running op to its module, its source line and its name in a policy.

Policies name the ops that autocast sees (``linear``), but the dispatcher runs their parts (``t``,
``addmm``). A function mode therefore notes the function of torch that the program called.

The mode also runs branches and loops like eager code, so that the ops inside are observed. Without
a compiler, ``torch.cond`` would trace its branches, and modes would see one higher-order op.
"""

from __future__ import annotations

import functools
import linecache
import sys
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from amp_fx.errors import PolicyError
from amp_fx.graphs.locations import NodeLocation, is_library
from amp_fx.policies.calls import is_changeable
from amp_fx.policies.changes import expand_ops
from amp_fx.regions.module_stack import current_stack
from amp_fx.torch_private.ops import HigherOrderOperator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from amp_fx.regions.module_paths import ModulePaths


def _cond(
    predicate: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any
) -> Any:
    return true_fn(*operands) if predicate else false_fn(*operands)


def _while_loop(
    cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried: Any, others: Any
) -> Any:
    while cond_fn(*carried, *others):
        carried = body_fn(*carried, *others)
    return tuple(carried)


def _checkpoint(body: Callable[..., Any], *args: Any, **_: Any) -> Any:
    """Runs the body once: a checkpoint saves buffers, which batch norms in the body write."""
    return body(*args)


def _flex_attention(query: Any, key: Any, value: Any, *others: Any, **options: Any) -> Any:
    """Runs ``flex_attention`` with matrix products, after the casts of autocast."""
    from amp_fx.torch_private.higher_order import sdpa_dense

    query, key, value = _as_autocast(query, key, value)
    with torch.autocast(query.device.type, enabled=False):
        return sdpa_dense(query, key, value, *others, **options)


def _as_autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device_type)
    return [t.to(dtype) if t.dtype == torch.float32 else t for t in tensors]


EAGER_FORMS: dict[str, Callable[..., Any]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "flex_attention": _flex_attention,
    "tag_activation_checkpoint": _checkpoint,
}


_TENSOR: Any = torch.Tensor  # stubs call its properties tensors
_ATTRIBUTE_WRITES = (_TENSOR.grad.__set__, _TENSOR.grad.__delete__, _TENSOR.data.__set__)
"""Functions by which the program replaces the gradient or the memory of a tensor."""


class CallNotes(TorchFunctionMode):
    """Notes the function of torch that the program is calling, with a number for each call.

    Args:
        replaces: Called before the program replaces the gradient or the memory of a tensor, of
            which the dispatcher sees nothing.
    """

    def __init__(self, replaces: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._replaces = replaces
        self.function: Callable[..., Any] | None = None
        self.number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function; a higher-order op, such as a branch, in its eager form."""
        if isinstance(func, HigherOrderOperator) and str(func) in EAGER_FORMS:
            with self:
                return EAGER_FORMS[str(func)](*args, **(kwargs or {}))
        if func in _ATTRIBUTE_WRITES:
            self._replaces(args[0])
        outer, self.function = self.function, func
        if func is torch.Tensor.backward:
            self.function = None  # torch calls no mode for what the backward calls
        self.number += 1
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.function = outer
            self.number += 1


class Places:
    """Maps running ops to locations in the program, and parameters to their paths.

    Args:
        notes: The function that the program called.
        paths: The modules of the program, which ``call_with_paths`` calls.
    """

    def __init__(self, notes: CallNotes, paths: ModulePaths) -> None:
        self._notes, self._modules = notes, paths
        self._last: tuple[int, NodeLocation] = (-1, NodeLocation())
        self._paths: dict[int, str] = {}
        self._num_roots = -1

    def here(self, kernel: str) -> NodeLocation:
        """Returns the location of a running op, given its name: ``"aten::addmm"``."""
        number, site = self._last
        if self._notes.function is None or number != self._notes.number:
            stack = current_stack()
            file, line = _user_line()
            site = NodeLocation(
                module=self._modules.shown(stack[-1]) if stack else "",
                module_type=getattr(stack[-1][1], "__name__", "") if stack else "",
                file=file,
                line=line,
                code=linecache.getline(file, line).strip() if file else "",
            )
            self._last = (self._notes.number, site)
        return site._replace(op=policy_op(self._notes.function, kernel))

    def path_of(self, tensor: torch.Tensor, default: str = "a leaf tensor") -> str:
        """Returns the path of a parameter or buffer, or a default."""
        num_roots = len(self._modules.roots())
        if self._num_roots != num_roots:
            self._num_roots = num_roots
            named = [*self._modules.named_parameters(), *self._modules.named_buffers()]
            self._paths = {id(value): name for name, value in reversed(named)}
        return self._paths.get(id(tensor), default)

    def module_of(self, tensor: torch.Tensor) -> str:
        """Returns the path of the module of a parameter or buffer."""
        return self.path_of(tensor).rpartition(".")[0]


def frames_above() -> Iterator[FrameType]:
    """Yields the frames of Python's stack, from the caller outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _user_line() -> tuple[str, int]:
    """Returns the innermost line of Python's stack outside of torch and amp_fx."""
    for frame in frames_above():
        name = frame.f_code.co_filename
        if not is_library(name) and not name.startswith("<"):
            return name, frame.f_lineno
    return "", 0


_OTHER_NAMES = {
    "cross_entropy": "cross_entropy_loss",
    "radd": "add",
    "rmul": "mul",
    "rdiv": "div",
    "truediv": "div",
    "rtruediv": "reciprocal",
    "rmatmul": "matmul",
    "floordiv": "floor_divide",
    "rpow": "pow",
}
"""Names of ops by the names of functions that differ from them."""

_MADE_OF = {
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "native_layer_norm": "layer_norm",
    "native_group_norm": "group_norm",
    "native_batch_norm": "batch_norm",
    "_native_batch_norm_legit": "batch_norm",
    "cudnn_batch_norm": "batch_norm",
    "convolution": "conv2d",
    "_convolution": "conv2d",
    "addmm": "linear",
    "_scaled_dot_product_flash_attention_for_cpu": "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_efficient_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_cudnn_attention": "scaled_dot_product_attention",
    "nll_loss_forward": "nll_loss",
    "native_dropout": "dropout",
}
"""Names of ops for autocast by the names of their parts, for functions in Python that call several
ops."""


@functools.lru_cache(maxsize=4096)
def policy_op(function: Callable[..., Any] | None, kernel: str) -> str:
    """Returns the name of an op in a policy.

    Returns:
        The name; empty for an op that no policy changes, such as a view or a write.
    """
    called = getattr(function, "__name__", "") if function is not None else ""
    called = called.partition(".")[0]  # without the overload
    bare = called.strip("_") if called.startswith("__") else called
    name = kernel.removeprefix("aten::")
    candidates = (_OTHER_NAMES.get(bare, bare), _MADE_OF.get(name, ""), name, name.lstrip("_"))
    return next((op for op in candidates if op and is_policy_op(op)), "")


def is_inside(path: str, patterns: Iterable[str]) -> bool:
    """Returns True if a pattern such as ``"h.*.attn"`` matches a module or one around it."""
    return any(
        fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*") for pattern in patterns
    )


@functools.cache
def is_policy_op(name: str) -> bool:
    """Returns True if ``Policy.with_modules`` accepts an op."""
    try:
        return any(is_changeable(op) for op in expand_ops(name))
    except PolicyError:
        return False
