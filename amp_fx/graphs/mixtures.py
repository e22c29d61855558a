"""Rejects mixtures of dtypes that an op does not accept, while nodes run on fake tensors.

Without an ambient region, Dynamo captures dtypes that Python code reads as float32, as in
``torch.zeros(n, dtype=x.dtype).index_add_(0, index, source)``. After the rewrite, another input of
the op may be low. Some ops promote, some accept mixtures on purpose (``batch_norm``), others raise,
and a few return another dtype than their fake kernel. ``tables/mixtures.py`` lists what the real
kernels do. Ops outside of ATen accept no mixture, because nothing is known about them.

Some kernels accept no low dtype at all. A region raises there, as in eager code, but a program
without one did not ask for low dtypes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amp_fx.graphs.values import RejectedMixtureError, tensors_in
from amp_fx.policies.calls import bind, qualified_name, written_arguments
from amp_fx.tables.mixtures import accepts, lacks_kernel, mixture_of

if TYPE_CHECKING:
    from amp_fx.torch_private.ops import OpOverload


def reject_mixture(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], *, needs_all_results: bool
) -> None:
    """Raises if the kernel of an op does not accept the dtypes of its arguments.

    Args:
        op: The op that is about to run.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        needs_all_results: Whether results other than the first are used.

    Raises:
        RejectedMixtureError: The op does not accept the dtypes.
    """
    # Ops of amp_fx cast their arguments themselves.
    if op.namespace == "amp_fx":
        return
    mixture = mixture_of(tensor.dtype for tensor in tensors_in(args, kwargs))
    name = qualified_name(op)
    if mixture is None:
        if not lacks_low_kernel(op, args, kwargs):
            return
    elif accepts(name, mixture, needs_all_results=needs_all_results):
        return
    arguments = bind(op, args, kwargs)
    written = tensors_in([arguments.get(argument) for argument in written_arguments(op)])
    raise RejectedMixtureError(f"{name} does not accept {mixture or 'a low dtype'}", written)


def lacks_low_kernel(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns True if a tensor of a call has a low dtype that only the fake kernel accepts."""
    name = qualified_name(op)
    return any(lacks_kernel(name, t.dtype, t.device.type) for t in tensors_in(args, kwargs))
