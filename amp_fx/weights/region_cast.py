"""Takes a leaf's cast from the cache that eager autocast keeps for one region.

Eager autocast casts a leaf once per region, whatever runs in it: graphs, what Dynamo could
not compile, islands. Its uses then add their gradients in the low dtype, which sets bits.
A compiled graph has a cast of its own; with the inner compiler ``"eager"``, whose bits are
eager autocast's, it takes the region's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from amp_fx.weights.kept_cast import kept_cast

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable


def region_cast(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The region's cast of a leaf, or ``low`` differentiated as that cast.

    The latter where the region has none to give, or one that is out of date: eager autocast
    does not notice a write to a leaf that it has cast.

    Args:
        weight: The leaf; float32.
        low: Its value in the region's dtype, on the same device.
    """
    shared = _cached_cast(weight, low.dtype)
    if shared is None or not torch.equal(shared, low):
        return kept_cast(weight, low)  # type: ignore[no-any-return]
    return shared


def one_region() -> contextlib.AbstractContextManager[Any]:
    """A region for a call that stands in none: what is cast inside is cast once."""
    return torch.autocast("cpu", enabled=False)


_CONVOLUTIONS: dict[int, Callable[..., torch.Tensor]] = {
    3: torch.nn.functional.conv1d,
    4: torch.nn.functional.conv2d,
    5: torch.nn.functional.conv3d,
}


def _cached_cast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Returns autocast's cached cast of a leaf; None if the cache cannot be asked for it.

    The cache has no reader. Relies on an op of the low list casting the leaf through it, on
    autograd saving that very tensor for the backward, and on such an op taking a first
    argument of no rows, which makes it cost nothing.
    """
    if type(weight) not in (torch.Tensor, torch.nn.Parameter) or not weight.is_leaf:
        return None
    if not weight.numel():  # convolutions take none, and nobody can tell such casts apart
        return None
    num_dims = weight.dim()
    if num_dims in (1, 2):
        op, sizes, saved = torch.matmul, weight.shape[:1], ("_saved_vec", "_saved_mat2")
        name = saved[num_dims - 1]
    elif num_dims in _CONVOLUTIONS:
        op, sizes, name = _CONVOLUTIONS[num_dims], weight.shape[1:], "_saved_weight"
    else:
        return None
    rows = weight.new_empty((0, *sizes)).requires_grad_()
    with torch.enable_grad(), torch.autocast(weight.device.type, dtype=dtype):
        try:
            result = op(rows, weight)
        except RuntimeError:  # the cache holds the leaf in another dtype, and would give that
            return None
    found: torch.Tensor | None = getattr(result.grad_fn, name, None)
    return found if found is not None and found.dtype == dtype else None
