"""Compiles generated Triton kernels for an architecture of GPUs, down to machine code."""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def cubin_failures(sources: Mapping[str, str], capability: int) -> dict[str, str]:
    """Why kernels do not compile for a compute capability; nothing for those that do.

    Relies on inductor's kernels being modules with a ``CachingAutotuner`` under the kernel's name,
    and on ``triton.compile`` taking a target. ``ptxas`` comes with Triton.

    Args:
        sources: The kernels' sources by name, as inductor generates them.
        capability: As in ``sm_90``: 90.
    """
    found = {name: _failure(name, source, capability) for name, source in sources.items()}
    return {name: why for name, why in found.items() if why is not None}


def _failure(name: str, source: str, capability: int) -> str | None:
    try:
        compiled = _compiled(name, source, capability)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return None if compiled.asm["cubin"] else "no machine code came out"


def _compiled(name: str, source: str, capability: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = _kernel(name, source)
    config, meta = kernel.configs[0], kernel.triton_meta
    constants = {**meta.get("constants", {}), **config.kwargs}
    return triton.compile(
        ASTSource(kernel.fn, dict(meta["signature"]), constants, meta["configs"][0]),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )


def _kernel(name: str, source: str) -> Any:
    """The kernel object; Triton reads the function's text from its file."""
    path = Path(_folder().name) / f"{name}.py"
    path.write_text(source.replace("triton_helpers.set_driver_to_gpu()", ""), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Of this process, and gone with it."""
    return tempfile.TemporaryDirectory(prefix="amp_fx_kernels_")
