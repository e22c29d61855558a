"""The pytest plugin: the fixture ``amp_precision`` checks the precision of a step.

pytest imports this file at every start. It is outside of the package because ``import amp_fx``
imports torch; both are imported when a test uses the fixture.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from amp_fx.numerics.audit.report import AuditReport
    from amp_fx.numerics.report import AccuracyReport

FOLDER = "amp_precision"
"""The folder of snapshots, next to the test file."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--amp-precision-update``."""
    parser.getgroup("amp_fx").addoption(
        "--amp-precision-update",
        action="store_true",
        help="write the snapshots of amp_precision.check instead of comparing with them",
    )


@pytest.fixture
def amp_precision(request: pytest.FixtureRequest) -> AmpPrecision:
    """Compares a step with a snapshot (``AmpPrecision.check``), or audits it (``audit``)."""
    return AmpPrecision(request.node, update=request.config.getoption("amp_precision_update"))


class AmpPrecision:
    """The snapshots of one test.

    Args:
        test: The test.
        update: Whether to write the snapshots instead of comparing with them.
    """

    def __init__(self, test: pytest.Item, *, update: bool) -> None:
        self._test, self._update = test, update
        self._calls = 0

    def path(self) -> Path:
        """Returns the file of the latest call: ``amp_precision/test_net.py.test_loss.1.json``."""
        file = self._test.path
        name = quote(self._test.nodeid.partition("::")[2].replace("::", "."), safe="[]=, ")
        return file.parent / FOLDER / f"{file.name}.{name}.{self._calls}.json"

    def check(
        self, step: Callable[..., Any], *inputs: Any, factor: float | None = None, **options: Any
    ) -> AccuracyReport:
        """Runs ``amp_fx.accuracy`` and fails if the report differs from the snapshot.

        Suspects, dtypes of ops and shapes of parameters must be equal. Errors may differ by a
        factor, because kernels of other machines round elsewhere.

        Args:
            step: A module or a function.
            inputs: The arguments of the step.
            factor: The largest ratio of errors; 4 by default.
            options: Options of ``amp_fx.accuracy``, with one dtype.

        Returns:
            The report.
        """
        from amp_fx.numerics import snapshot
        from amp_fx.numerics.entry import accuracy
        from amp_fx.reports import printed

        __tracebackhide__ = True
        self._calls += 1
        examine: Callable[..., AccuracyReport] = accuracy(step, **options)
        report = examine(*inputs)
        new, path = snapshot.of(report), self.path()
        if self._update:
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(new, indent=1, allow_nan=False) + "\n", encoding="utf-8")
            return report
        if not path.is_file():
            pytest.fail(
                f"There is no snapshot {FOLDER}/{path.name}. Run pytest with "
                "--amp-precision-update to write it, and commit it.",
                pytrace=False,
            )
        old = json.loads(path.read_text(encoding="utf-8"))
        changes = snapshot.changes(old, new, snapshot.FACTOR if factor is None else factor)
        if changes:
            pytest.fail(
                f"The precision of {report.model} is not that of {FOLDER}/{path.name}:\n\n"
                f"{printed(snapshot.table(changes))}\n{snapshot.where_made(old, new)}\n"
                "Run pytest with --amp-precision-update if this is meant.",
                pytrace=False,
            )
        return report

    def audit(
        self,
        step: Callable[..., Any],
        *inputs: Any,
        allow: Collection[str] = (),
        optimizer: Any = None,
        scaler: Any = None,
    ) -> AuditReport:
        """Runs ``amp_fx.audit`` and fails if there are findings.

        Args:
            step: A training step, or a module or function that returns the loss.
            inputs: The arguments of the step.
            allow: Kinds of findings that are no failure, such as ``"router_low"``.
            optimizer: As for ``amp_fx.audit``.
            scaler: As for ``amp_fx.audit``.

        Returns:
            The report.
        """
        from amp_fx.numerics.audit.entry import audit
        from amp_fx.numerics.audit.report import REPAIRS

        __tracebackhide__ = True
        unknown = sorted(set(allow) - set(REPAIRS))
        if unknown:
            pytest.fail(f"allow={unknown}: the kinds are {', '.join(REPAIRS)}", pytrace=False)
        report = audit(step, optimizer, scaler)(*inputs)
        if any(finding.kind not in allow for finding in report.findings):
            pytest.fail(str(report), pytrace=False)
        return report
