"""``amp_fx.verify``: compares a compiled program with eager autocast, bit for bit."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.backend.entry import amp_fx
from amp_fx.backend.pipeline import CAPTURED_PASSES
from amp_fx.dtypes import dtype_name
from amp_fx.errors import OptionError
from amp_fx.explanation.running import isolated, optimized
from amp_fx.numerics.asked import asked_for, device_type_of, low_dtype_of, name_of
from amp_fx.numerics.equality import differences
from amp_fx.numerics.notes import Notes, first_difference
from amp_fx.numerics.verify_report import VerifyReport
from amp_fx.observe.compiled import compiled_with
from amp_fx.observe.step import Step
from amp_fx.options import Options
from amp_fx.policies.policy import as_policy, preset
from amp_fx.progress import working
from amp_fx.regions.module_stack import compile_frame
from amp_fx.second_call import takes_inputs_later

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from torch import fx

    from amp_fx.numerics.trace_diff import OpDifference
    from amp_fx.observe.step import Outcome
    from amp_fx.policies.policy import Policy

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
"""Options that may make bits equal, cheapest first, and the cause if they do."""


NEEDED = "a pass that cannot be disabled (insert_casts), or a weight that several graphs cast"
"""The cause if the graphs that Dynamo captures have the bits of eager code."""


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
) -> Callable[..., VerifyReport]:
    """Compares a compiled program with eager autocast, bit for bit, and finds the first difference.

    ``amp_fx.verify(model)(x)`` runs the model eagerly under autocast, and compiled by amp_fx under
    the same region, from the same state and random numbers. It compares outputs, gradients,
    buffers and, with an optimizer, the parameters after each step. The state is restored.

    Args:
        step: A module or a function. If amp_fx compiled it, the options are those that it was
            compiled with.
        dtype: The low dtype; by default that of ``amp_fx.compile``.
        policy: The policy; by default PyTorch's. Under another one, the program is compared with
            its rewritten graphs, run op by op.
        options: Options of the backend (``amp_fx.options.Options``), such as
            ``{"numerics": "eager"}``, in addition to those of the compiled step.
        loss: Returns a scalar, given the outputs of the step. Without it, outputs that require
            gradients are differentiated with random cotangents.
        optimizer: An optimizer of parameters of the step; it steps after every backward.
        steps: The number of steps with an optimizer.

    Returns:
        A function that takes the step's arguments and returns a ``VerifyReport``.

    Raises:
        ArgumentTypeError: The step is neither a module nor a function.
        OptionError: An option is unknown or has an invalid value.
    """
    target, asked = asked_for(step, "amp_fx.verify", dtype, policy)
    own, dynamic = compiled_with(step)
    options = {**own, **(options or {})}
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(f"optimizer={optimizer!r}: not an optimizer like those of torch.optim")
    if optimizer is not None and steps < 1:
        raise OptionError(f"steps={steps!r}: at least one step is needed")
    Options.parse(options)

    @functools.wraps(target, assigned=("__doc__",), updated=())
    def verify_call(*args: Any, **kwargs: Any) -> VerifyReport:
        device = device_type_of(target, (args, kwargs), asked)
        dtype = low_dtype_of(asked, device)

        region = functools.partial(torch.autocast, device, dtype)
        program = Step(target, args, kwargs, region, loss, optimizer, steps)
        is_given = asked.policy != preset("torch") or options.get("policy") is None
        policy = asked.policy if is_given else as_policy(options["policy"])
        comparison = _Verification(program, options, dynamic, policy)
        with working(f"verifying {name_of(target)}"), program.undisturbed(), isolated():
            found = comparison.with_eager_code()
        return VerifyReport(name_of(target), dtype_name(dtype), device, **found)

    return verify_call


class _Verification:
    """Compares a program compiled with some options with eager autocast."""

    def __init__(
        self, program: Step, options: dict[str, Any], dynamic: bool | None, policy: Policy
    ) -> None:
        self.program, self.dynamic = program, dynamic
        self.options, self.policy = {**options, "policy": policy}, policy
        self.num_graphs = 0

    def with_eager_code(self) -> dict[str, Any]:
        """Returns the fields of a report on eager autocast."""
        expected = self._eagerly()
        again = differences(expected, self._eagerly())
        found = () if again else differences(expected, self._run({}))
        fields = {
            "num_compared": len(expected),
            "differences": again or found,
            "num_graphs": self.num_graphs,
        }
        if again:
            cause = "eager code gives other bits in every run: nothing can be compared"
            return {**fields, "cause": cause}
        if not found:
            return fields
        cause, remedy = self._cause(expected)
        return {**fields, "cause": cause, "remedy": remedy, "first": self._first(remedy)}

    def _compiled(self, more: Mapping[str, Any]) -> Callable[..., Any]:
        """Returns the program compiled by amp_fx, with additional options."""
        return self._compiled_with(_merged(self.options, more))

    def _compiled_with(
        self, options: Mapping[str, Any], notes: Notes | None = None
    ) -> Callable[..., Any]:
        def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            self.num_graphs += 1
            own = () if notes is None else (notes.in_graph(compile_frame(gm)),)
            passes = (*options.get("passes", ()), *own)
            return amp_fx(gm, example_inputs, options={**options, "passes": passes})

        found: Callable[..., Any] = optimized(backend, dynamic=self.dynamic)(self.program.function)
        return found

    def _run(self, more: Mapping[str, Any]) -> Outcome:
        return self.program.run(self._compiled(more))

    def _eagerly(self) -> Outcome:
        """Runs the program eagerly, including compiled code in it.

        A policy applies to compiled code only. Under another one than PyTorch's, the rewritten
        graphs run op by op, without the passes and caches of the options.
        """
        if self.policy != preset("torch"):
            options = {"policy": self.policy, "compiler": "eager", "weight_cache": False}
            return self.program.run(self._compiled_with(options))
        with torch.compiler.set_stance("force_eager"):
            return self.program.run(self.program.function)

    def _cause(self, expected: Outcome) -> tuple[str, dict[str, Any]]:
        """Returns the cause of differing bits, and options with which they are equal."""

        def is_equal(more: Mapping[str, Any]) -> bool:
            try:
                with working(f"trying {more}"):
                    return not differences(expected, self._run(more))
            except Exception:  # noqa: BLE001 - incompatible options may raise any error
                return False

        if is_equal({"compiler": "eager"}):
            if not is_equal({"compiler": "aot_eager"}):
                uncached = {"compiler": "aot_eager", "weight_cache": False}
                if is_equal(uncached):
                    return "a cached value of a weight, which is not what its ops give", uncached
                return "AOTAutograd, which makes other ops of the program's", {"compiler": "eager"}
            remedies = ((cause, {**more}) for more, cause in INDUCTOR if is_equal(more))
            return next(remedies, ("inductor", {"compiler": "eager"}))
        for name in _passes(self.options):
            more = {"disable_passes": (*self.options.get("disable_passes", ()), name)}
            if is_equal({"compiler": "eager", **more}):
                return f"the pass {name}", more
        if not differences(
            expected, self.program.run(optimized(lambda gm, _: gm)(self.program.function))
        ):
            return NEEDED, {}
        return "Dynamo: what it captures differs, or the program goes on in other graphs", {}

    def _first(self, remedy: dict[str, Any]) -> OpDifference | None:
        """Returns the first op that the remedy changes, or else rewriting; None if unknown.

        Notes separate the ops, so nothing differs here if fusion is the cause.
        """

        def noted(more: Mapping[str, Any]) -> Notes:
            notes, given = Notes(), {"weight_cache": False, "freezing": False, **more}
            call = self._compiled_with(_merged(self.options, given), notes)
            with notes.taken():
                self.program.run(call)
            return notes

        try:
            if remedy:
                expected = noted(remedy)
            elif self.policy == preset("torch"):
                expected = self._noted_eagerly()
            else:
                return None
            return first_difference(expected, noted({}))
        except Exception:  # noqa: BLE001 - the comparison is valid without the op
            return None

    def _noted_eagerly(self) -> Notes:
        """Runs the graphs that Dynamo captures op by op, under autocast."""
        notes = Notes()

        def backend(gm: fx.GraphModule, _: Any) -> fx.GraphModule:
            notes.in_graph(compile_frame(gm)).call(gm)
            gm.recompile()
            return gm

        with notes.taken():
            self.program.run(optimized(backend)(self.program.function))
        return notes


def _merged(options: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Returns merged options; another compiler drops those of inductor."""
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
    """Returns the names of the passes that can be disabled, custom ones first."""
    own = [each.name for each in options.get("passes", ())]
    return own + [kind.name for kind in CAPTURED_PASSES if not getattr(kind, "is_needed", False)]
