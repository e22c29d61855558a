"""Random programs that write weights by any road and call compiled models, against eager autocast.

Run by hand, for example ``python -m tests.weights.random_programs --seconds 1800``. It prints the
seed of each program that goes wrong; ``--first SEED --programs 1`` runs that one again.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    Road = Callable[["Program", int, torch.Tensor], Any]

TOLERANCE = 0.2
"""Of the largest output. Outputs of another weight have nothing to do with each other; the
roundings to bfloat16, which inductor leaves out here and there, make a few percent."""


class Net(nn.Module):
    """Some layers with square weights, of which some may be tied or convolutions."""

    def __init__(self, kinds: list[str], size: int) -> None:
        super().__init__()
        self.kinds = kinds
        self.layers: Any = nn.ModuleList(_layer(kind, size) for kind in kinds)
        for i, kind in enumerate(kinds):
            if kind == "tied" and i:
                self.layers[i].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            y = x[..., None, None] if kind == "convolution" else x
            y = layer(y).flatten(1)
            # No gradient goes through the largest element: roundings decide which ones tie.
            x = y / (y.abs().amax().detach() + 1e-3) if kind == "twice" else torch.tanh(y)
            if kind == "twice":
                x = functional.linear(x, layer.weight)
        return x


def _layer(kind: str, size: int) -> nn.Module:
    if kind == "convolution":
        return nn.Conv2d(size, size, 1, bias=False)
    return nn.Linear(size, size, bias=kind == "bias")


class Program:
    """A model, its twin with the contents that it should have, and what was kept of the past."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        torch.manual_seed(seed)
        size = self.choose.choice((8, 16, 64))
        kinds = ("plain", "plain", "bias", "tied", "twice", "convolution")
        self.net = Net(["plain", *self.choose.choices(kinds, k=self.choose.randint(1, 4))], size)
        self.twin = copy.deepcopy(self.net)
        self.x = torch.randn(self.choose.choice((1, 3, 16)), size)
        self.past: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.log: list[str] = []
        self.graphs = [self._compiled() for _ in range(self.choose.randint(1, 2))]

    def _compiled(self) -> tuple[str, Any]:
        mode = self.choose.choice(("eval", "eval", "kept", "inference", "train"))
        options: dict[str, Any] = {"dtype": torch.bfloat16}
        if mode == "kept":
            options["freezing"] = False
        return mode, torch.compile(self.net, backend="amp_fx", options=options, dynamic=False)

    def weight(self, i: int) -> nn.Parameter:
        found = self.net.layers[i].weight
        assert isinstance(found, nn.Parameter)
        return found

    def new_contents(self, i: int) -> torch.Tensor:
        shape = self.weight(i).shape
        scale: float = self.choose.choice((1.0, 2.0)) / shape[0] ** 0.5
        return torch.randn(shape) * scale

    def write(self) -> None:
        """Gives one weight, or all, other contents."""
        chosen = range(len(self.net.layers))
        if self.choose.random() < 0.7:
            chosen = [self.choose.randrange(len(self.net.layers))]  # type: ignore[assignment]
        for i in chosen:
            name = self.choose.choice((*sorted(ROADS), *OFTEN))
            self.log.append(f"{name}({i})")
            if name == "data_of_before":
                self._turn_back(i)
                continue
            contents = self.new_contents(i)
            self._remember(i)
            ROADS[name](self, i, contents)
            self._set_twin(i, contents)

    def _remember(self, i: int) -> None:
        known = self.past.setdefault(i, [])
        known.append((self.weight(i).data, self.twin.layers[i].weight.detach().clone()))
        del known[:-3]

    def _turn_back(self, i: int) -> None:
        """Lets a weight lie where it lay before, with what is there now."""
        if not self.past.get(i):
            return
        data, _ = self.choose.choice(self.past[i])
        contents = self.new_contents(i) if self.choose.random() < 0.3 else None
        self._remember(i)
        if contents is not None:
            data.copy_(contents)
        now = torch.empty_like(data).copy_(data)
        self.weight(i).data = data
        self._set_twin(i, now)

    def _set_twin(self, i: int, contents: torch.Tensor) -> None:
        """Gives the twin of a weight its contents, and of all that lie in the same memory."""
        place = torch._C._data_address(self.weight(i))  # type: ignore[attr-defined]
        for j, layer in enumerate(self.twin.layers):
            if torch._C._data_address(self.weight(j)) == place:  # type: ignore[attr-defined]
                layer.weight.data = contents.reshape(layer.weight.shape).clone()

    def call(self) -> None:
        """Calls a graph, and compares.

        Raises:
            AssertionError: An output, or a gradient, is not that of the twin.
        """
        mode, compiled = self.choose.choice(self.graphs)
        self.log.append(mode)
        if mode == "train":
            return self._train(compiled)
        context = torch.inference_mode if mode == "inference" else torch.no_grad
        with context():
            out = compiled(self.x).float()
            with torch.autocast("cpu", torch.bfloat16):
                expected = self.twin(self.x).float()
        self._compare(out, expected)
        return None

    def _train(self, compiled: Any) -> None:
        out = compiled(self.x).float()
        with torch.autocast("cpu", torch.bfloat16):
            expected = self.twin(self.x).float()
        self._compare(out, expected)
        weights = [self.weight(0), self.twin.layers[0].weight]
        seed = torch.ones_like(out)
        mine, theirs = (
            torch.autograd.grad(o, w, seed)[0]
            for o, w in zip((out, expected), weights, strict=True)
        )
        self._compare(mine, theirs, 2 * TOLERANCE)

    def _compare(
        self, actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE
    ) -> None:
        error = (actual - expected).abs().max().item()
        limit = tolerance * max(expected.abs().max().item(), 0.1)
        assert error <= limit, f"off by {error:.3g}, {limit:.3g} allowed, after {self.log}"


def _replaced(p: Program, i: int, contents: torch.Tensor) -> None:
    layer = p.net.layers[i]
    old = layer.weight
    new = nn.Parameter(contents.clone())
    for other in p.net.layers:
        if other.weight is old:
            other.weight = new


def _swapped(p: Program, i: int, contents: torch.Tensor) -> None:
    p.past.clear()  # which may be views of it
    swap: Any = torch.utils.swap_tensors
    swap(p.weight(i), nn.Parameter(contents.clone()))


def _rows(p: Program, i: int, contents: torch.Tensor) -> None:
    for row, new in zip(p.weight(i).data, contents, strict=True):
        row.copy_(new)


def _in_thread(p: Program, i: int, contents: torch.Tensor) -> None:
    thread = threading.Thread(target=lambda: p.weight(i).data.copy_(contents))
    thread.start()
    thread.join()


def _stepped(p: Program, i: int, contents: torch.Tensor) -> None:
    weight = p.weight(i)
    weight.grad = weight.detach() - contents
    torch.optim.SGD([weight], lr=1.0, fused=p.choose.random() < 0.5).step()
    weight.grad = None


def _loaded(p: Program, i: int, contents: torch.Tensor) -> None:
    assign = p.choose.random() < 0.5 and p.net.kinds[i] != "tied" and "tied" not in p.net.kinds
    p.net.layers[i].load_state_dict({"weight": contents.clone()}, strict=False, assign=assign)


def _numpy(p: Program, i: int, contents: torch.Tensor) -> None:
    p.weight(i).detach().numpy()[...] = contents.numpy()


def _set_data(weight: torch.Tensor, contents: torch.Tensor) -> None:
    weight.data = contents


ROADS: dict[str, Road] = {
    "copy_": lambda p, i, c: p.weight(i).detach().copy_(c).zero_().add_(c),
    "data.copy_": lambda p, i, c: p.weight(i).data.copy_(c),
    "data": lambda p, i, c: _set_data(p.weight(i), c.clone()),
    "data_of_before": lambda *_: None,
    "rows": _rows,
    "out": lambda p, i, c: torch.mul(c, 1, out=p.weight(i).data),
    "view": lambda p, i, c: p.weight(i).data.view(-1).copy_(c.reshape(-1)),
    "transposed": lambda p, i, c: p.weight(i).detach().flatten(1).t().copy_(c.flatten(1).t()),
    "foreach": lambda p, i, c: torch._foreach_copy_([p.weight(i).data], [c]),
    "numpy": _numpy,
    "set_": lambda p, i, c: p.weight(i).set_(c.clone()),  # type: ignore[call-overload]
    "replaced": _replaced,
    "swapped": _swapped,
    "thread": _in_thread,
    "step": _stepped,
    "loaded": _loaded,
}
"""By name, what gives a weight other contents."""


OFTEN = (*3 * ("data_of_before",), *2 * ("data",), "replaced")
"""What is done more often than the rest: weights that lie here, there and here again."""


def run(seed: int) -> None:
    """Runs one program.

    Raises:
        AssertionError: A call computed with other weights than the model has.
    """
    torch._dynamo.reset()
    program = Program(seed)
    for _ in range(program.choose.randint(20, 60)):
        if program.choose.random() < 0.45:
            with torch.no_grad():
                program.write()
        for _ in range(program.choose.choice((0, 1, 1, 2, 4))):
            program.call()
    for _ in range(4):
        program.call()


def main() -> int:
    """Runs programs, and counts those that went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--first", type=int, default=0, help="seed of the first program")
    parser.add_argument("--programs", type=int, default=10**9)
    given = parser.parse_args()
    torch._dynamo.config.cache_size_limit = 10**6
    num_run, num_wrong, end = 0, 0, time.monotonic() + given.seconds
    while num_run < given.programs and time.monotonic() < end:
        try:
            run(given.first + num_run)
        except (AssertionError, RuntimeError) as error:
            num_wrong += 1
            sys.stdout.write(f"seed {given.first + num_run}: {error}\n")
            sys.stdout.flush()
        num_run += 1
    sys.stdout.write(f"{num_run} programs, {num_wrong} wrong\n")
    return min(num_wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
