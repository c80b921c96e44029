"""Help texts of the command line: a one-line description and an Examples section for every command."""

from __future__ import annotations

import argparse
from typing import Any


def describe(summary: str, *examples: str, notes: str = "") -> dict[str, Any]:
    """Return the keyword arguments of ArgumentParser for a description, notes and an Examples section.

    Each example is a complete command line. A comment after `  # ` is allowed; tests parse the part before it.
    """
    parts = [notes] if notes else []
    parts.append("\n".join(["examples:", *(f"  {example}" for example in examples)]))
    return {
        "description": summary[0].upper() + summary[1:] + ".",
        "epilog": "\n\n".join(parts),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
