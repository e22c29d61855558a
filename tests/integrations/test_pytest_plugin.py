"""The pytest plugin: snapshots are written, hold, and fail on what a user wants to hear of."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=32, act=nn.GELU):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, width), act(), nn.Linear(width, 8)
        self.noise = 0.0

    def forward(self, x, y):
        hidden = self.act(self.up(x))
        hidden = hidden + self.noise * hidden.detach().to(torch.float16).float().sin()
        return nn.functional.mse_loss(self.down(hidden).float(), y)

def inputs():
    return torch.randn(64, 16), torch.randn(64, 8)
"""
NAME = "amp_precision/test_it.py.test_net.1.json"
PLUGIN = ("-p", "pytest_amp_fx", "-p", "no:amp_fx")
TEST = """
import amp_fx, torch
from net import Net, inputs
from torch import nn

def test_net(amp_precision):
    torch.manual_seed(0)
    net = Net({args})
    {more}
    amp_precision.check(net, *inputs(), {options})
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def run(
    folder: Path, *flags: str, args: str = "", more: str = "pass", options: str = "dtype='bfloat16'"
) -> str:
    """Runs the test; gives what it printed and the exit code.

    Not by the fixture pytester: it takes modules that are first imported in the test out of
    ``sys.modules``, and two copies of parts of torch break the tests after this one.
    """
    text = TEST.replace("{args}", args).replace("{more}", more).replace("{options}", options)
    (folder / "net.py").write_text(NET)
    (folder / "test_it.py").write_text(text)
    flags = ("-q", "-s", "-p", "no:cacheprovider", "-p", "no:faulthandler", *PLUGIN, *flags)
    with redirect_stdout(io.StringIO()) as printed:
        code = pytest.main([*flags, f"--rootdir={folder}", str(folder)])
    for name in ("net", "test_it"):
        sys.modules.pop(name, None)
    return f"{printed.getvalue()}\nexit {int(code)}"


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The snapshot of the network as it is."""
    folder = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        assert "exit 0" in run(folder, "--amp-precision-update")
    return (folder / NAME).read_text()


@pytest.fixture
def file(folder: Path, snapshot: str) -> Path:
    """The file of the snapshot in the folder of a test."""
    path = folder / NAME
    path.parent.mkdir()
    path.write_text(snapshot)
    return path


def execute(python: str, folder: Path, *flags: str) -> str:
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_amp_fx"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "COLUMNS": "140"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    done = subprocess.run(
        [*command, *flags], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return f"{done.stdout}{done.stderr}\nexit {done.returncode}"


def test_a_missing_snapshot_names_the_flag_and_the_flag_writes_it(folder: Path) -> None:
    printed = run(folder)
    assert "exit 1" in printed
    assert "Run pytest with --amp-precision-update" in printed
    assert not (folder / "amp_precision").exists()
    assert "exit 0" in run(folder, "--amp-precision-update")
    [file] = (folder / "amp_precision").iterdir()
    assert file.name == "test_it.py.test_net.1.json"
    assert json.loads(file.read_text())["modules"]["up"]["ops"] == {"linear": {"bfloat16": 1}}
    assert "exit 0" in run(folder)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"options": "dtype='bfloat16', policy=amp_fx.preset('torch').with_ops({'gelu': 'fp32'})"}, ["gelu", "1 x bfloat16", "1 x float32"]),  # noqa: E501
        ({"args": "act=nn.SiLU"}, ["silu", "gelu"]),
        ({"args": "width=48"}, ["up.weight", "[32, 16]", "[48, 16]"]),
        ({"options": "dtype='float16'"}, ["dtype", "bfloat16", "float16"]),
        ({"options": "dtype='float16'", "more": "net.up.weight.data *= 1e6"}, ["suspect", "overflow"]),  # noqa: E501
        ({"more": "net.up.weight.data *= 1e20; net.down.weight.data *= 1e20"}, ["reference", "infinite or NaN"]),  # noqa: E501
    ],
    ids=["policy", "op", "width", "dtype", "suspect", "reference"],
)  # fmt: skip
@pytest.mark.usefixtures("file")
def test_a_change_fails_with_a_table(folder: Path, change: dict[str, str], told: list[str]) -> None:
    printed = run(folder, **change)
    assert "exit 1" in printed
    assert all(word in printed for word in told), printed


def test_an_error_may_differ_by_a_factor(folder: Path, file: Path) -> None:
    data = json.loads(file.read_text())
    measured = data["modules"]["up"]["error"]
    assert 2**-11 < measured < 2**-8  # one rounding to bfloat16
    for factor, code in ((3.9, 0), (4.5, 1), (1 / 1.5, 0)):
        data["modules"]["up"]["error"] = measured * factor
        file.write_text(json.dumps(data))
        assert f"exit {code}" in run(folder), factor
    data["modules"]["up"]["error"] = measured * 4.1
    file.write_text(json.dumps(data))
    assert "exit 0" in run(folder, options="dtype='bfloat16', factor=5.0")


def test_calls_and_tests_have_files_of_their_own(folder: Path) -> None:
    twice = "amp_precision.check(net, *inputs())"
    assert "exit 0" in run(folder, "--amp-precision-update", more=twice)
    names = {file.name for file in (folder / "amp_precision").iterdir()}
    assert names == {f"test_it.py.test_net.{n}.json" for n in (1, 2)}


def test_a_snapshot_of_another_torch(folder: Path, file: Path) -> None:
    """Counts of kernels are that torch's own; a dtype that changed is told, and which torch."""
    data = json.loads(file.read_text())
    data["torch"] = "1.0.0"
    data["modules"]["up"]["ops"] = {"linear": {"bfloat16": 2}, "aten::old": {"float32": 1}}
    file.write_text(json.dumps(data))
    assert "exit 0" in run(folder)
    data["modules"]["up"]["ops"] = {"linear": {"float32": 1}}
    file.write_text(json.dumps(data))
    printed = run(folder)
    assert "exit 1" in printed
    assert "The snapshot is of torch 1.0.0" in printed


def test_two_dtypes_are_refused(folder: Path) -> None:
    printed = run(folder, options="dtype=('float16', 'bfloat16')")
    assert "call check once for each" in printed


AUDIT = """
    step = nn.Linear(16, 4, dtype=torch.bfloat16)
    def loss(x):
        with torch.autocast("cpu", torch.bfloat16):
            return step(x).float().square().mean()
    amp_precision.audit(loss, torch.randn(8, 16), allow={allow})
    return
"""


@pytest.mark.parametrize(
    ("allow", "code", "told"),
    [
        ([], 1, "weights_low: step"),
        (["weights_low"], 0, "1 passed"),
        (["weight_low"], 1, "the kinds are update_lost, state_low"),
    ],
    ids=["found", "allowed", "unknown"],
)
def test_an_audit_fails_with_its_findings(
    folder: Path, allow: list[str], code: int, told: str
) -> None:
    printed = run(folder, more=AUDIT.replace("{allow}", str(allow)).strip())
    assert f"exit {code}" in printed
    assert told in printed


def test_pytest_does_not_import_torch_for_it(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text(
        "import sys\ndef test_it():\n    assert 'torch' not in sys.modules\n"
        "    assert 'amp_fx' not in sys.modules\n    assert 'pytest_amp_fx' in sys.modules\n"
    )
    assert "exit 0" in execute(sys.executable, tmp_path)
