"""``amp_fx.explain``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from amp_fx.backend.numerics import is_strict
from amp_fx.devices.wide_products import described
from amp_fx.dtypes import dtype_name
from amp_fx.errors import AmpFxError, OptionError, UnsupportedError
from amp_fx.explanation.captured import first_lines, read_captured
from amp_fx.explanation.explanation import Explanation
from amp_fx.explanation.reading import read_graph
from amp_fx.explanation.running import fake_stand_in, run_stand_in, shared_weights
from amp_fx.explanation.table import bare_op
from amp_fx.exporting.entry import export
from amp_fx.exporting.program import REGION, WEIGHTS, copied_graph
from amp_fx.front.settings import NOT_COMPILED, RegionSettings, policy_for, unwrap
from amp_fx.graphs.bodies import graphs_in
from amp_fx.graphs.metadata import SITE
from amp_fx.graphs.records import AutocastSite
from amp_fx.graphs.values import remember_captured
from amp_fx.options import Options, check_device_dtype, default_dtype, to_dtype
from amp_fx.policies.policy import preset, preset_names
from amp_fx.progress import working
from amp_fx.second_call import takes_inputs_later
from amp_fx.torch_private.dynamo import BackendCompilerFailed, TorchRuntimeError
from amp_fx.torch_private.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import fx

    from amp_fx.explanation.running import Capture, StandIn
    from amp_fx.policies.policy import Policy


def explain_program(
    program: ExportedProgram,
    *,
    dtype: torch.dtype | str | None = None,
    policy: Policy | str | None = None,
) -> Explanation:
    """Explains a program of ``amp_fx.export``; exports other programs with it first."""
    if REGION not in program.graph_module.meta:
        program = export(program, dtype=dtype, policy="torch" if policy is None else policy)
    region = program.graph_module.meta[REGION]
    gm, state = copied_graph(program), region.state
    for graph in graphs_in(gm):
        for node in graph.nodes:
            if not SITE.is_on(node):
                SITE.put(node, AutocastSite(state, is_grad_enabled=False))
    _name_weights(gm, program)
    remember_captured(gm.graph)
    record = read_graph(gm, state)
    device, _, low = next(iter(record.autocast), " ").partition(" ")
    name = dict(record.modules).get("") or "exported program"
    return Explanation(name, region.policy.name, low, device, False, (record,))


def _name_weights(gm: fx.GraphModule, program: ExportedProgram) -> None:
    """Renames the placeholders of weights to their names in the model."""
    targets = {
        spec.arg.name: spec.target
        for spec in program.graph_signature.input_specs
        if spec.kind in WEIGHTS
    }
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.name in targets:
            node.target = targets[node.name]
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}


NEEDS_NUMBERS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    GuardOnDataDependentSymNode,
)
"""Errors of programs that depend on values of tensors, which fake tensors do not have."""


@overload
def explain(  # type: ignore[overload-overlap]  # a program can be called, to say that it cannot
    model: ExportedProgram,
    *,
    dtype: torch.dtype | str | None = None,
    policy: Policy | str | None = None,
    all: bool = False,
) -> Explanation: ...


@overload
def explain(
    model: Callable[..., Any],
    *,
    dtype: torch.dtype | str | None = None,
    policy: Policy | str | None = None,
    device_type: str | None = None,
    backward: bool = False,
    options: Mapping[str, Any] | None = None,
    all: bool = False,
) -> Callable[..., Explanation]: ...


@takes_inputs_later
def explain(
    model: Callable[..., Any] | ExportedProgram,
    *,
    dtype: torch.dtype | str | None = None,
    policy: Policy | str | None = None,
    device_type: str | None = None,
    backward: bool = False,
    options: Mapping[str, Any] | None = None,
    all: bool = False,  # noqa: A002
) -> Callable[..., Explanation] | Explanation:
    """Explains what amp_fx does to a model, without compiling or changing the model.

    ``amp_fx.explain(model)(x)`` captures a copy of the model with fake tensors; nothing is
    computed. The model may therefore be larger than memory: on the ``meta`` device, or created
    under a ``FakeTensorMode``. A program that depends on values of tensors (``if x.sum() > 0``)
    cannot be explained.

    Args:
        model: A module, a function, or an exported program. For a program that was compiled with
            ``amp_fx.compile`` or ``torch.compile``, the original is explained, with the settings of
            ``amp_fx.compile``. Side effects of functions occur, but tensors that a function refers
            to are not written. A program of ``amp_fx.export`` is explained directly; other exported
            programs are passed to ``amp_fx.export`` first.
        dtype: The dtype of low-precision ops, or its name. Defaults to the dtype of the policy,
            else ``amp_fx.options.default_dtype``, as for ``torch.compile``.
        policy: A ``Policy`` or the name of a preset. Defaults to PyTorch's policy.
        device_type: The device type to explain for, which this machine may lack. Defaults to that
            of the tensors; for tensors on ``meta``, to the accelerator, else the CPU.
        backward: Whether backward graphs are derived and explained.
        options: Options of the backend, such as ``{"weight_cache": False}``
            (``amp_fx.options.Options``).
        all: Whether the table includes views, which no policy affects.

    Returns:
        A function that receives the arguments of the model and returns an ``Explanation``. For an
        exported program, which contains its arguments, the ``Explanation``.

    Raises:
        OptionError: An option or argument is unknown, or has an invalid value.
        PolicyError: The policy is neither a ``Policy`` nor the name of a preset.
        ArgumentTypeError: The model is neither a module nor a function.
        UnsupportedError: Raised by the call if the model cannot be traced with its arguments.
    """
    if isinstance(model, ExportedProgram):
        if backward or device_type is not None or options is not None:
            raise OptionError(
                "backward, device_type and options do not apply to an exported program: omit them"
            )
        explanation = explain_program(model, dtype=dtype, policy=policy)
        return dataclasses.replace(explanation, shows_all=all)
    target, settings = unwrap(model, "amp_fx.explain")
    request = ExplainRequest(
        dtype=settings.dtype if dtype is None else to_dtype("dtype", dtype),
        policy=policy_for(policy, settings),
        device_type=device_type or settings.device_type,
        settings=None if settings is NOT_COMPILED else settings,
        backward=backward,
        options=_checked(options),
        shows_all=all,
    )

    @functools.wraps(target, assigned=("__doc__",), updated=())
    def explain_call(*args: Any, **kwargs: Any) -> Explanation:
        with working(f"explaining {_name(target)}"):
            return _explain(target, request, args, kwargs)

    return explain_call


@dataclasses.dataclass(frozen=True)
class ExplainRequest:
    """Arguments of ``explain``."""

    dtype: torch.dtype | None
    policy: Policy
    device_type: str | None = None
    settings: RegionSettings | None = None
    backward: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    shows_all: bool = False


def _checked(options: Mapping[str, Any] | None) -> dict[str, Any]:
    options = dict(options or {})
    for name in ("dtype", "policy"):
        if name in options:
            raise OptionError(
                f"options={{{name!r}: ...}} is not allowed: pass {name} as an argument of "
                "amp_fx.explain"
            )
    for name in ("compiler", "mode"):
        if name in options:
            raise OptionError(
                f"options={{{name!r}: ...}} is not allowed: amp_fx.explain does not generate code"
            )
    Options.parse(options)
    return options


def _explain(
    model: Callable[..., Any],
    request: ExplainRequest,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Explanation:
    stand_in = fake_stand_in(model, args, kwargs, request.device_type)
    options, region = _options_and_region(stand_in, request)
    capture = _capture(stand_in, options, region)
    if not capture.graphs:
        reasons = "; ".join(map(first_lines, capture.other_breaks)) or "is Dynamo disabled for it?"
        raise UnsupportedError(
            f"{_name(model)} has no graph: Dynamo captured no tensor op ({reasons})"
        )
    device = stand_in.device_type if stand_in.imagined else None
    try:
        records = read_captured(
            capture.graphs,
            dataclasses.replace(options, compiler="inductor"),
            device,
            foreign_ids=stand_in.foreign_ids,
            wants_backward=request.backward,
        )
        explanation = Explanation(
            model=_name(model),
            policy=label(request.policy),
            dtype=_dtype_of(capture, stand_in, request),
            device_type=stand_in.device_type,
            is_imagined=stand_in.imagined,
            graphs=tuple(records),
            other_breaks=tuple(map(first_lines, capture.other_breaks)),
            is_whole=capture.is_whole,
            shared=shared_weights(stand_in.program, capture.outputs),
            shows_all=request.shows_all,
        )
    finally:
        capture.graphs.clear()
    if device is None and stand_in.device_type == "cpu":
        explanation = dataclasses.replace(explanation, products=_products(explanation, options))
    return explanation


def _products(explanation: Explanation, options: Options) -> str:
    low = {bare_op(node.op) for node in explanation.nodes if node.dtype == explanation.dtype}
    return "" if is_strict(options) else described(getattr(torch, explanation.dtype), low)


def label(policy: Policy) -> str:
    """Returns the name of a policy, followed by ``", changed"`` if it differs from that preset."""
    base = preset(policy.name) if policy.name in preset_names() else preset("torch")
    is_changed = any(
        getattr(policy, changes) != getattr(base, changes) for changes in ("ops", "modules", "args")
    )
    return f"{policy.name}, changed" if is_changed else policy.name


def _name(model: Any) -> str:
    return getattr(model, "__qualname__", None) or type(model).__name__


def _options_and_region(
    stand_in: StandIn, request: ExplainRequest
) -> tuple[Options, Callable[[], contextlib.AbstractContextManager[Any]]]:
    """Returns the options of the backend, and the region around the call."""
    policy = request.policy
    dtype = request.dtype or policy.low_dtype(stand_in.device_type)
    dtype = dtype or default_dtype(stand_in.device_type)
    check_device_dtype(stand_in.device_type, dtype)
    if stand_in.imagined:
        tables = {**policy.tables, "cpu": policy.tables.get(stand_in.device_type, {})}
        policy = dataclasses.replace(policy, tables=tables)
    options = {**request.options, "dtype": dtype, "policy": policy, "compiler": "aot_eager"}
    region: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    if request.settings is not None and stand_in.imagined:
        options["output_dtype"] = "autocast"
    elif request.settings is not None:
        options["bare_region"] = False
        settings = dataclasses.replace(
            request.settings, dtype=dtype, device_type=stand_in.device_type
        )
        region = functools.partial(settings.region, None, (), {})
    return Options.parse(options), region


def _capture(
    stand_in: StandIn,
    options: Options,
    region: Callable[[], contextlib.AbstractContextManager[Any]],
) -> Capture:
    try:
        return run_stand_in(stand_in, options, region)
    except AmpFxError:
        raise
    except Exception as error:
        cause = _root_cause(error)
        if isinstance(cause, AmpFxError):
            raise cause from error
        if isinstance(error, TorchRuntimeError):
            error.__traceback__ = None  # only frames of Dynamo; the text contains the user's line
        raise _as_explain_error(stand_in.program, cause, str(error)) from error


def _root_cause(error: BaseException) -> BaseException:
    """Returns the original error inside an error of Dynamo."""
    if isinstance(error, BackendCompilerFailed):
        return _root_cause(error.inner_exception)
    cause = error.__cause__
    return cause if isinstance(cause, (*NEEDS_NUMBERS, AmpFxError)) else error


def _as_explain_error(model: Any, error: BaseException, text: str) -> UnsupportedError:
    inner = _INNER_ERROR.search(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if isinstance(error, NEEDS_NUMBERS):
        message = "it depends on values of tensors, and explain computes none"
        advice = "Explain the functions before and after such a line separately"
    else:
        message = (
            f"{inner[1]}: {inner[3]}" if inner else f"{type(error).__name__}: {' '.join(lines[:2])}"
        )
        advice = "Check that it runs with them uncompiled"
    frames = [(file, line) for file, line in _FRAME.findall(text) if _TORCH not in file]
    position = "; at {}:{}".format(*frames[-1]) if frames else ""
    return UnsupportedError(
        f"{_name(model)} cannot be traced with these arguments: {message.rstrip('.')}{position}. "
        f"{advice}"
    )


# Dynamo's message about an op that fails on fake tensors, and the position in the program.
_INNER_ERROR = re.compile(r"got (\w+)\((['\"])(.*?)\2\)")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = str(Path(torch.__file__).parent)


def _dtype_of(capture: Capture, stand_in: StandIn, request: ExplainRequest) -> str:
    device = "cpu" if stand_in.imagined else stand_in.device_type
    states = [graph.rewritten.state for graph in capture.graphs]
    enabled = [state for state in states if device in state.enabled]
    low = enabled[0].low_dtype(device) if enabled else request.dtype
    return dtype_name(low or default_dtype(stand_in.device_type))
