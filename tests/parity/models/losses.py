"""Losses and other families of ops."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812, torch's own spelling
from torch import Tensor, nn

from tests.parity.cases import case, leaf, mlp
from tests.parity.oracle import Subject


@case()
def cross_entropy_losses() -> Subject:
    model = nn.Linear(16, 5)
    weight = torch.rand(5)

    def forward(x: Tensor, target: Tensor, soft: Tensor) -> Any:
        logits = model(x)
        return (
            F.cross_entropy(logits, target),
            F.cross_entropy(logits, target, weight, label_smoothing=0.1),
            F.cross_entropy(logits, soft),
            F.nll_loss(logits.log_softmax(-1), target),
            F.kl_div(logits.log_softmax(-1), soft, reduction="batchmean"),
            F.binary_cross_entropy_with_logits(logits, soft),
            F.mse_loss(logits, soft) + F.l1_loss(logits, soft) + F.smooth_l1_loss(logits, soft),
        )

    args = (leaf(4, 16), torch.randint(5, (4,)), torch.rand(4, 5).softmax(-1))
    return Subject(forward, args, module=model)


@case()
def normalisations() -> Subject:
    model = nn.ModuleList([nn.LayerNorm(16), nn.RMSNorm(16), nn.GroupNorm(4, 8)])
    model.append(nn.InstanceNorm1d(8, affine=True))

    def forward(x: Tensor, w: Tensor) -> Any:
        y = x @ w
        return [layer(y) for layer in model] + [F.normalize(y), y.norm(), y.var(-1)]

    return Subject(forward, (leaf(2, 8, 16), leaf(16, 16)), module=model)


@case()
def embedding_bag() -> Subject:
    model = nn.ModuleList([nn.EmbeddingBag(20, 16, mode="sum"), nn.Linear(16, 4)])

    def forward(tokens: Tensor) -> Any:
        return model[1](model[0](tokens))

    return Subject(forward, (torch.randint(20, (4, 3)),), module=model)


@case()
def complex_numbers() -> Subject:
    def forward(x: Tensor, w: Tensor) -> Any:
        spectrum = torch.fft.rfft(torch.mm(x, w).float())
        mixed = spectrum @ spectrum.mH
        return mixed, torch.fft.irfft(spectrum) @ w

    return Subject(forward, (leaf(4, 16), leaf(16, 16)))


@case()
def linear_algebra() -> Subject:
    def forward(x: Tensor) -> Any:
        gram = torch.mm(x.mT, x).float() + torch.eye(8)
        return torch.linalg.cholesky(gram), torch.linalg.solve(gram, x.mT), torch.logdet(gram)

    return Subject(forward, (leaf(16, 8),))


@case()
def mixture_of_experts() -> Subject:
    experts, gate = nn.ModuleList(mlp() for _ in range(3)), nn.Linear(16, 3)

    def forward(x: Tensor) -> Any:
        weights, chosen = gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for i, expert in enumerate(experts):
            scale = (weights * (chosen == i)).sum(-1, keepdim=True)
            out = out + scale * expert(x)
        return out, torch.stack([e[2](x.repeat(1, 2)) for e in experts]).amax(0)  # type: ignore[index]

    return Subject(forward, (leaf(8, 16),), module=nn.ModuleList([*experts, gate]))


@case()
def indexing_and_scatter() -> Subject:
    def forward(x: Tensor, w: Tensor, index: Tensor) -> Any:
        y = x @ w
        z = torch.zeros(8, 16, dtype=y.dtype).index_add(0, index, y[index])
        out = x.new_zeros(8, 16)
        out[index] = (y.float() * 2)[index]
        return z, out, y.gather(1, index[:, None]), torch.where(y > 0, y, x), y.sort(-1)

    return Subject(forward, (leaf(8, 16), leaf(16, 16), torch.arange(8).flip(0)))
