"""Runs the snippets of the documentation, each in a new namespace after a reset of Dynamo.

``snippets.py [--inductor] FILE...`` runs files one after another, and
``snippets.py [--inductor] --program FILE ARGUMENT... ...`` runs programs with their arguments.
Without ``--inductor``, AOTAutograd runs the graphs, because nothing is timed.
"""

from __future__ import annotations

import builtins
import gc
import re
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def fenced(path: Path, language: str) -> list[str]:
    """Returns the blocks of a language on a page."""
    text = path.read_text(encoding="utf-8")
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", text)


def run_all(programs: list[list[str]], *, uses_inductor: bool) -> None:
    """Runs files with their arguments as if each was a program, and says which one failed."""
    import torch

    from amp_fx import weight_cache
    from amp_fx.backend import compilers, lower

    gc.freeze()  # as in tests/conftest.py
    gc.set_threshold(20_000, 20, 20)
    if not uses_inductor:
        for module in (compilers, lower):
            setattr(module, "uses_inductor", lambda *_: False)  # noqa: B010
    main_module = sys.modules["__main__"] = types.ModuleType("__main__")
    for path, *arguments in programs:
        torch._dynamo.reset()
        weight_cache.clear()
        sys.argv[:] = [path, *arguments]
        try:
            # Dynamo caches the module `__main__` for the process, so all programs run in one.
            vars(main_module).clear()
            vars(main_module).update(__name__="__main__", __file__=path, __builtins__=builtins)
            text = Path(path).read_text(encoding="utf-8")
            exec(compile(text, path, "exec"), vars(main_module))
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code:
                continue
            sys.stderr.write(f"{path} failed\n")
            raise


def main(arguments: list[str]) -> None:
    """Runs what the arguments name."""
    uses_inductor = "--inductor" in arguments
    if "--program" in arguments:
        starts = [i for i, word in enumerate(arguments) if word == "--program"]
        ends = [*starts[1:], len(arguments)]
        programs = [arguments[a + 1 : b] for a, b in zip(starts, ends, strict=True)]
        run_all(programs, uses_inductor=uses_inductor)
        return
    files = [[name] for name in arguments if name != "--inductor"]
    run_all(files, uses_inductor=uses_inductor)


if __name__ == "__main__":
    main(sys.argv[1:])
