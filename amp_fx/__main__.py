"""``python -m amp_fx``."""

from __future__ import annotations

import sys

from amp_fx.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
