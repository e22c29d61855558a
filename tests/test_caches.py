"""On-disk caches: a second process compiles nothing again, other options do not hit.

Relies on ``torch._dynamo.utils.counters`` counting hits and misses of AOTAutograd's cache and
of inductor's, and on both keys holding the graph that we hand over.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import fx

from amp_fx import csrc
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.backend.disk_caches import keyed, keyed_graph, version
from amp_fx.options import Options
from amp_fx.passes.keep_eager_kernels import FALLBACK
from amp_fx.torch_private.inductor_passes import ROUNDED

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not has_cpp_compiler(), reason="no C++ compiler")

PROGRAM = """
import json, sys
import torch
from torch._dynamo.utils import counters

torch.manual_seed(0)
linear = torch.nn.Linear(4, 4)

def plain(x):
    return linear(x)

def opaque(x):
    return torch.func.vmap(lambda row: row @ linear.weight)(x)

found = {}
x = torch.randn(3, 4)
for name in json.loads(sys.argv[1]):
    program, dtype = name.split()
    torch._dynamo.reset()
    counters.clear()
    options = {"dtype": dtype, "fallback": False, "output_dtype": "autocast"}
    result = torch.compile(globals()[program], backend="amp_fx", options=options)(x)
    result.sum().backward()
    found[name] = [
        counters["aot_autograd"]["autograd_cache_hit"],
        counters["aot_autograd"]["autograd_cache_miss"],
        counters["aot_autograd"]["autograd_cache_bypass"],
        counters["inductor"]["fxgraph_cache_bypass"],
    ]
print(json.dumps(found))
"""

HIT, MISS = [1, 0, 0, 0], [0, 1, 0, 0]


def run(folder: Path, *names: str) -> dict[str, Any]:
    """Runs programs in a process of their own: what the caches said to each."""
    # In an empty folder our C++ would be built first, which takes longer than all the rest.
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    env |= {csrc.SWITCH: "0"}
    command = [sys.executable, "-c", PROGRAM, json.dumps(names)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return counts


@pytest.mark.slow
def test_second_process_hits_and_other_decisions_miss(tmp_path: Path) -> None:
    first = run(tmp_path, "plain bfloat16", "opaque bfloat16")
    assert first == {"plain bfloat16": MISS, "opaque bfloat16": MISS}
    second = run(tmp_path, "plain bfloat16", "plain float16", "opaque bfloat16")
    assert second == {"plain bfloat16": HIT, "plain float16": MISS, "opaque bfloat16": HIT}


def tag_of(*contexts: Any) -> str:
    config: Any = torch.compiler.config
    with contextlib.ExitStack() as stack, config.patch(cache_key_tag="mine"):
        for context in contexts:
            stack.enter_context(context)
        return str(config.cache_key_tag)


def test_keys_contain_what_decides_how_graphs_are_rewritten() -> None:
    assert tag_of() == "mine"
    given: list[dict[str, Any]] = [
        {},
        {"numerics": "strict"},
        {"numerics": "eager"},
        {"weight_grads": "float32"},
        {"narrow_gathers": False},
        {"disable_passes": ["decompose_attention"]},
    ]
    tags = [tag_of(keyed(Options.parse(options))) for options in given]
    assert len({*tags}) == len(given)
    assert all(tag.startswith("mine amp_fx: ") and version() in tag for tag in tags)
    assert tag_of(keyed(Options())) == tags[0]


def test_keys_contain_marks_and_strides() -> None:
    def graph(**marks: Any) -> fx.GraphModule:
        gm = fx.symbolic_trace(lambda x: (x.sin(),))
        for node in gm.graph.find_nodes(op="call_method", target="sin"):
            node.meta.update(marks)
        return gm

    strided = graph()
    strided.graph.output_node().meta["original_output_strides"] = [(2, 1)]
    graphs = [graph(), graph(**{FALLBACK: True}), graph(**{ROUNDED: True}), strided]
    assert len({tag_of(keyed_graph(gm)) for gm in graphs}) == len(graphs)
    assert tag_of(keyed_graph(graph())) == tag_of(keyed_graph(graph()))
