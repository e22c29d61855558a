"""Importing amp_fx, and every public name, changes nothing in torch or in the process."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, random, sys, threading, types

import numpy
import torch
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed
import torch.utils.checkpoint

known = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torch"}

def attributes():
    found = {}
    for name, module in known.items():
        for key, value in list(vars(module).items()):
            found[name, key] = value
            if isinstance(value, type) and str(value.__module__).startswith("torch"):
                found |= {(name, key, inner): item for inner, item in list(vars(value).items())}
    return found

def process():
    rng = torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())
    paths = sys.meta_path[:], sys.path[:], sys.path_hooks[:]
    hooks = sys.excepthook, sys.unraisablehook, threading.enumerate(), dict(os.environ)
    return *rng, *paths, *hooks, torch.get_num_threads(), torch.get_default_dtype()

before, state = attributes(), process()
import amp_fx
import amp_fx.integrations
assert process() == state
assert "rich" not in sys.modules
for name in amp_fx.__all__:
    getattr(amp_fx, name)
assert process() == state
assert "rich.text" not in sys.modules
after = attributes()
changed = [key for key in before if key not in after or after[key] is not before[key]]
# Imports add submodules to packages, and the registration of custom ops adds a namespace.
added = [k for k in after if k not in before and not isinstance(after[k], types.ModuleType)]
print([key for key in changed if not key[-1].startswith("__")], added)
"""


def test_importing_changes_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[] []\n"
