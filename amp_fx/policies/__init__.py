"""Which op is cast how: policies, what users change on top of them, what it does to a call."""

from __future__ import annotations

import sys

from amp_fx.policies import changes
from amp_fx.tables import cast_policy

# Their names in older pickles.
sys.modules["amp_fx.policies.cast_policy"] = cast_policy
sys.modules["amp_fx.policies.overrides"] = changes
