"""What ``make gpu`` runs, most telling first, each in a process of its own with a limit."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

KINDS = ("pytest", "bench", "bytes", "timed", "program")
MOST_WORKERS = 8


@dataclasses.dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        name: What the report calls it.
        about: What it shows, in a line.
        kind: How its results are read: ``"pytest"`` writes JUnit's XML, ``"bench"`` and
            ``"bytes"`` write JSON, a ``"program"`` exits with 0 or not.
        arguments: Behind ``python``; of pytest, the tests.
        seconds: It is ended after so many.
        needs_cuda: Whether it is left out where there is no CUDA.
        modules: It is left out where one of these cannot be imported.
        is_parallel: Whether several workers may share its tests.
        environment: Variables of its process, by name.
    """

    name: str
    about: str
    kind: str
    arguments: tuple[str, ...]
    seconds: int
    needs_cuda: bool = True
    modules: tuple[str, ...] = ()
    is_parallel: bool = False
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_timed(self) -> bool:
        """Whether it measures times, and nothing else may run at the same time."""
        return self.kind in ("bench", "timed")

    def missing(self, *, has_cuda: bool) -> str | None:
        """What it lacks here; None if it can run."""
        if self.needs_cuda and not has_cuda:
            return "no CUDA"
        wanted = ("pytest", *self.modules) if self.kind == "pytest" else self.modules
        absent = [name for name in wanted if importlib.util.find_spec(name) is None]
        return f"no {absent[0]}" if absent else None

    def command(self, result: str) -> list[str]:
        """What to run; the part writes its results to a file of that name.

        Warnings are none of its business: a torch that nobody has tested with may have new ones.
        Nor is pytest-timeout, whose settings ``--strict-config`` refuses where it is not installed.
        """
        if self.kind == "program":
            return [sys.executable, *self.arguments]
        if self.kind in ("bench", "bytes", "timed"):
            return [sys.executable, *self.arguments, "--json", result]
        options = ["-q", "-rfE", "--tb=short", "-o", "filterwarnings=default"]
        options += ["-p", "no:cacheprovider", f"--junitxml={result}"]
        options += ["-o", "addopts=--import-mode=importlib"]
        if self.is_parallel and importlib.util.find_spec("xdist") is not None:
            options += ["-n", str(max(1, min(MOST_WORKERS, (os.cpu_count() or 2) // 2)))]
        return [sys.executable, "-m", "pytest", *options, *self.arguments]


_BENCH = ("-m", "benchmarks")
_CONTENDERS = ("--contenders", "float32,native,native-freezing,amp_fx,limit,limit-freezing")
_TRAINING = ("--contenders", "native,amp_fx,limit")
_TIMED = ("-m", "tests.traffic", "time", "--compile-seconds", "90")
_STRESS = ("-X", "faulthandler", "-m", "tests.weights.stress_program")


def _allocator(name: str, about: str, setting: str, *more: str) -> Part:
    """Some tests in a process whose memory comes from another allocator.

    Torch renamed the variable in 2.9 and still reads the old name.
    """
    tests = (
        "tests/gpu/test_allocator.py",
        "tests/gpu/test_writes.py::test_a_weight_is_held_for_the_stream_that_reads_it",
        "tests/gpu/test_frozen.py::test_what_the_user_captures_makes_its_values_anew",
        "tests/gpu/test_frozen.py::test_values_made_on_one_stream_are_waited_for_on_another",
        *more,
    )
    return Part(name, about, "pytest", tests, 120, environment={"PYTORCH_CUDA_ALLOC_CONF": setting})


PARTS = (
    Part(
        "writes",
        "kept casts: every kind of write, every optimizer, streams, CUDA graphs",
        "pytest",
        ("tests/gpu/test_writes.py",),
        170,
    ),
    Part(
        "captures",
        "CUDA graphs: inductor's, graphed callables, those of another thread",
        "pytest",
        ("tests/gpu/test_captures.py",),
        170,
    ),
    Part(
        "frozen",
        "frozen graphs: writes, streams, captures, threads",
        "pytest",
        ("tests/gpu/test_frozen.py",),
        170,
    ),
    Part(
        "scaler",
        "float16: the scaler beside torch's, and no waiting for the device",
        "pytest",
        ("tests/gpu/test_grad_scaler.py",),
        170,
    ),
    Part(
        "models",
        "whole models against eager autocast: outputs, gradients, dtypes",
        "pytest",
        ("tests/gpu/test_parity_models.py",),
        190,
        is_parallel=True,
    ),
    Part(
        "ops",
        "op_db against eager autocast: outputs, gradients, dtypes",
        "pytest",
        ("tests/gpu/test_parity_ops.py",),
        190,
        is_parallel=True,
    ),
    _allocator(
        "expandable segments",
        "kept casts in memory that grows in place",
        "expandable_segments:True",
        "tests/gpu/test_captures.py::test_graphs_are_recorded_once_and_casts_made_once_per_write",
    ),
    _allocator(
        "cudaMallocAsync", "kept casts in memory of CUDA's allocator", "backend:cudaMallocAsync"
    ),
    Part(
        "fsdp2",
        "FSDP2 with one rank against eager autocast, bit for bit",
        "pytest",
        ("tests/gpu/test_fsdp.py",),
        120,
    ),
    Part(
        "stress",
        "threads that call and write one model",
        "program",
        (*_STRESS, "data", "--seconds", "6", "--device", "cuda"),
        120,
    ),
    Part(
        "speed",
        "native, amp_fx and the limit, timed in turns",
        "bench",
        (*_BENCH, "mlp", "gpt-decode", *_CONTENDERS, "--device", "cuda", "--repeats", "7"),
        100,
        modules=("transformers",),
    ),
    Part(
        "two blocks",
        "the models whose bytes are counted, timed: inference, training, CUDA graphs",
        "timed",
        (*_TIMED, "mlp", "decode", "gpt2", "llama", "vit", "experts", "few", "dit"),
        140,
    ),
    Part(
        "training speed",
        "a GPT of four layers: native, amp_fx and the limit, timed in turns",
        "bench",
        (*_BENCH, "gpt-train", *_TRAINING, "--device", "cuda", "--repeats", "7"),
        80,
        modules=("transformers",),
    ),
    Part(
        "bytes",
        "what the generated kernels move, counted",
        "bytes",
        ("-m", "tests.traffic", "bytes", "gpt2", "--mode", "training"),
        150,
        needs_cuda=False,
    ),
)
