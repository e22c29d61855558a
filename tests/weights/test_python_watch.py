"""The tests of kept casts once more where the compiled part is switched off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from amp_fx import native
from amp_fx.weights import python_watch

ROOT = Path(__file__).resolve().parents[2]
FILES = ("writes", "verify", "threads", "lifetime", "unseen_writes")
REST = (
    *("bad_input", "bodies", "cuda_like", "gradients", "optimizers", "outputs"),
    *("random_sequences", "sharing"),
)

SECOND_PAIR = "train-float16"
"""Of the graphs that ``test_writes`` looks through."""


def run_tests(*names: str, only: str = "") -> None:
    files = [f"tests/weights/test_{name}.py" for name in names]
    files += ["-k", only] if only else []
    command = [sys.executable, "-m", "pytest", "-q", "--show-capture=no", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *files],
        cwd=ROOT,
        env=os.environ | {native.SWITCH: "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]


def test_most_tests_of_kept_casts() -> None:
    """Every kind of write with one of the two pairs of graphs: what tells of it is the same."""
    run_tests(*FILES, only=f"not {SECOND_PAIR}")


@pytest.mark.slow
def test_the_other_tests_of_kept_casts() -> None:
    run_tests("writes", only=SECOND_PAIR)
    run_tests(*REST)


def test_other_threads_that_run_are_told_from_those_that_wait() -> None:
    """A storage is made copy-on-write only where no other thread can be in an op."""
    program = (
        "import threading, time\n"
        "from amp_fx.weights.python_watch import other_threads_wait\n"
        "print(other_threads_wait())\n"
        "event = threading.Event()\n"
        "threading.Thread(target=event.wait, daemon=True).start()\n"
        "time.sleep(0.2)\n"
        "print(other_threads_wait())\n"
        "def work():\n"
        "    while not event.is_set(): pass\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "print(other_threads_wait())\n"
        "event.set()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "True", "False"]


def test_it_has_what_the_compiled_part_has() -> None:
    compiled = native.load()
    if compiled is None:
        pytest.skip("the compiled part cannot be built")
    # What frozen graphs take, and steps that write copies, are not for Python.
    left_out = {"start", "finish"}
    for kind in ("Copy", "Look"):
        ours, theirs = getattr(python_watch, kind), getattr(compiled, kind)
        public = {name for name in vars(theirs) if name[0] != "_"} - left_out
        assert public <= {*dir(ours), "low", "hits", "refreshes", "is_suspect", "is_distrusted"} | {
            "found_mismatch"
        }
    functions = {name for name in vars(compiled) if name[0] != "_"} - {"begin_step", "end_step"}
    assert functions <= set(dir(python_watch))
