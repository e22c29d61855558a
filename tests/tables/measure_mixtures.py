"""Measures which mixtures of dtypes ATen's kernels accept, and writes them to a file.

    python -m tests.tables.measure_mixtures [FOLDER]

Runs the samples of torch's ``op_db``, and repeats each call of an ATen op with every mixture of
float32 and a low dtype, on the CPU. A mixture is accepted if the kernel runs and returns the dtypes
and strides that its fake kernel promises. Calls in a low dtype alone show which kernels lack it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import sys
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from amp_fx.dtypes import dtype_name
from amp_fx.policies.calls import qualified_name
from amp_fx.tables.mixtures import ANY, mixtures_file
from amp_fx.tables.presets import torch_version
from amp_fx.torch_private.fake_tensors import FakeTensorMode
from amp_fx.torch_private.modes import TorchDispatchMode
from tests.parity.calls import OPS, on_a_copy, samples_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from amp_fx.torch_private.ops import OpOverload

log = logging.getLogger(__name__)

NUM_SAMPLES = 5
"""Number of samples per op that are run."""
NUM_CALLS = 2
"""Number of measured calls per ATen op, and per number of dimensions and layout of its tensors."""

ACCEPTED, RAISES, FIRST = "accepted", "raises", "accepted but for later results"
DTYPE, STRIDES, FAKE_RAISES = "another dtype", "other strides", "only the fake kernel raises"
REAL_RAISES = "only the real kernel raises"

DEPENDS_ON_CPU = ("aten::convolution",)
"""Ops that oneDNN computes on CPUs with units for the dtype. Its kernels reject mixtures that those
of ATen accept, so these ops count as accepting none."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Result = list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...] | None]]


class Findings:
    """Measured outcomes and their numbers of calls, by op and mixture."""

    def __init__(self) -> None:
        self.outcomes: dict[str, dict[str, Counter[str]]] = defaultdict(
            lambda: defaultdict(Counter)
        )
        self.low_outcomes: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._num_calls: Counter[Any] = Counter()

    def add(self, op: OpOverload, call: Arguments) -> None:
        """Measures one call, unless enough like it were."""
        tensors = [t for t in tree_leaves(call) if isinstance(t, torch.Tensor)]
        floats = [t for t in tensors if t.dtype is torch.float32]
        is_dense = all(t.layout is torch.strided and t.numel() <= 20_000 for t in tensors)
        if not floats or not is_dense or any(t.is_complex() for t in tensors):
            return
        key = op, tuple((min(t.dim(), 4), t.is_contiguous()) for t in floats)
        self._add_low(key, call, len(floats))
        if self._num_calls[key] == NUM_CALLS:
            return
        uniform = "f" * len(floats)
        promised = promised_result(op, with_dtypes(call, uniform, torch.bfloat16))
        if promised is None or real_result(op, with_dtypes(call, uniform, torch.bfloat16)) is None:
            return
        self._num_calls[key] += 1
        for low, layout in VARIANTS:
            for mixture in (uniform, *mixtures_of(len(floats))):
                arguments = with_dtypes(call, mixture, low, layout)
                outcome = compare(op, arguments)
                if mixture == uniform and outcome != ACCEPTED:
                    break  # the fake kernel is wrong for float32 alone
                if mixture != uniform:
                    self.outcomes[qualified_name(op)][mixture][outcome] += 1

    def _add_low(self, key: tuple[OpOverload, Any], call: Arguments, num_floats: int) -> None:
        """Measures one call in low dtypes alone, unless enough like it were."""
        op, _ = key
        if self._num_calls["low", key] == NUM_CALLS:
            return
        promised = promised_result(op, call)
        # Kernels may accept any dtype if there is nothing to compute.
        is_empty = promised is None or any(0 in shape for _, shape, _ in promised)
        if is_empty or real_result(op, call) != promised:
            return
        self._num_calls["low", key] += 1
        for low in (torch.bfloat16, torch.float16):
            outcome = compare(op, with_dtypes(call, "l" * num_floats, low))
            self.low_outcomes[qualified_name(op)][dtype_name(low)].add(outcome)

    def rows(self) -> dict[str, dict[str, list[str]]]:
        """Returns the content of the file: what the kernel of each op accepts and rejects."""
        return {
            "all": self._with(lambda outcomes: outcomes == {ACCEPTED}),
            "first": self._with(lambda outcomes: FIRST in outcomes <= {ACCEPTED, FIRST}),
            "raises": {
                op: dtypes
                for op, by_dtype in sorted(self.low_outcomes.items())
                if (dtypes := [d for d, o in sorted(by_dtype.items()) if o == {REAL_RAISES}])
            },
        }

    def _with(self, is_wanted: Callable[[set[str]], bool]) -> dict[str, list[str]]:
        table = {}
        for op, by_mixture in sorted(self.outcomes.items()):
            if op in DEPENDS_ON_CPU:
                continue
            mixed = {m: set(outcomes) for m, outcomes in by_mixture.items() if len(set(m)) > 1}
            wanted = sorted(m for m, outcomes in mixed.items() if is_wanted(outcomes))
            if wanted:
                table[op] = [ANY] if len(wanted) == len(mixed) else wanted
        return table

    def differing(self) -> dict[str, dict[str, list[str]]]:
        """Returns the ops and mixtures for which the real result is not as the fake one."""
        bad = {DTYPE, STRIDES, FIRST, FAKE_RAISES}
        return {
            op: rows
            for op, by_mixture in sorted(self.outcomes.items())
            if (rows := {m: sorted(bad & set(o)) for m, o in by_mixture.items() if bad & set(o)})
        }


def mixtures_of(num_tensors: int) -> Iterator[str]:
    """Yields the mixtures of a call, and all tensors low; of many tensors, one that differs."""
    if num_tensors <= 4:
        yield from map("".join, itertools.product("fl", repeat=num_tensors))
        return
    yield "l" * num_tensors
    for one, others in ("lf", "fl"):
        for i in range(num_tensors):
            yield others * i + one + others * (num_tensors - i - 1)


def _as_given(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _reversed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor with its memory in the order of the reversed dimensions."""
    order = list(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


VARIANTS = (
    (torch.bfloat16, _as_given),
    (torch.float16, _as_given),
    (torch.bfloat16, _reversed),
    (torch.bfloat16, _channels_last),
)
"""Low dtypes and layouts in which each call is measured."""


def with_dtypes(
    call: Arguments,
    mixture: str,
    low: torch.dtype,
    layout: Callable[[torch.Tensor], torch.Tensor] = _as_given,
) -> Arguments:
    """Copies the arguments, with the dtypes of a mixture."""
    letters = iter(mixture)

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        new = layout(tensor.detach().clone())
        is_low = tensor.dtype is torch.float32 and next(letters) == "l"
        return new.to(low) if is_low else new

    copied: Arguments = tree_map_only(torch.Tensor, copy, call)
    return copied


def compare(op: OpOverload, call: Arguments) -> str:
    """Runs a call and its fake kernel, and returns the outcome."""
    promised, real = promised_result(op, call), real_result(op, call)
    if real is None:
        return RAISES if promised is None else REAL_RAISES
    if promised is None:
        return FAKE_RAISES
    if real == promised:
        return ACCEPTED
    if real[:1] == promised[:1]:
        return FIRST
    are_equal_dtypes = [r[0] for r in real] == [p[0] for p in promised]
    return STRIDES if are_equal_dtypes else DTYPE


def promised_result(op: OpOverload, call: Arguments) -> Result | None:
    """Returns the result of the fake kernel; None if it raises."""
    with FakeTensorMode() as mode, contextlib.suppress(Exception):
        args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, call)
        return _described(op(*args, **kwargs))
    return None


def real_result(op: OpOverload, call: Arguments) -> Result | None:
    """Returns the result of the kernel on a copy of the arguments; None if it raises."""
    args, kwargs = tree_map_only(torch.Tensor, torch.clone, call)
    with contextlib.suppress(Exception):
        return _described(op(*args, **kwargs))
    return None


def _described(results: Any) -> Result:
    tensors = [t for t in tree_leaves(results) if isinstance(t, torch.Tensor)]
    return [
        (t.dtype, tuple(t.shape), t.stride() if t.layout is torch.strided else None)
        for t in tensors
    ]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures each call of an ATen op."""

    def __init__(self, findings: Findings) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._findings = findings

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten":
            self._findings.add(func, (args, kwargs))
        return func(*args, **kwargs)


def _batch_norm(
    has_weight: bool,
    has_bias: bool,
    has_statistics: bool,
    training: bool,
    x: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    weight, bias = v if has_weight else None, v if has_bias else None
    mean, var = (v.clone(), v.clone()) if has_statistics else (None, None)
    return torch.batch_norm(x, weight, bias, mean, var, training, 0.1, 1e-5, False)


OTHER_CALLS: tuple[Callable[[torch.Tensor, torch.Tensor], Any], ...] = (
    lambda x, _: x.copy_(x.clone()),
    lambda x, v: torch.layer_norm(x, (4,), v),
    lambda x, v: torch.layer_norm(x, (4,), None, v),
    lambda x, v: torch.group_norm(x, 2, v),
    lambda x, v: torch.group_norm(x, 2, None, v),
    lambda x, v: torch.nn.functional.rms_norm(x, (4,), v),
    lambda x, _: torch._standard_gamma(x),
    lambda x, _: torch._sample_dirichlet(x),
    *(
        functools.partial(_batch_norm, has_weight, has_bias, has_statistics, training)
        for has_weight, has_bias, has_statistics, training in itertools.product(
            (True, False), repeat=4
        )
    ),
)
"""Functions of a batch of matrices and a vector, with arguments that ``op_db`` lacks."""


def measured(names: Iterable[str] = OPS) -> Findings:
    """Measures the ATen ops that the named ops of ``op_db`` call."""
    findings = Findings()
    with warnings.catch_warnings(), torch.no_grad(), _without_logs():
        warnings.simplefilter("ignore")
        for name in names:
            for function, args, kwargs in _calls(name):
                with contextlib.suppress(Exception), _Recorder(findings):
                    function(*args, **kwargs)
        for function in OTHER_CALLS:
            with contextlib.suppress(RuntimeError), _Recorder(findings):
                function(torch.ones(2, 4, 4), torch.ones(4))
    return findings


def _calls(name: str) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    op: Any = OPS[name]
    samples: Sequence[Any] = samples_of(name)
    for sample in samples[:: max(1, len(samples) // NUM_SAMPLES)]:
        yield op.op, (sample.input, *sample.args), sample.kwargs
        if op.inplace_variant is not None:
            yield on_a_copy(op.inplace_variant), (sample.input, *sample.args), sample.kwargs
        if op.supports_out and sample is samples[0]:
            yield functools.partial(_into_out, op.op), (sample.input, *sample.args), sample.kwargs


def _into_out(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls the variant with ``out=``."""
    out = tree_map_only(torch.Tensor, torch.empty_like, function(*args, **kwargs))
    return function(*args, **kwargs, out=out)


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    """Context in which torch does not log the errors of fake kernels."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def main(arguments: Sequence[str]) -> None:
    """Writes the file of the installed torch into the package, or into a folder."""
    path = mixtures_file(torch_version())
    path = Path(*arguments, path.name) if arguments else path
    findings = measured()
    path.write_text(json.dumps(findings.rows(), indent=1) + "\n", encoding="utf-8")
    for op, rows in findings.differing().items():
        log.warning("%s: %s", op, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
