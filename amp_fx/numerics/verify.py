"""``amp_fx.verify``: whether a compiled program has the bits of eager autocast, and if not, why."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.backend.entry import amp_fx
from amp_fx.backend.pipeline import PASSES
from amp_fx.dtypes import as_dtype, dtype_name
from amp_fx.eager.region import autocast
from amp_fx.errors import OptionError
from amp_fx.explanation.running import isolated, optimized
from amp_fx.front.settings import policy_for, unwrap
from amp_fx.numerics.entry import Asked, device_type_of, low_dtype_of, name_of
from amp_fx.numerics.equality import Difference, differences
from amp_fx.numerics.invariance import CAUSE, compare_rows
from amp_fx.numerics.locate import Captured, capture, copied, first_difference
from amp_fx.numerics.running import undisturbed
from amp_fx.numerics.shadow import compiled_with, tensors_in
from amp_fx.numerics.state import guard_of, leaves_of, modules_of
from amp_fx.numerics.verify_report import VerifyReport
from amp_fx.options import Options
from amp_fx.policies.policy import preset
from amp_fx.progress import working
from amp_fx.regions.state import no_autocast
from amp_fx.second_call import takes_inputs_later

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import fx

    from amp_fx.numerics.locate import Place
    from amp_fx.policies.policy import Policy

    Outcome = dict[str, torch.Tensor]

INDUCTOR = (
    ({"freezing": False}, "packed weights: an epilogue in a library's kernel rounds elsewhere"),
    ({"weight_cache": False}, "a cached value of a weight"),
    (
        {"numerics": "strict"},
        "a fused kernel, or a product, that keeps in float32 what eager rounds",
    ),
    ({"numerics": "eager"}, "generated code of an op, which rounds otherwise than ATen's kernel"),
    ({"compiler": "aot_eager"}, "inductor"),
)
"""Options that may make bits equal, cheapest first, and what it says of the cause if one does."""


NEEDED = "a pass that cannot be disabled (insert_casts), or a weight that several graphs cast"
"""The cause where what Dynamo captures has the bits of eager code."""


@takes_inputs_later
def verify(
    step: Callable[..., Any],
    *,
    dtype: torch.dtype | str | None = None,
    policy: Policy | str | os.PathLike[str] | None = None,
    options: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 3,
    invariant: bool = False,
) -> Callable[..., VerifyReport]:
    """Compares a compiled program with eager autocast, bit for bit, and names what differs first.

    ``amp_fx.verify(model)(x)`` runs the model eagerly under autocast, and compiled by amp_fx under
    the same region, from the same state and random numbers. Outputs, gradients, buffers and, with
    an optimizer, the parameters after each step are compared. Everything is put back afterwards.

    Args:
        step: A module or a function. If amp_fx compiled it, the options are those that it was
            compiled with.
        dtype: What low-precision ops run in; by default as ``amp_fx.compile`` has it.
        policy: Which op is cast how; by default PyTorch's.
        options: Options of the backend (``amp_fx.options.Options``), such as
            ``{"numerics": "eager"}``; they come on top of those of the compiled step.
        loss: Gives a scalar of what the step gives. Without it, outputs that require gradients are
            differentiated with random cotangents.
        optimizer: Of parameters of the step; it steps after every backward.
        steps: How many, with an optimizer.
        invariant: Whether to compare the rows of a batch with each row alone instead, both
            compiled and without gradients; the report names the first op whose rows differ.

    Returns:
        A function that takes the step's arguments and gives a ``VerifyReport``.

    Raises:
        CompileTargetError: The step is neither a module nor a function.
        OptionError: An option is unknown or has a value that is not allowed.
    """
    target, given = unwrap(step, "amp_fx.verify")
    own, dynamic = compiled_with(step)
    options = {**own, **(options or {})}
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(f"optimizer={optimizer!r}: not an optimizer like those of torch.optim")
    if optimizer is not None and steps < 1:
        raise OptionError(f"steps={steps!r}: at least one step is needed")
    Options.parse(options)
    asked = Asked(
        dtype=given.dtype if dtype is None else as_dtype(dtype),
        policy=policy_for(policy, given),
        device_type=given.device_type,
    )

    @functools.wraps(target, assigned=("__doc__",), updated=())
    def verify_call(*args: Any, **kwargs: Any) -> VerifyReport:
        trial = _Trial(target, args, kwargs, asked, loss, optimizer, steps, dynamic)
        with working(f"verifying {name_of(target)}"), trial.undisturbed(), isolated():
            return _report_rows(trial, options) if invariant else _report(trial, options)

    return verify_call


class _Trial:
    """One program with its inputs and state, to be run again and again from the same start."""

    def __init__(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        asked: Asked,
        loss: Callable[[Any], Any] | None,
        optimizer: torch.optim.Optimizer | None,
        steps: int,
        dynamic: bool | None,
    ) -> None:
        self.step, self.args, self.kwargs = step, args, kwargs
        self.loss, self.optimizer, self.dynamic = loss, optimizer, dynamic
        self.num_steps = steps if optimizer is not None else 1
        self.num_graphs = 0
        self.device = device_type_of(step, (args, kwargs), asked)
        self.dtype, self.policy = low_dtype_of(asked, self.device), asked.policy
        modules = modules_of(step)
        self.parameters = _named([*(m.named_parameters() for m in modules), _others(step)])
        self.buffers = _named([m.named_buffers() for m in modules])
        groups = optimizer.param_groups if optimizer else ()
        more = (("parameter of the optimizer", p) for group in groups for p in group["params"])
        self.parameters |= _named([self.parameters.items(), more])
        self._guard = guard_of(step, *([optimizer] if optimizer else []))

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Puts everything back in the end."""
        with undisturbed(self._guard, is_eager=False) as self._rewind:
            yield

    def restore(self) -> None:
        """Sets state and random numbers to those of before; there are no gradients."""
        self._guard.restore()
        self._rewind()
        tensors = [*self.parameters.values(), *self.buffers.values()]
        state = self.optimizer.state if self.optimizer is not None else {}
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        self._guard.save_all([*tensors, *grads, *tensors_in([*map(dict, state.values())])])
        for parameter in self.parameters.values():
            parameter.grad = None

    def region(self) -> contextlib.AbstractContextManager[Any]:
        """A region of autocast, PyTorch's own where the policy is PyTorch's."""
        if self.policy == preset("torch"):
            return torch.autocast(self.device, self.dtype)
        return autocast(self.device, self.dtype, policy=self.policy)

    def compiled(self, options: Mapping[str, Any]) -> Callable[..., Any]:
        """The program compiled by amp_fx."""

        def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            self.num_graphs += 1
            return amp_fx(gm, example_inputs, options=options)

        found: Callable[..., Any] = optimized(backend, dynamic=self.dynamic)(self.step)
        return found

    def run_eagerly(self) -> Outcome:
        """Runs the program, and what is compiled in it, op by op."""
        with torch.compiler.set_stance("force_eager"):
            return self.run(self.step)

    def run(self, call: Callable[..., Any]) -> Outcome:
        """Runs the program from the start; names of what it leaves, and its values."""
        self.restore()
        found: Outcome = {}
        for number in range(1, self.num_steps + 1):
            when = f" in step {number}" if self.num_steps > 1 else ""
            args, kwargs = copied((self.args, self.kwargs))
            with self.region():
                result = call(*args, **kwargs)
            found |= {f"output {i}{when}": t for i, t in enumerate(tensors_in(result))}
            found = {name: value.detach().clone() for name, value in found.items()}
            _differentiate(result, self.loss)
            leaves = {f"input {i}": t for i, t in enumerate(tensors_in((args, kwargs)))}
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


def _named(groups: Iterable[Iterable[tuple[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """Each tensor once; a name that another tensor has is followed by a number."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in itertools.chain.from_iterable(groups):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            numbered = (f"{name} ({number})" for number in itertools.count(2))
            free = itertools.chain([name], numbered)
            found[next(n for n in free if n not in found)] = tensor
    return found


def _others(step: Callable[..., Any]) -> Iterator[tuple[str, torch.Tensor]]:
    return (("tensor", leaf) for leaf in leaves_of(step) if not _is_parameter(leaf))


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def _differentiate(result: Any, loss: Callable[[Any], Any] | None) -> None:
    outputs = [t for t in tensors_in(result if loss is None else loss(result)) if t.requires_grad]
    generator = torch.Generator().manual_seed(0)
    grads = [
        torch.ones_like(t)
        if t.dim() == 0
        else torch.randn(t.shape, generator=generator).to(t.device, t.dtype)
        for t in outputs
    ]
    if outputs:
        torch.autograd.backward(outputs, grads)


def _report(trial: _Trial, options: dict[str, Any]) -> VerifyReport:
    expected = trial.run_eagerly()
    again = differences(expected, trial.run_eagerly())
    found = () if again else differences(expected, trial.run(trial.compiled(options)))
    num_graphs = trial.num_graphs
    cause, place = "", None
    remedy: dict[str, Any] = {}
    if again:
        cause = "eager code gives other bits in every run: nothing can be compared"
    elif found:
        cause, remedy = _cause(trial, options, expected)
        place = _place(trial, options, cause, remedy, found)
    return VerifyReport(
        model=name_of(trial.step),
        dtype=dtype_name(trial.dtype),
        device_type=trial.device,
        num_compared=len(expected),
        differences=tuple(again or found),
        first=place,
        cause=cause,
        remedy=remedy,
        num_graphs=num_graphs,
    )


def _report_rows(trial: _Trial, options: dict[str, Any]) -> VerifyReport:
    trial.restore()
    inputs = (trial.args, trial.kwargs)
    found = compare_rows(trial.step, trial.compiled(options), inputs, options, trial.region)
    return VerifyReport(
        model=name_of(trial.step),
        dtype=dtype_name(trial.dtype),
        device_type=trial.device,
        num_compared=found.num_compared,
        differences=found.differences,
        first=found.first,
        cause=CAUSE if found.differences else "",
        num_graphs=trial.num_graphs,
        reference="those of each row alone",
    )


def _cause(trial: _Trial, options: dict[str, Any], expected: Outcome) -> tuple[str, dict[str, Any]]:
    """Returns the cause of differing bits, and options with which they are equal."""

    def is_equal(more: Mapping[str, Any]) -> bool:
        try:
            with working(f"trying {more}"):
                return not differences(expected, trial.run(trial.compiled(_merged(options, more))))
        except Exception:  # noqa: BLE001 - options that do not go together, whatever is raised
            return False

    if is_equal({"compiler": "eager"}):
        if not is_equal({"compiler": "aot_eager"}):
            uncached = {"compiler": "aot_eager", "weight_cache": False}
            if is_equal(uncached):
                return "a cached value of a weight that differs from what its ops give", uncached
            return "AOTAutograd, which makes other ops of the program's", {"compiler": "eager"}
        remedies = ((cause, {**more}) for more, cause in INDUCTOR if is_equal(more))
        return next(remedies, ("inductor", {"compiler": "eager"}))
    for name in _passes(options):
        more = {"disable_passes": (*options.get("disable_passes", ()), name)}
        if is_equal({"compiler": "eager", **more}):
            return f"the pass {name}", more
    if not differences(expected, trial.run(optimized(lambda gm, _: gm)(trial.step))):
        return NEEDED, {}
    return "Dynamo: what it captures differs, or the program goes on in other graphs", {}


def _merged(options: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Options with others on top; what is only for inductor goes with another compiler."""
    merged = {**options, **more}
    if merged.get("compiler", "inductor") != "inductor":
        parsed = Options.parse(options)
        for name in ("mode", *dict(parsed.inductor)):
            merged.pop(name, None)
    if merged.get("numerics") == "eager":
        for name in ("range_guard", "weight_grads", "fold_batch_norm"):
            merged.pop(name, None)
    return merged


def _passes(options: Mapping[str, Any]) -> list[str]:
    """Names of the passes that can be disabled, the user's own first."""
    own = [each.name for each in options.get("passes", ())]
    return own + [kind.name for kind in PASSES if not getattr(kind, "is_needed", False)]


def _place(
    trial: _Trial,
    options: dict[str, Any],
    cause: str,
    remedy: dict[str, Any],
    found: tuple[Difference, ...],
) -> Place | None:
    """The first node that differs; None where it cannot be told."""
    given = Options.parse({**options, "freezing": False})

    def captured(more: Mapping[str, Any], *, is_rewritten: bool = True) -> list[Captured]:
        plain = {"weight_cache": False, "compiler": "eager", **more}
        trial.restore()
        args, kwargs = copied((trial.args, trial.kwargs))
        with trial.region():
            parsed = Options.parse(_merged(options, plain))
            region = no_autocast if is_rewritten else trial.region
            return capture(trial.step, args, kwargs, parsed, region)

    disabled = {name: remedy[name] for name in ("disable_passes",) if name in remedy}
    try:
        ours = captured({})
        theirs = captured(disabled) if disabled else ours
        if cause == NEEDED:
            theirs = captured({}, is_rewritten=False)
        return first_difference(ours, theirs, given, in_backward=_is_backward(found))
    except Exception:  # noqa: BLE001 - the comparison stands without the place
        return None


def _is_backward(found: tuple[Difference, ...]) -> bool:
    return not any(each.what.startswith("output") for each in found)
