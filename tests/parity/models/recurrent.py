"""Recurrent and convolutional nets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812, torch's own spelling
from torch import Tensor, nn

from tests.parity.cases import case, leaf
from tests.parity.oracle import Subject, Way

if TYPE_CHECKING:
    from tests.parity.oracle import Program


class Cells(nn.Module):
    """Steps a cell over a sequence."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell = cell
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        hidden = state[0] if isinstance(state, tuple) else state
        return self.out(hidden), state


@case()
def lstm_cell() -> Subject:
    return Subject(Cells(nn.LSTMCell(8, 16)), (leaf(2, 3, 8),))


@case()
def gru_cell() -> Subject:
    return Subject(Cells(nn.GRUCell(8, 16)), (leaf(2, 3, 8),))


@case()
def rnn_cell() -> Subject:
    return Subject(Cells(nn.RNNCell(8, 16)), (leaf(2, 3, 8),))


class Recurrent(nn.Module):
    """A recurrent module of torch between two linear layers."""

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.inp, self.rnn, self.out = nn.Linear(8, 8), rnn, nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        hidden, _ = self.rnn(self.inp(x))
        return self.out(hidden)


@case(Way.AMBIENT)
def lstm() -> Subject:
    return Subject(Recurrent(nn.LSTM(8, 16, num_layers=2, batch_first=True)), (leaf(2, 3, 8),))


@case(Way.AMBIENT)
def gru() -> Subject:
    return Subject(Recurrent(nn.GRU(8, 16, batch_first=True)), (leaf(2, 3, 8),))


class Residual(nn.Module):
    """Two convolutions and a skip connection."""

    def __init__(self, inp: int, out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inp, out, 3, 2, 1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.skip = nn.Conv2d(inp, out, 1, 2, bias=False)
        self.bn1, self.bn2, self.bn3 = (nn.BatchNorm2d(out) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        y += self.bn3(self.skip(x))
        return F.relu(y, inplace=True)


def resnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        Residual(8, 16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def twice(program: Program, x: Tensor) -> list[Any]:
    return [program(x), program(x * 2)]


@case()
def resnet_and_its_running_stats() -> Subject:
    return Subject(resnet(), (leaf(4, 3, 16, 16),), drive=twice)


@case()
def resnet_eval() -> Subject:
    return Subject(resnet().eval(), (leaf(4, 3, 16, 16),))


class UNet(nn.Module):
    """Down, up by interpolation and by transposed convolution, with skips and GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.GroupNorm(2, 8), nn.SiLU())
        self.down2 = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.SiLU())
        self.down3 = nn.Conv2d(16, 16, 3, 2, 1)
        self.up = nn.ConvTranspose2d(16, 16, 2, 2)
        self.join2 = nn.Conv2d(32, 8, 3, 1, 1)
        self.join1 = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(a)
        c = self.up(self.down3(b))
        d = self.join2(torch.cat([b, c], 1))
        e = F.interpolate(d, scale_factor=2, mode="bilinear", align_corners=False)
        result: Tensor = self.join1(torch.cat([a, e], 1))
        return result


@case()
def unet() -> Subject:
    return Subject(UNet(), (leaf(2, 3, 16, 16),))


@case()
def convolutions_of_one_and_three_dimensions() -> Subject:
    model = nn.ModuleList([nn.Conv1d(3, 4, 3), nn.Conv3d(3, 4, 3), nn.ConvTranspose1d(4, 2, 3)])

    def forward(x: Tensor, y: Tensor) -> Any:
        return model[2](model[0](x).tanh()), F.avg_pool3d(model[1](y), 2)

    return Subject(forward, (leaf(2, 3, 8), leaf(2, 3, 6, 6, 6)), module=model)
