"""``amp_fx.export``; ``amp_fx.package`` and ``amp_fx.for_onnx``, for AOTInductor and ONNX."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram

from amp_fx.backend.pipeline import run_passes
from amp_fx.backend.rewrite import graph_devices, start_state_on
from amp_fx.errors import ArgumentTypeError, OptionError, UnsupportedError
from amp_fx.exporting.program import clean, copied_graph, with_graph, written_inputs
from amp_fx.exporting.rewriting import (
    Region,
    capture,
    devices_of,
    plain_output_dtypes,
    rewrite_program,
    written_dtypes,
)
from amp_fx.front.settings import RegionSettings
from amp_fx.options import Options
from amp_fx.passes.widen_ops import WidenOps
from amp_fx.progress import working
from amp_fx.regions.state import AutocastState, no_autocast
from amp_fx.weights.packed import batch_norm_folding

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from torch import nn

    from amp_fx.policies.policy import Policy


WEIGHTS = ("low", "float32")


def export(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    policy: Policy | str | os.PathLike[str] = "torch",
    output_dtype: str = "original",
    dynamic_shapes: Any = None,
    strict: bool = False,
    weights: str = "low",
) -> ExportedProgram:
    """Exports a model for inference in mixed precision: ``torch.export`` with the casts in it.

    The program computes what the model does under ``torch.autocast``, bit for bit if it is run as
    it is, without any region around it and without amp_fx: casts are ops of it. Regions of
    ``torch.autocast`` inside of the model hold, with their dtypes; so does one around the call of
    ``export``, and one that is off (``enabled=False``) switches the casts off.

    Args:
        model: A module, which stays as it was, or a program that ``torch.export`` has made of
            one; the latter was captured outside of any region, and Python code that looked at
            dtypes was baked in with what it saw then. Of a module that was compiled, what was
            compiled, with the dtype and policy of ``amp_fx.compile``.
        args: Example inputs, a tuple, as for ``torch.export.export``; none for a program.
        kwargs: Likewise.
        dtype: What low-precision ops run in, or its name. By default that of a region around the
            call, else what the policy says, else ``amp_fx.options.default_dtype``.
        policy: Which op is cast how: a ``Policy``, the name of a preset or the path of a policy
            file; one of a region around the call comes first.
        output_dtype: ``"original"``: outputs have the dtypes that the model gives without
            autocast; ``"autocast"``: those that autocast leaves. Under a region around the call
            they are autocast's.
        dynamic_shapes: As for ``torch.export.export``.
        strict: Likewise. Strict capture sees all of the model in float32, as a program given does.
        weights: ``"low"``: parameters, buffers and constants that are read in one low dtype only
            are stored in it, at half the bytes, those that share memory once; ``"float32"``:
            all stay as they are, with their casts in the program.

    Returns:
        A program of its own. Weights that stay as they are share their memory with the model's.

    Raises:
        ArgumentTypeError: The model is neither a module nor an exported program.
        OptionError: An argument has a value that is not allowed.
        PolicyError: The policy is none of these.
        BannedOpError: The model makes an op that autocast bans on its device.
        UnsupportedError: Part of the model can only run under ``torch.autocast`` itself; names the
            node, and why.
        PassError: A pass failed.
    """
    model, dtype, policy = _unwrapped(model, dtype, policy)
    options = _checked(dtype, policy, output_dtype, weights)
    if isinstance(model, ExportedProgram):
        if args is not None or kwargs is not None or dynamic_shapes is not None:
            raise OptionError(
                "args, kwargs and dynamic_shapes are for a module; an exported program has its own"
            )
        return _export_program(model, options, stores_low=weights == "low")
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(
            f"amp_fx.export takes a torch.nn.Module or an exported program, not {model!r}"
        )
    if not isinstance(args, (tuple, list)):
        raise OptionError(
            "the example inputs are not a tuple (or list), but "
            f"{type(args).__name__}: write amp_fx.export(model, (x,))"
        )
    return _export_module(
        model,
        tuple(args),
        kwargs,
        options,
        stores_low=weights == "low",
        dynamic_shapes=dynamic_shapes,
        strict=strict,
    )


def _unwrapped(model: Any, dtype: Any, policy: Any) -> tuple[Any, Any, Any]:
    """Returns what was compiled; takes the settings of ``amp_fx.compile`` if none are given."""
    settings = getattr(model, "_amp_fx_settings", None)
    model = getattr(model, "_orig_mod", model)
    if isinstance(settings, RegionSettings):
        dtype = settings.dtype if dtype is None else dtype
        policy = settings.policy or policy if policy == "torch" else policy
    return model, dtype, policy


def _checked(dtype: Any, policy: Any, output_dtype: Any, weights: Any) -> Options:
    if weights not in WEIGHTS:
        raise OptionError(f"weights={weights!r} is not one of {', '.join(map(repr, WEIGHTS))}")
    given = {"policy": policy, "output_dtype": output_dtype, "compiler": "eager"}
    return Options.parse(given if dtype is None else {**given, "dtype": dtype})


@working("exporting a program")
def _export_program(
    program: ExportedProgram, options: Options, *, stores_low: bool
) -> ExportedProgram:
    region = _region(graph_devices(program.graph_module), options, is_captured_inside=False)
    if _restores_outputs(options):
        output_dtypes = plain_output_dtypes(program, region)
    else:
        output_dtypes = written_dtypes(program)
    return rewrite_program(program, region, output_dtypes, stores_low=stores_low)


@working("exporting a module")
def _export_module(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    options: Options,
    *,
    stores_low: bool,
    **export_options: Any,
) -> ExportedProgram:
    region = _region(devices_of(model, args, kwargs), options, is_captured_inside=True)
    program = capture(model, args, kwargs, region.state, **export_options)
    output_dtypes = written_dtypes(program)
    if _restores_outputs(options) and region.state.enabled:
        plain = capture(model, args, kwargs, None, **export_options)
        output_dtypes = plain_output_dtypes(plain, region)
        if len(output_dtypes) != len(program.graph_signature.output_specs):
            raise UnsupportedError(
                f"the model returns {len(program.graph_signature.output_specs)} outputs under "
                f"autocast and {len(output_dtypes)} without it: ask for output_dtype='autocast'"
            )
    return rewrite_program(program, region, output_dtypes, stores_low=stores_low)


def _region(devices: set[torch.device], options: Options, *, is_captured_inside: bool) -> Region:
    state = start_state_on(devices, options)
    is_bare = not is_captured_inside and not AutocastState.ambient().enabled
    return Region(state, state.policy or options.policy, is_bare)


def _restores_outputs(options: Options) -> bool:
    return options.output_dtype == "original" and not AutocastState.ambient().enabled


def for_onnx(
    exported: ExportedProgram, *, without_kernels: Iterable[torch.dtype] = (torch.bfloat16,)
) -> ExportedProgram:
    """A program whose ops ONNX can name and its runtime can run, for ``torch.onnx.export``.

    ``torch.onnx.export(amp_fx.for_onnx(exported), dynamo=True)``. PyTorch's norms take a low input
    with float32 weights, which ONNX does not; onnxruntime has no kernels for bfloat16 on the CPU.
    Such ops compute in float32, and their results are rounded: the numbers are the same up to the
    order of sums. Weights stay stored low, and the file small.

    Args:
        exported: A program, such as ``amp_fx.export`` gives; it stays as it is.
        without_kernels: The low dtypes that the runtime cannot compute in. Give none where it has
            kernels for bfloat16 (onnxruntime on CUDA).

    Raises:
        ArgumentTypeError: It is no exported program.
    """
    _check_program("for_onnx", exported)
    with no_autocast():
        exported = exported.run_decompositions({})  # opens ops that write, and no others
        gm = copied_graph(exported)
        run_passes(gm, [WidenOps(tuple(without_kernels))], check=False)
    clean(gm)
    return with_graph(exported, gm, written_inputs(exported.graph_signature))


def _check_program(function: str, given: object) -> None:
    if not isinstance(given, ExportedProgram):
        raise ArgumentTypeError(
            f"amp_fx.{function} takes an exported program, not a {type(given).__name__}: "
            "amp_fx.export(model, args) makes one"
        )


SUFFIX = ".pt2"


def package(
    exported: ExportedProgram,
    path: str | os.PathLike[str],
    *,
    freezing: bool | None = None,
    fold_batch_norm: bool = False,
    inductor_configs: Mapping[str, Any] | None = None,
) -> Path:
    """Compiles an exported program into a file that runs without amp_fx, and without Python.

    ``torch._inductor.aoti_load_package(path)`` loads it, in C++
    ``torch::inductor::AOTIModelPackageLoader``. It is what
    ``torch._inductor.aoti_compile_and_package`` makes, with weights packed on the CPU: the file is
    for machines with the instructions of this one.

    Args:
        exported: A program, such as ``amp_fx.export`` gives.
        path: Where it goes; the name ends in ``.pt2``. A file that is there is replaced.
        freezing: Whether casts, packed and laid out weights are computed now, once; None: if all
            of the program is on the CPU. On small models it takes a third off the time of a call.
        fold_batch_norm: Whether freezing folds batch norms into convolutions, which changes
            roundings.
        inductor_configs: More settings for inductor, as for ``aoti_compile_and_package``.

    Returns:
        The path of the file.

    Raises:
        ArgumentTypeError: It is no exported program.
        OptionError: The name does not end in ``.pt2``, or there is no such folder.
        UnsupportedError: AOTInductor cannot compile it; says why.
    """
    _check_program("package", exported)
    target = Path(path)
    if target.suffix != SUFFIX or not target.parent.is_dir():
        raise OptionError(
            f"{target}: the name of a package must end in {SUFFIX}, in an existing folder"
        )
    from amp_fx.torch_private.inductor import aoti_compile_and_package

    configs = dict(inductor_configs or {})
    if freezing is None:
        freezing = all(device.type == "cpu" for device in graph_devices(exported.graph_module))
    configs.setdefault("freezing", freezing)
    folding = batch_norm_folding(fold_batch_norm) if freezing else contextlib.nullcontext()
    try:
        with torch.no_grad(), no_autocast(), folding:
            aoti_compile_and_package(exported, package_path=str(target), inductor_configs=configs)
    except Exception as error:
        lines = str(error).strip().splitlines()
        what = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        raise UnsupportedError(f"AOTInductor cannot compile this program: {what}") from error
    return target
