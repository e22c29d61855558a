"""Random programs that write weights by any road and call compiled models, against eager autocast.

The models use weights and what is computed from them in every way that a graph can (``USES``): they
return, copy, add to results of convolutions and save them for the backward; weights are tied and
untied. The programs write to all results and gradients that they get. ``AMP_FX_CHECK=1`` is set, so
that every call compares cached values and weights with copies.

Run by hand, for example ``python -m tests.weights.random_programs --seconds 1800``. It prints the
seed of each program that goes wrong; ``--first SEED --programs 1`` runs that one again. ``--plant``
takes one protection out of amp_fx, and programs must go wrong.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import os
import random
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from amp_fx.passes import pack_for_kernels
from amp_fx.passes.base import PassResult
from amp_fx.passes.constants_to_inputs import ConstantsToInputs
from amp_fx.passes.protect_saved_inputs import ProtectSavedInputs
from amp_fx.replaced import replaced
from amp_fx.weights.read_only import CHECK_ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Road = Callable[["Program", int, torch.Tensor], Any]
    Use = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

TOLERANCE = 0.2
"""Of the largest output. Outputs of another weight have nothing to do with each other; the
roundings to bfloat16, which inductor leaves out here and there, make a few percent."""


def _mean_of_images(x: torch.Tensor, weight: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """Adds ``added`` to the result of a convolution, in which oneDNN may add in place."""
    size = weight.shape[0]
    images = x.tanh().mean(0).expand(size, size).reshape(1, 1, size, size)
    kernel = weight.flatten()[:9].reshape(1, 1, 3, 3)
    images = images.contiguous(memory_format=torch.channels_last)
    return functional.conv2d(images, kernel, padding=1) + added.reshape(1, 1, size, size)


def _in_float32(use: Use) -> Use:
    def disabled(x: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return use(x.float(), w, m)

    return disabled


USES: dict[str, Use] = {
    "clone": lambda _x, w, _m: w.clone(),
    "copy": lambda _x, w, _m: w.to(w.dtype, copy=True),
    "concatenation": lambda _x, w, _m: torch.cat([w]),
    "cast": lambda _x, w, _m: w.bfloat16(),
    "transposed cast": lambda _x, w, _m: w.bfloat16().t(),
    "copy of a value": lambda _x, w, m: (w * m).clone(),
    "part of a value": lambda _x, w, m: (w * m)[1:3],
    "product with a value": lambda x, w, m: x @ (w * (1 - m)),
    "product with a view": lambda x, w, m: x @ (w * m).t(),
    "product with tanh": lambda x, w, _m: functional.linear(x, w.tanh()),
    "product with exp": lambda x, w, m: functional.linear(x, w.exp() * m),
    "elements": lambda x, w, m: (x @ m) * w[0] + x.sin() * w[1],
    "norm": lambda x, w, m: functional.layer_norm(x, x.shape[-1:], w[0], m[0]),
    "value as an operand": lambda x, w, m: x.sum() * (w.exp() * m),
    "float32 product": _in_float32(lambda x, w, m: x @ (w * m)),
    "convolution and weight": lambda x, w, _m: _mean_of_images(x, w, w.bfloat16()),
    "convolution and value": lambda x, w, m: _mean_of_images(x, w, w.exp() * m),
    "float32 convolution and weight": _in_float32(lambda x, w, _m: _mean_of_images(x, w, w)),
    "float32 convolution and value": _in_float32(lambda x, w, _m: _mean_of_images(x, w, w.exp())),
    "float32 convolution and view": _in_float32(
        lambda x, w, _m: _mean_of_images(x, w, w.exp().t().expand(w.shape))
    ),
}
"""What a net returns besides its output, of an activation, a weight and a mask."""


class Net(nn.Module):
    """Some layers with square weights, of which some may be tied or convolutions."""

    mask: torch.Tensor

    def __init__(self, kinds: list[str], size: int, uses: Sequence[tuple[str, int]] = ()) -> None:
        super().__init__()
        self.kinds = kinds
        self.uses = tuple(uses)
        self.register_buffer("mask", (torch.rand(size, size) > 0.5).float())
        self.layers: Any = nn.ModuleList(_layer(kind, size) for kind in kinds)
        for i, kind in enumerate(kinds):
            if kind == "tied" and i:
                self.layers[i].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        given = x
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            y = x[..., None, None] if kind == "convolution" else x
            y = layer(y).flatten(1)
            # No gradient goes through the largest element: roundings decide which ones tie.
            x = y / (y.abs().amax().detach() + 1e-3) if kind == "twice" else torch.tanh(y)
            if kind == "twice":
                x = functional.linear(x, layer.weight)
        weights = [(name, self.layers[i].weight.flatten(1)) for name, i in self.uses]
        return [x, *(USES[name](given, weight, self.mask) for name, weight in weights)]


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
        chosen = ["plain", *self.choose.choices(kinds, k=self.choose.randint(1, 4))]
        names = self.choose.choices([*USES], k=self.choose.randint(0, 4))
        uses = [(name, self.choose.randrange(len(chosen))) for name in names]
        self.net = Net(chosen, size, uses)
        self.log: list[str] = [str(uses)]
        if self.choose.random() < 0.3:  # weights that share memory until one gets other data
            self._share_memory()
        self.twin = copy.deepcopy(self.net)
        self.x = torch.randn(self.choose.choice((1, 3, 16)), size)
        self.past: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.graphs = [self._compiled() for _ in range(self.choose.randint(1, 2))]

    def _compiled(self) -> tuple[str, Any]:
        mode = self.choose.choice(("eval", "eval", "kept", "inference", "train", "train"))
        options: dict[str, Any] = {"dtype": torch.bfloat16}
        if mode == "kept":
            options["freezing"] = False
        if mode == "train" and self.choose.random() < 0.5:
            options["weight_cache"] = "training"
        if self.choose.random() < 0.3:
            options["numerics"] = "eager"
        if self.choose.random() < 0.5:  # small weights stand for large ones
            options["disable_passes"] = ("leave_small_products",)
        self.log.append(f"{mode} {options}")
        return mode, torch.compile(self.net, backend="amp_fx", options=options, dynamic=False)

    def _share_memory(self) -> None:
        """Gives the last layer the memory of the first one, as two parameters."""
        first, last = self.net.layers[0], self.net.layers[-1]
        if first is not last and last.weight.shape == first.weight.shape:
            last.weight.data = first.weight.data

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
        """Sets ``.data`` to a former storage of the weight, with its current contents."""
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
            results = compiled(self.x)
            with torch.autocast("cpu", torch.bfloat16):
                expected = self.twin(self.x)
            self._compare_all(results, expected)
        return None

    def _train(self, compiled: Any) -> None:
        results = compiled(self.x)
        with torch.autocast("cpu", torch.bfloat16):
            expected = self.twin(self.x)
        weights = [self.weight(0), self.twin.layers[0].weight]
        gradients = [
            torch.autograd.grad(sum(r.float().sum() for r in rs), weight)[0]
            for rs, weight in zip((results, expected), weights, strict=True)
        ]
        with torch.no_grad():
            self._compare(gradients[0], gradients[1], 2 * TOLERANCE)
            gradients[0].zero_()
            self._compare_all(results, expected)

    def _compare_all(self, results: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
        """Compares results, and writes to them, because the caller owns them."""
        for actual, right in zip(results, expected, strict=True):
            self._compare(actual.float(), right.float())
        for actual in results:
            actual.zero_()

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


PLANTED: dict[str, tuple[Any, str, Any]] = {
    "donated": (ProtectSavedInputs, "call", lambda *_: PassResult(collections.Counter())),
    "constants": (ConstantsToInputs, "call", lambda *_: PassResult(collections.Counter())),
    "returned": (pack_for_kernels, "_separate_outputs", lambda *_: None),
}
"""Protections of cached values that ``--plant`` replaces."""


def main() -> int:
    """Runs programs, and counts those that went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--first", type=int, default=0, help="seed of the first program")
    parser.add_argument("--programs", type=int, default=10**9)
    parser.add_argument("--plant", choices=PLANTED, help="a protection to take out")
    given = parser.parse_args()
    os.environ[CHECK_ENVIRONMENT] = "1"
    torch._dynamo.config.cache_size_limit = 10**6
    num_run, num_wrong, end = 0, 0, time.monotonic() + given.seconds
    plant = replaced(PLANTED[given.plant]) if given.plant else contextlib.nullcontext()
    with plant:
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
