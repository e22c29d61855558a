"""``amp_fx.export`` and ``amp_fx.package`` (AOTInductor)."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram

from amp_fx.backend.rewrite import graph_devices, start_state
from amp_fx.csrc.guards import add_guards
from amp_fx.errors import ArgumentTypeError, OptionError, UnsupportedError, first_line
from amp_fx.exporting.other_device import check_inner_regions, check_region
from amp_fx.exporting.program import check_program
from amp_fx.exporting.rewriting import (
    ExportRegion,
    capture,
    devices_of,
    plain_output_dtypes,
    rewrite_program,
    with_whole_networks,
    written_dtypes,
)
from amp_fx.front.settings import RegionSettings
from amp_fx.options import Options
from amp_fx.progress import working
from amp_fx.regions.state import AutocastState, no_autocast
from amp_fx.torch_private.autocast import with_cuda_regions
from amp_fx.torch_private.patches import batch_norm_folding

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from torch import nn

    from amp_fx.policies.policy import Policy


WEIGHTS = ("low", "float32")


def export(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    device_type: str | None = None,
    dtype: torch.dtype | str | None = None,
    policy: Policy | str | os.PathLike[str] = "torch",
    output_dtype: str = "original",
    dynamic_shapes: Any = None,
    strict: bool = False,
    weights: str = "low",
    fold_batch_norm: bool = False,
) -> ExportedProgram:
    """Exports a model for inference in mixed precision, with casts as ops of the program.

    The program returns the results of the model under ``torch.autocast``, bit for bit if it is run
    eagerly. It needs neither a region nor amp_fx. Regions of ``torch.autocast`` inside the model
    apply with their dtypes. A region around the call of ``export`` applies as well; a disabled one
    (``enabled=False``) disables the casts.

    Args:
        model: A module, which is not changed, or a program of ``torch.export``. Such a program was
            captured outside of any region, so branches on dtypes were resolved for the original
            dtypes. For a compiled module, its original is exported, with the dtype and policy of
            ``amp_fx.compile``.
        args: Tuple of example inputs, as for ``torch.export.export``; None for a program.
        kwargs: Example keyword inputs.
        device_type: The device type that the program is for, such as ``"cuda"``; this machine need
            not have one. The program has the casts of that device, and stays where the model is.
            Defaults to the device type of the model.
        dtype: The dtype of low-precision ops, or its name. Defaults to the dtype of a region around
            the call, else the policy's, else ``amp_fx.options.default_dtype``.
        policy: The cast policy of each op: a ``Policy``, the name of a preset or the path of a
            policy file. The policy of a region around the call takes precedence.
        output_dtype: ``"original"`` returns outputs in the dtypes of the model without autocast;
            ``"autocast"`` returns the dtypes under autocast. A region around the call implies
            ``"autocast"``.
        dynamic_shapes: As for ``torch.export.export``.
        strict: As for ``torch.export.export``. Strict capture resolves branches on dtypes for the
            original dtypes.
        weights: ``"low"`` stores parameters, buffers and constants in a low dtype if they are only
            read in that dtype; tensors that share memory are stored once. ``"float32"`` does not
            convert weights; the program contains their casts.
        fold_batch_norm: Whether batch norms in evaluation mode are folded into the convolutions
            before them, which saves nodes and roundings. Results then differ from eager autocast's
            by roundings.

    Returns:
        A new program. Weights that are not converted share memory with the model.

    Raises:
        ArgumentTypeError: The model is neither a module nor an exported program.
        OptionError: An argument has an invalid value, or a region or the dtype of the policy is for
            another device type than the program.
        PolicyError: The policy is invalid.
        UnsupportedError: The model calls an op that autocast bans on its device.
        UnsupportedError: Part of the model can only run under ``torch.autocast``. The message names
            the node and the reason.
        PassError: A pass failed.
    """
    model, dtype, policy = _unwrapped(model, dtype, policy)
    options = _checked(dtype, policy, output_dtype, weights)
    if device_type is not None and device_type not in options.policy.tables:
        allowed = ", ".join(map(repr, options.policy.tables))
        raise OptionError(f"device_type={device_type!r} is not one of {allowed}")
    rewriting = {"stores_low": weights == "low", "folds_batch_norm": fold_batch_norm}
    if isinstance(model, ExportedProgram):
        if args is not None or kwargs is not None or dynamic_shapes is not None:
            raise OptionError(
                "args, kwargs and dynamic_shapes do not apply to an exported program: omit them"
            )
        with with_cuda_regions():
            return _export_program(model, options, device_type, rewriting)
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(
            f"amp_fx.export expects a torch.nn.Module or an exported program, got {model!r}"
        )
    if not isinstance(args, (tuple, list)):
        raise OptionError(
            f"the example inputs must be a tuple or list, got {type(args).__name__}: write "
            "amp_fx.export(model, (x,))"
        )
    with with_cuda_regions():
        return _export_module(
            model,
            tuple(args),
            kwargs,
            options,
            device_type,
            rewriting,
            dynamic_shapes=dynamic_shapes,
            strict=strict,
        )


def _unwrapped(model: Any, dtype: Any, policy: Any) -> tuple[Any, Any, Any]:
    """Returns the original of a compiled model, and dtype and policy of ``amp_fx.compile``.

    A dtype or policy that was passed takes precedence.
    """
    settings = getattr(model, "_amp_fx_settings", None)
    model = getattr(model, "_orig_mod", model)
    if isinstance(settings, RegionSettings):
        dtype = settings.dtype if dtype is None else dtype
        policy = settings.policy or policy if policy == "torch" else policy
    return model, dtype, policy


def _checked(dtype: Any, policy: Any, output_dtype: Any, weights: Any) -> Options:
    if weights not in WEIGHTS:
        raise OptionError(f"weights={weights!r} is not one of {', '.join(map(repr, WEIGHTS))}")
    options = {"policy": policy, "output_dtype": output_dtype, "compiler": "eager"}
    return Options.parse(options if dtype is None else {**options, "dtype": dtype})


@working("exporting a program")
def _export_program(
    program: ExportedProgram,
    options: Options,
    device_type: str | None,
    rewriting: Mapping[str, Any],
) -> ExportedProgram:
    devices = graph_devices(program.graph_module)
    region = _region(devices, options, device_type, is_captured_inside=False)
    if device_type is None:
        check_inner_regions(program.graph_module, devices)
    if _restores_outputs(options):
        output_dtypes = plain_output_dtypes(program, region)
    else:
        output_dtypes = written_dtypes(program)
    return rewrite_program(program, region, output_dtypes, **rewriting)


@working("exporting a module")
def _export_module(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    options: Options,
    device_type: str | None,
    rewriting: Mapping[str, Any],
    **export_options: Any,
) -> ExportedProgram:
    devices = devices_of(model, args, kwargs)
    region = _region(devices, options, device_type, is_captured_inside=True)
    export_options["device"] = region.device
    program = capture(model, args, kwargs, region.state, **export_options)
    if device_type is None:
        check_inner_regions(program.graph_module, devices)
    output_dtypes = written_dtypes(program)
    if _restores_outputs(options) and region.state.enabled:
        plain = capture(model, args, kwargs, None, **export_options)
        output_dtypes = plain_output_dtypes(plain, region)
        if len(output_dtypes) != len(program.graph_signature.output_specs):
            raise UnsupportedError(
                f"the model returns {len(program.graph_signature.output_specs)} outputs under "
                f"autocast and {len(output_dtypes)} without it: pass output_dtype='autocast'"
            )
    return rewrite_program(program, region, output_dtypes, **rewriting)


def _region(
    devices: set[torch.device],
    options: Options,
    device_type: str | None,
    *,
    is_captured_inside: bool,
) -> ExportRegion:
    is_elsewhere = device_type is not None and {device_type} != {d.type for d in devices}
    device = torch.device(device_type, 0) if device_type is not None and is_elsewhere else None
    used = devices if device is None else {device}
    check_region(used, options, is_chosen=device_type is not None)
    if not {each.type for each in used} <= {"cpu"} and torch.version.cuda is None:
        add_guards()
    state = start_state(used, options)
    if state.policy is not None:
        state = state.with_policy(with_whole_networks(state.policy))
    policy = state.policy or with_whole_networks(options.policy)
    is_bare = not is_captured_inside and not AutocastState.ambient().enabled
    return ExportRegion(state, policy, is_bare, device)


def _restores_outputs(options: Options) -> bool:
    return options.output_dtype == "original" and not AutocastState.ambient().enabled


SUFFIX = ".pt2"


def package(
    exported: ExportedProgram,
    path: str | os.PathLike[str],
    *,
    freezing: bool | None = None,
    fold_batch_norm: bool = False,
    inductor_configs: Mapping[str, Any] | None = None,
) -> Path:
    """Compiles an exported program into a file that runs without amp_fx and without Python.

    Load the file with ``torch._inductor.aoti_load_package(path)``, or in C++ with
    ``torch::inductor::AOTIModelPackageLoader``. Calls
    ``torch._inductor.aoti_compile_and_package`` and packs weights on the CPU. The file requires the
    CPU instructions of this machine.

    Args:
        exported: A program, such as that of ``amp_fx.export``.
        path: Path of the file, with the suffix ``.pt2``. An existing file is replaced.
        freezing: Whether casts and packed weights are computed at compile time. Defaults to True if
            the whole program is on the CPU. For small models, a call takes a third less time.
        fold_batch_norm: Whether freezing folds batch norms into convolutions, which changes
            roundings.
        inductor_configs: Settings of inductor, as for ``aoti_compile_and_package``.

    Returns:
        The path of the file.

    Raises:
        ArgumentTypeError: ``exported`` is not an exported program.
        OptionError: The path does not end in ``.pt2``, or its folder does not exist.
        UnsupportedError: AOTInductor cannot compile the program. The message contains the reason.
    """
    check_program("package", exported)
    target = Path(path)
    if target.suffix != SUFFIX or not target.parent.is_dir():
        raise OptionError(
            f"path={str(target)!r}: the path must end in {SUFFIX} and be in an existing folder"
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
        raise UnsupportedError(
            f"AOTInductor cannot compile this program: {first_line(error)}"
        ) from error
    return target
