"""Translates options of the backend into settings of inductor."""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.backend.added_passes import passes_of_users
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.passes.keep_eager_kernels import without_early_decompositions
from amp_fx.torch_private.autocast import privateuse1_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from amp_fx.options import Options

log = logging.getLogger("amp_fx.inner")


def numerics_config(options: Options) -> dict[str, Any]:
    """Returns the settings of inductor for the option ``numerics``, which is set.

    Inductor has a setting ``numerics`` since torch 2.15. Before, ``emulate_precision_casts`` rounds
    where eager code rounds. ``"eager"`` turns patterns off, which replace several ops by one, such
    as attention. It turns layout optimization off, which changes the order of sums. Random numbers
    are those of eager code.
    """
    from amp_fx.torch_private.inductor_config import config

    is_eager = options.has_eager_kernels
    mode = "strict" if is_eager else options.numerics
    settings: dict[str, Any] = {"numerics": mode}
    if not hasattr(config, "numerics"):
        settings = {"emulate_precision_casts": mode in ("strict", "strict_pointwise")}
    if is_eager:
        names = ("layout_optimization", "pattern_matcher")
        settings |= {**dict.fromkeys(names, False), "fallback_random": True}
    return settings


def inductor_config(options: Options) -> dict[str, Any]:
    """Returns the settings of inductor for the options of the backend."""
    from amp_fx.torch_private.inductor_config import TorchCompileInductorWrapper

    wrapper = TorchCompileInductorWrapper(options.mode, dict(options.inductor), None)  # type: ignore[no-untyped-call]
    # Graphs that a user's pass without a ``cache_key`` rewrites are not cached.
    is_cacheable = all(hasattr(each, "cache_key") for each in passes_of_users(options))
    caches = {} if is_cacheable else {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    numerics = {} if options.numerics is None else numerics_config(options)
    return {**numerics, **wrapper.config, **caches}


def device_types_of(example_inputs: Iterable[Any]) -> set[str]:
    """Returns the types of the devices of a graph's inputs."""
    return {t.device.type for t in example_inputs if isinstance(t, torch.Tensor)}


def uses_inductor(device_types: Collection[str], options: Options) -> bool:
    """Returns True if a graph with tensors on such devices is compiled by inductor.

    AOTAutograd runs graphs op by op that have CPU tensors if there is no C++ compiler, or tensors
    of an out-of-tree backend that has not registered a code generator.
    """
    if options.compiler != "inductor":
        return False
    # Programs can rename this device, so its name is read for each graph.
    new_device = privateuse1_name()
    if new_device in device_types and not _has_code_generator(new_device):
        return False
    if "cpu" not in device_types or has_cpp_compiler():
        return True
    _warn_no_compiler()
    return False


@functools.cache
def _has_code_generator(device_type: str) -> bool:
    """Returns True if inductor generates code for a device type; warns once if it does not."""
    from amp_fx.torch_private.inductor import has_code_generator

    if has_code_generator(device_type):
        return True
    log.warning(
        "inductor has no code generator for %r: continuing with 'aot_eager'. "
        "options={'compiler': 'aot_eager'} silences this message",
        device_type,
    )
    return False


@functools.cache
def _warn_no_compiler() -> None:
    log.warning(
        "no C++ compiler found, which inductor needs on CPU: graphs run op by op ('aot_eager') "
        "with the same casts, and cast weights in every call. amp_fx.audit, explain, export, "
        "GradScaler and `python -m amp_fx policy` need no compiler"
    )


def is_strict(options: Options) -> bool:
    """Returns True if generated code must round where eager code rounds.

    Both the options of the backend and the settings of the process can demand it.
    """
    from amp_fx.torch_private.inductor_config import config

    # The option of the backend wins over the setting of the process, as it does in inductor.
    if options.numerics is not None:
        return options.numerics != "default"
    passed = dict(options.inductor)
    names = ("numerics", "emulate_precision_casts")
    return any(passed.get(n, getattr(config, n, False)) not in (False, "default") for n in names)


def whole_ops(options: Options) -> contextlib.AbstractContextManager[None]:
    """Context in which AOTAutograd's tracing keeps the ops whose kernels ``"eager"`` calls."""
    is_eager = options.has_eager_kernels
    return without_early_decompositions() if is_eager else contextlib.nullcontext()


def check_devices(device_types: set[str]) -> None:
    """Warns once per device type for which ``numerics="eager"`` is not known to hold."""
    for name in sorted(device_types - {"cpu", "meta"}):
        _warn_strict(name)


@functools.cache
def _warn_strict(device_type: str) -> None:
    log.warning(
        "on %s, numerics='eager' means inductor's 'strict': which generated code has the bits of "
        "eager autocast is known for the CPU only",
        device_type,
    )
