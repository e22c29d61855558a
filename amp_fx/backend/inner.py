"""Chooses the compiler that a rewritten graph is handed to: inductor, aot_eager or none."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.backend.aot_eager import compile_with_aot_eager
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.backend.inductor import compile_cached_with_inductor
from amp_fx.backend.numerics import check_devices, is_strict
from amp_fx.graphs.shared_bodies import inline_shared_bodies
from amp_fx.torch_private.autocast import privateuse1_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

    from amp_fx.backend.backward import RefuseMixedDtypes
    from amp_fx.backend.caching import Caching
    from amp_fx.options import Options

    Compiled = Callable[..., Any]

log = logging.getLogger("amp_fx.inner")


def compile_inner(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    cache: Caching | None = None,
    *,
    joint_pass: type[RefuseMixedDtypes] | None = None,
) -> Compiled:
    """Compiles a rewritten graph; call it with autocast off.

    Args:
        gm: The graph; it is edited.
        example_inputs: Its inputs.
        options: The options of the backend.
        cache: Decides which values of weights are cached; None caches nothing.
        joint_pass: Runs over joint graphs of forward and backward.
    """
    if not options.uses_aot_autograd or is_strict(options):
        # Torch differentiates a body only while it traces, and adds up its gradients in another
        # order than eager code.
        inline_shared_bodies(gm)
    if options.compiler == "eager":
        return gm.forward
    if callable(options.compiler):
        compiled: Compiled = options.compiler(gm, example_inputs)
        return compiled
    if options.has_eager_kernels:
        devices = {t.device.type for t in example_inputs if isinstance(t, torch.Tensor)}
        check_devices(devices)
    if uses_inductor(example_inputs, options):
        return compile_cached_with_inductor(gm, example_inputs, options, cache, joint_pass)
    return compile_with_aot_eager(gm, example_inputs, options, cache, joint_pass)


def uses_inductor(example_inputs: Sequence[Any], options: Options) -> bool:
    """Returns True if a graph with such inputs is compiled by inductor."""
    return options.compiler == "inductor" and _can_use_inductor(example_inputs)


def _can_use_inductor(example_inputs: Sequence[Any]) -> bool:
    """Returns False if AOTAutograd must run the graph.

    It runs graphs with CPU tensors if there is no C++ compiler, and graphs with tensors of an
    out-of-tree backend that has not registered a code generator.
    """
    devices = {t.device.type for t in example_inputs if isinstance(t, torch.Tensor)}
    new_device = privateuse1_name()
    if new_device in devices and not _has_code_generator(new_device):
        return False
    if "cpu" not in devices or has_cpp_compiler():
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
    log.warning("no C++ compiler found, which inductor needs on CPU: continuing with 'aot_eager'")
