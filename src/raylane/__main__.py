"""Entry point of `python -m raylane`, which is the same as the `raylane` command."""

from __future__ import annotations

import sys

from raylane.cli import main

sys.exit(main())
