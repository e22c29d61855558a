"""pytest plugin: the fixture ``amp_precision`` audits the precision of a training step.

A project loads it in its ``conftest.py`` with ``pytest_plugins = ["amp_fx.pytest"]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection

    from amp_fx.numerics.audit.report import AuditReport


class AmpPrecision:
    """Audits training steps in a test."""

    def audit(
        self,
        step: Any,
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
        # Imported in the test: they import torch, and pytest loads the plugin at every start.
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


@pytest.fixture
def amp_precision() -> AmpPrecision:
    """Audits the precision of a step: ``amp_precision.audit(step, *inputs)``."""
    return AmpPrecision()
