"""The `raylane plan` command: print mesh, steps, tokens and memory of a run without starting it.

The data is tokenised into the cache that the run will use, because steps and padding depend on it.
"""

from __future__ import annotations

import argparse

from raylane.cli.interrupt import exit_on_interrupt
from raylane.cli.sft import add_config_arguments, load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG and overrides."""
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the forecast of the run; errors are raised if the run is impossible."""
    with exit_on_interrupt(args.command):
        from raylane.sft.run.planning import plan_run, render

    config = load(args)
    print(render(plan_run(config), config))
    return 0
