"""Programs that a trace cannot see into: autograd functions, checkpoints, transforms, branches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812, torch's own spelling
from torch import Tensor, nn
from torch._higher_order_ops import while_loop
from torch.utils.checkpoint import checkpoint

from tests.parity.cases import case, leaf, mlp
from tests.parity.oracle import Subject, Way

if TYPE_CHECKING:
    from tests.parity.oracle import Program


class NotItsDerivative(torch.autograd.Function):
    """A function whose backward is deliberately not its forward's derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight).relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return torch.full_like(x, 3.0) * grad.float().sum(), torch.sign(weight) * 0.25


class InFloat32(NotItsDerivative):
    """``NotItsDerivative`` in float32 inside a region, as without a region in any case."""

    forward = staticmethod(
        torch.amp.custom_fwd(NotItsDerivative.forward, device_type="cpu", cast_inputs=torch.float32)
    )
    backward = staticmethod(torch.amp.custom_bwd(NotItsDerivative.backward, device_type="cpu"))


@case()
def loop_that_carries_a_low_tensor() -> Subject:
    layer = nn.Linear(16, 16).requires_grad_(False)

    def step(i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, layer(y).to(y.dtype)

    def forward(x: Tensor) -> Any:
        y = layer(x)
        return while_loop(lambda i, y: i < 3, step, (torch.tensor(0), y))[1]  # type: ignore[no-untyped-call]  # noqa: ARG005

    return Subject(forward, (torch.randn(4, 16),), module=layer)


@case()
def grid_of_a_constant_transform() -> Subject:
    theta = torch.eye(2, 3).mul(0.7).expand(2, 2, 3)

    def forward(x: Tensor) -> Any:
        grid = F.affine_grid(theta, [2, 3, 5, 6], align_corners=False)
        return grid, F.grid_sample(x, grid.float(), align_corners=False)

    return Subject(forward, (torch.randn(2, 3, 6, 8),))


@case()
def transform_that_makes_classes() -> Subject:
    layer = nn.Linear(16, 16)

    def forward(x: Tensor) -> Any:
        def distance(y: Tensor) -> Tensor:
            loss: Tensor = (layer(y) * F.one_hot(torch.arange(4), 16)).square().sum()
            return loss

        return torch.func.grad(distance)(layer(x))

    return Subject(forward, (torch.randn(4, 16),), module=layer)


@case(Way.AMBIENT)
def autograd_function() -> Subject:
    model = mlp()

    def forward(x: Tensor, weight: Tensor) -> Any:
        return NotItsDerivative.apply(model(x), weight).sin()  # type: ignore[no-untyped-call]

    return Subject(forward, (leaf(4, 16), leaf(16, 16)), module=model)


@case()
def autograd_function_in_float32() -> Subject:
    model = mlp()

    def forward(x: Tensor, weight: Tensor) -> Any:
        return InFloat32.apply(model(x), weight).sin()  # type: ignore[no-untyped-call]

    return Subject(forward, (leaf(4, 16), leaf(16, 16)), module=model)


@case()
def activation_checkpoint() -> Subject:
    first, second = mlp(), mlp()

    def forward(x: Tensor) -> Any:
        y = checkpoint(first, x, use_reentrant=False)
        y = checkpoint(lambda z: F.dropout(second(z), 0.3).softmax(-1), y, use_reentrant=False)
        return y @ y.mT

    return Subject(forward, (leaf(4, 16),), module=nn.ModuleList([first, second]))


@case()
def checkpoint_shares_a_weight_with_its_surroundings() -> Subject:
    model = mlp()

    def forward(x: Tensor) -> Any:
        return model(checkpoint(model, model(x), use_reentrant=False))

    return Subject(forward, (leaf(4, 16),), module=model)


@case(Way.AMBIENT)
def autograd_function_shares_a_weight_with_its_surroundings() -> Subject:
    def forward(x: Tensor, w: Tensor) -> Any:
        y = NotItsDerivative.apply(x @ w, w)  # type: ignore[no-untyped-call]
        return y @ w

    return Subject(forward, (leaf(4, 16), leaf(16, 16)))


@case()
def autograd_function_in_float32_shares_a_weight_with_its_surroundings() -> Subject:
    def forward(x: Tensor, w: Tensor) -> Any:
        y = InFloat32.apply(x @ w, w)  # type: ignore[no-untyped-call]
        return y @ w

    return Subject(forward, (leaf(4, 16), leaf(16, 16)))


@case()
def vmap_of_shared_weight_only() -> Subject:
    def forward(x: Tensor, w: Tensor) -> Any:
        return torch.vmap(lambda row: torch.relu(row @ w) @ w)(x)

    return Subject(forward, (leaf(4, 16), leaf(16, 16)))


@case()
def vmap() -> Subject:
    def forward(x: Tensor, w: Tensor) -> Any:
        return torch.vmap(lambda row: torch.mv(w, torch.relu(w @ row)))(x), torch.mm(x, w)

    return Subject(forward, (leaf(4, 16), leaf(16, 16)))


@case()
def func_grad() -> Subject:
    def forward(x: Tensor, w: Tensor) -> Any:
        inner = torch.func.grad(lambda z: F.mse_loss(torch.mm(z, w), torch.zeros_like(z)))(x)
        return torch.mm(inner, w)

    return Subject(forward, (leaf(4, 16), leaf(16, 16)))


@case()
def cond() -> Subject:
    model = mlp()

    def forward(x: Tensor) -> Any:
        y = model(x)
        return torch.cond(
            x.sum() > 0, lambda z: torch.mm(z, z.t()), lambda z: torch.mm(z * 2, z.t()), (y,)
        )

    def drive(program: Program, x: Tensor) -> Any:
        with torch.no_grad():
            return [program(x), program(-x)]

    return Subject(forward, (torch.randn(4, 16),), module=model, drive=drive)
