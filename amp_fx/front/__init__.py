"""The code around compiled graphs: ``amp_fx.compile``, ``autocast``, custom functions."""

from __future__ import annotations

import sys

from amp_fx.front import settings

sys.modules["amp_fx.front.compiled"] = settings  # its name in older pickles
