"""Random sequences of writes and calls of several graphs, against eager autocast."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from amp_fx import weight_cache
from tests.weights.nets import EVAL, HALF, TRAIN, Graph, compile_amp_fx, make_net
from tests.weights.writes import WRITES

PLAIN = (
    "mul_",
    "data_mul_",
    "data_replaced",
    "data_transposed",
    "data_swapped_inside",
    "foreach_copy_",
    "version_preserved",
    "set_",
    "numpy_of_detached",
    "parameter_replaced",
    "load_state_dict",
    "load_state_dict_assign",
    "layers_swapped",
    "bias_only",
)
PREPARED = (
    "averages_swapped_in_and_out",
    "averages_swapped_by_pointer",
    "double_buffer",
    "slices_swapped",
    "flat_buffer",
    "neighbour_in_flat_buffer",
)
GRAPHS: tuple[Graph, ...] = (TRAIN, EVAL, HALF)

actions = st.one_of(
    st.tuples(st.just("write"), st.sampled_from(PLAIN)),
    st.tuples(st.just("prepared"), st.just("")),
    st.tuples(st.just("call"), st.integers(0, len(GRAPHS) - 1)),
    st.tuples(st.just("cache"), st.sampled_from(("clear", "invalidate"))),
)


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@example("double_buffer", [("call", 0), ("call", 2), ("write", "mul_"), ("call", 0)])
@given(st.sampled_from(PREPARED), st.lists(actions, min_size=6, max_size=16))
def test_never_stale(prepared: str, sequence: list[tuple[str, object]]) -> None:
    torch._dynamo.reset()
    net, twin = make_net(), make_net()
    steps = [WRITES[prepared](net), WRITES[prepared](twin)]
    compiled = [compile_amp_fx(net, dtype=graph.dtype) for graph in GRAPHS]
    for i, (kind, what) in enumerate(sequence):
        if kind == "call":
            assert isinstance(what, int)
            GRAPHS[what].check(compiled[what], net, twin)
        elif kind == "cache":
            getattr(weight_cache, str(what))()
        elif kind == "prepared":
            for step in steps:
                step(i)
        else:
            for model in (net, twin):
                WRITES[str(what)](model)(i)
    for graph, program in zip(GRAPHS, compiled, strict=True):
        graph.check(program, net, twin)
