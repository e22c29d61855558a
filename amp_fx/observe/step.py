"""Runs a step several times from the same state, and collects its results."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.explanation.running import leaf_tensors
from amp_fx.observe.state import guard_of, known_to, leaves_of, parameters_of, undisturbed
from amp_fx.regions.module_paths import ModulePaths, Program
from amp_fx.regions.module_stack import call_with_paths
from amp_fx.torch_private import pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Context = Callable[[], contextlib.AbstractContextManager[Any]]
    Outcome = dict[str, torch.Tensor]


class Step:
    """A program with inputs and state, which runs repeatedly from the same start.

    Args:
        function: The program.
        args: Its arguments.
        kwargs: Its named arguments.
        region: Creates the autocast region around each forward of ``run``.
        loss: Returns a scalar, given the outputs.
        optimizer: An optimizer that steps after each backward of ``run``.
        steps: The number of steps of ``run`` with an optimizer.
        held: Other objects whose attributes are restored.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        region: Context = contextlib.nullcontext,
        loss: Callable[[Any], Any] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        steps: int = 1,
        held: Iterable[Any] = (),
    ) -> None:
        self.function, self.args, self.kwargs, self.region = function, args, kwargs, region
        self.loss, self.optimizer = loss, optimizer
        self.num_steps = steps if optimizer is not None else 1
        self.outputs: Any = None
        """Copies of the outputs of the last run."""
        self.paths = ModulePaths(Program(function, args, kwargs))
        self.guard = guard_of(function, *self._optimizers(), *held)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [] if self.optimizer is None else [self.optimizer]

    @functools.cached_property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters and other leaves that the program knows, by name."""
        leaves = [t for t in leaves_of(self.function) if not isinstance(t, torch.nn.Parameter)]
        others = [(f"tensor {number}", leaf) for number, leaf in enumerate(leaves)]
        more = enumerate(parameters_of(*self._optimizers()))
        given = [(f"parameter {number} of the optimizer", p) for number, p in more]
        return _named(self.paths.named_parameters(), others, given)

    @functools.cached_property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers, by name."""
        return _named(self.paths.named_buffers())

    def call(self, function: Callable[..., Any]) -> Any:
        """Calls a form of the program with the arguments."""
        return call_with_paths(self.paths, function, *self.args, **self.kwargs)

    @contextlib.contextmanager
    def undisturbed(self, *, is_eager: bool = False) -> Iterator[None]:
        """Context manager that restores the state at the end; see ``state.undisturbed``."""
        known = known_to(self.function)
        generators = [value for value in known if isinstance(value, torch.Generator)]
        with contextlib.ExitStack() as stack:
            for generator in generators:
                stack.callback(generator.set_state, generator.get_state())
            self._rewind = stack.enter_context(undisturbed(self.guard, is_eager=is_eager))
            yield

    def restart(self) -> None:
        """Restores state and random numbers."""
        self.guard.restore()
        self._rewind()

    def _begin(self) -> None:
        """Restarts, clears gradients, and saves what compiled code may write unobserved."""
        self.restart()
        tensors = [*self.parameters.values(), *self.buffers.values()]
        state = self.optimizer.state if self.optimizer is not None else {}
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        tensors += [*grads, *leaf_tensors([*map(dict, state.values())])]
        self.guard.note_inputs(tensors)
        self.guard.save(tensors)
        for parameter in self.parameters.values():
            parameter.grad = None

    def run(self, call: Callable[..., Any], watch: Context = contextlib.nullcontext) -> Outcome:
        """Runs the program from the start, and returns its results by name.

        Args:
            call: The step, or the compiled step.
            watch: Creates a context for the forward, and one for the backward.
        """
        self._begin()
        found: Outcome = {}
        for number in range(1, self.num_steps + 1):
            when = f" in step {number}" if self.num_steps > 1 else ""
            args, kwargs = copied((self.args, self.kwargs))
            with self.region(), watch():
                result = call_with_paths(self.paths, call, *args, **kwargs)
            self.outputs = detached(result)
            found |= {f"output {i}{when}": t for i, t in enumerate(leaf_tensors(result))}
            found = {name: value.detach().clone() for name, value in found.items()}
            if all(parameter.grad is None for parameter in self.parameters.values()):
                call_with_paths(self.paths, _differentiate, result, self.loss, watch)
            leaves = {f"input {i}": t for i, t in enumerate(leaf_tensors((args, kwargs)))}
            for name, leaf in {**leaves, **self.parameters}.items():
                if leaf.requires_grad and leaf.grad is not None:
                    found[f"gradient of {name}{when}"] = leaf.grad.detach().clone()
            found |= {f"{n} after{when or ' the run'}": leaf.detach() for n, leaf in leaves.items()}
            if self.optimizer is not None:
                self.optimizer.step()
                self.optimizer.zero_grad()
                after = f" after step {number}"
                found |= {n + after: p.detach().clone() for n, p in self.parameters.items()}
        found |= {f"buffer {name}": b.detach().clone() for name, b in self.buffers.items()}
        return found


def _named(*groups: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns each tensor once, under its first name."""
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for named in itertools.chain(*groups):
        first.setdefault(id(named[1]), named)
    return dict(first.values())


def _differentiate(result: Any, loss: Callable[[Any], Any] | None, watch: Context) -> None:
    """Runs the backward of a loss or of all outputs, unless the step did so."""
    with watch():
        found = result if loss is None else loss(result)
    outputs = [t for t in leaf_tensors(found) if t.requires_grad]
    if not outputs:
        return
    directions = cotangents(outputs)
    try:
        with watch():
            torch.autograd.backward(outputs, directions)
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise


def cotangents(outputs: Iterable[torch.Tensor], scale: float = 1.0) -> list[torch.Tensor]:
    """Returns the gradients of outputs: the scale for a scalar, and random signs for others."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for output in outputs:
        signs = torch.ones(())
        if output.dim():
            signs = torch.randint(0, 2, output.shape, generator=generator) * 2.0 - 1
        found.append((signs * scale).to(output.device, output.dtype))
    return found


def detached(tree: Any) -> Any:
    """Returns copies of tensors without gradients."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), tree)


def copied(tree: Any) -> Any:
    """Returns copies of inputs as leaves."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), tree
    )
