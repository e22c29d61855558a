"""``amp_fx.package``: compiled ahead of time, and run by torch alone, from Python and from C++."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx.errors import ArgumentTypeError, OptionError

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
]

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = 64


class Model(nn.Module):
    """Model with low products, a norm with float32 weights, and a region."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1234)
        self.a, self.norm, self.b = nn.Linear(COLUMNS, 128), nn.LayerNorm(128), nn.Linear(128, 8)

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.b(self.norm(self.a(x).relu()))


def example(rows: int) -> Tensor:
    return torch.linspace(-1, 1, rows * COLUMNS).reshape(rows, COLUMNS)


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Tensor]:
    """Returns a package, a saved program, and what five rows of ``example`` give in eager code."""
    folder = tmp_path_factory.mktemp("package")
    model = Model().eval()
    shapes = {"x": {0: torch.export.Dim("rows", min=2, max=64)}}
    program = amp_fx.export(model, (example(3),), output_dtype="autocast", dynamic_shapes=shapes)
    saved = folder / "saved.pt2"
    torch.export.save(program, saved)
    with torch.no_grad():
        return amp_fx.package(program, folder / "model.pt2"), saved, model(example(5))


ALONE = """
import sys, torch
for load in (torch._inductor.aoti_load_package, lambda path: torch.export.load(path).module()):
    y = load(sys.argv.pop(1))(torch.linspace(-1, 1, 320).reshape(5, 64))
    print(y.dtype, *y.double().flatten().tolist())
assert not any(name.split(".")[0] == "amp_fx" for name in sys.modules)
"""


@pytest.mark.slow
def test_files_are_loaded_by_torch_alone(packaged: tuple[Path, Path, Tensor]) -> None:
    package, saved, expected = packaged
    command = [sys.executable, "-W", "ignore", "-c", ALONE, str(package), str(saved)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        dtype, *numbers = line.split()
        assert dtype == "torch.bfloat16"
        found = torch.tensor([float(number) for number in numbers]).reshape(5, 8)
        torch.testing.assert_close(found, expected.float(), rtol=0.02, atol=0.02)


@pytest.mark.slow
def test_the_program_in_cpp_gives_the_numbers(
    packaged: tuple[Path, Path, Tensor], tmp_path: Path
) -> None:
    package, _, expected = packaged
    include, libraries = (Path(torch.__file__).parent / name for name in ("include", "lib"))
    binary = tmp_path / "run_package"
    command = [
        "g++",
        "-std=c++20",
        f"-isystem{include}",
        f"-isystem{include / 'torch' / 'csrc' / 'api' / 'include'}",
        str(ROOT / "docs" / "examples" / "run_package.cpp"),
        f"-L{libraries}",
        f"-Wl,-rpath,{libraries}",
        "-Wl,--no-as-needed",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
        "-o",
        str(binary),
    ]
    subprocess.run(command, check=True)
    done = subprocess.run(
        [str(binary), str(package), "5", str(COLUMNS)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    found = torch.tensor([float(number) for number in done.stdout.split()]).reshape(5, 8)
    ours = torch._inductor.aoti_load_package(str(package))(example(5))
    torch.testing.assert_close(found, ours.float(), rtol=0, atol=0)
    torch.testing.assert_close(found, expected.float(), rtol=0.02, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("freezing", [False, True])
def test_numbers_are_those_of_a_region_in_the_model(freezing: bool, tmp_path: Path) -> None:
    """Compares with a package of AOTInductor that has ``torch.autocast`` inside the model."""
    model, x = Model().eval(), example(4)
    native = tmp_path / "native.pt2"
    torch._inductor.aoti_compile_and_package(
        torch.export.export(model, (x,)),
        package_path=str(native),
        inductor_configs={"freezing": freezing},
    )
    program = amp_fx.export(model, (x,), output_dtype="autocast")
    ours = amp_fx.package(program, tmp_path / "ours.pt2", freezing=freezing)
    expected = torch._inductor.aoti_load_package(str(native))(x)
    found = torch._inductor.aoti_load_package(str(ours))(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("freezing", [False, True])
def test_a_package_is_half_as_large(freezing: bool, tmp_path: Path) -> None:
    size = 2048  # next to which a library of 2 MB does not count
    model, x = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size)), torch.randn(4, size)
    program = amp_fx.export(model, (x,), dtype="bf16")
    path = amp_fx.package(program, tmp_path / "model.pt2", freezing=freezing)
    assert path.stat().st_size < 0.6 * 2 * size * size * 4


def test_wrong_arguments(tmp_path: Path) -> None:
    program = amp_fx.export(nn.Linear(4, 4), (torch.zeros(2, 4),))
    with pytest.raises(OptionError, match=r"end in \.pt2"):
        amp_fx.package(program, tmp_path / "model.so")
    with pytest.raises(OptionError, match="in an existing folder"):
        amp_fx.package(program, tmp_path / "nowhere" / "model.pt2")
    with pytest.raises(ArgumentTypeError, match=r"create one with amp_fx\.export\(model, args\)"):
        amp_fx.package(nn.Linear(4, 4), tmp_path / "model.pt2")  # type: ignore[arg-type]
