"""``amp_fx.package``: an exported program, compiled ahead of time by AOTInductor."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram

from amp_fx.errors import CompileTargetError, ExportError, OptionError
from amp_fx.exporting.program import devices_in
from amp_fx.regions.state import no_autocast
from amp_fx.weights.freeze import batch_norm_folding

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

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
        CompileTargetError: It is no exported program.
        OptionError: The name does not end in ``.pt2``, or there is no such folder.
        ExportError: AOTInductor cannot compile it; says why.
    """
    if not isinstance(exported, ExportedProgram):
        raise CompileTargetError(
            f"amp_fx.package takes an exported program, not a {type(exported).__name__}: "
            "amp_fx.export(model, args) makes one"
        )
    target = Path(path)
    if target.suffix != SUFFIX or not target.parent.is_dir():
        raise OptionError(
            f"{target}: the name of a package must end in {SUFFIX}, in an existing folder"
        )
    configs = dict(inductor_configs or {})
    if freezing is None:
        freezing = all(device.type == "cpu" for device in devices_in(exported))
    configs.setdefault("freezing", freezing)
    folding = batch_norm_folding(fold_batch_norm) if freezing else contextlib.nullcontext()
    try:
        with torch.no_grad(), no_autocast(), folding:
            torch._inductor.aoti_compile_and_package(
                exported, package_path=str(target), inductor_configs=configs
            )
    except Exception as error:
        lines = str(error).strip().splitlines()
        what = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        raise ExportError(f"AOTInductor cannot compile this program: {what}") from error
    return target
