"""The `raylane` command: one module per sub-command, imported only when that sub-command is called.

Each module in `COMMANDS` provides `add_arguments(parser)` and `run(args)`, which returns the exit status.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

import raylane
from raylane.cli.help import describe
from raylane.cli.interrupt import exit_on_interrupt
from raylane.cli.usage import meant


class Command(NamedTuple):
    """One sub-command: its module, a one-line summary, and example command lines for its help."""

    module: str
    summary: str
    examples: tuple[str, ...]


COMMANDS: dict[str, Command] = {
    "sft": Command(
        "raylane.cli.sft",
        "fine-tune a language model",
        (
            "raylane sft examples/sft_docstrings.yaml",
            "raylane sft examples/sft_docstrings.yaml sft.max_num_steps=20 cluster.num_workers=1",
            "raylane sft examples/sft_docstrings.yaml checkpointing.checkpoint_dir=runs/new  # do not resume",
        ),
    ),
    "grpo": Command(
        "raylane.cli.grpo",
        "train a language model by reinforcement learning",
        (
            "raylane grpo examples/grpo_sort.yaml",
            "raylane grpo examples/grpo_sort.yaml grpo.mode=sync grpo.max_num_steps=20",
        ),
    ),
    "import-config": Command(
        "raylane.cli.import_config",
        "turn a NeMo-RL configuration into one of raylane",
        (
            "raylane import-config nemo_sft.yaml -o sft.yaml",
            "raylane import-config nemo_sft.yaml data.train=train.jsonl policy.model_name=models/llama -o sft.yaml",
        ),
    ),
    "migrate": Command(
        "raylane.cli.migrate",
        "list the lines to change in a program written for Ray's compiled graphs or direct transport",
        ("raylane migrate train.py", "raylane migrate src examples"),
    ),
    "plan": Command(
        "raylane.cli.plan",
        "show mesh, steps, tokens and memory of a fine-tuning run without starting it",
        (
            "raylane plan examples/sft_docstrings.yaml",
            "raylane plan examples/sft_docstrings.yaml policy.max_total_sequence_length=512",
        ),
    ),
    "inspect-data": Command(
        "raylane.cli.inspect_data",
        "show the training data, with the supervised text marked",
        (
            "raylane inspect-data examples/sft_docstrings.yaml",
            "raylane inspect-data --show 10 examples/sft_docstrings.yaml data.overlong=split",
        ),
    ),
    "report": Command(
        "raylane.cli.report",
        "draw the report of a fine-tuning run",
        ("raylane report runs/logs", "raylane report runs/logs -o report.html"),
    ),
    "export": Command(
        "raylane.cli.export",
        "write the model of a checkpoint as a Hugging Face folder",
        (
            "raylane export runs/checkpoints/step_100 --out model --dtype bfloat16",
            "raylane export runs/checkpoints/step_100 --out adapter --form adapter",
        ),
    ),
    "data": Command(
        "raylane.cli.data",
        "build an example data set",
        ("raylane data docstrings --out runs/docstrings/data", "raylane data sorting --out runs/grpo/data"),
    ),
    "doctor": Command(
        "raylane.cli.doctor",
        "test which tensor transports work on this machine or cluster",
        (
            "raylane doctor",
            "raylane doctor --json doctor.json",
            "RAY_ADDRESS=head:6379 raylane doctor  # test a running cluster",
        ),
    ),
    "memory": Command(
        "raylane.cli.memory",
        "list the tensors that the processes of a running cluster hold, and why",
        (
            "raylane memory",
            "raylane memory --address head:6379 --limit 50",
            "raylane memory --json memory.json",
        ),
    ),
    "weights": Command(
        "raylane.cli.weights",
        "list the versions of weights that a running cluster keeps, and who reads them",
        ("raylane weights", "raylane weights --address head:6379"),
    ),
    "trace": Command(
        "raylane.cli.trace",
        "put recorded transfers of several processes into one trace",
        ("raylane trace merge traces transfers.json",),
    ),
}


MOVED: dict[str, str] = {"bench": "Benchmarks are in a checkout now: `python -m benchmarks transfer`. "}
"""Commands that there were, and what took their place."""
EXTRAS: dict[str, str] = {
    **dict.fromkeys(("transformers", "tokenizers", "safetensors", "yaml", "matplotlib", "jinja2"), "sft"),
    **dict.fromkeys(("datasets", "pyarrow", "zstandard"), "sft"),
}
"""Packages that commands import and a plain installation lacks, with the extra that has them."""


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the whole command line, with the arguments of the sub-command that `argv` starts with."""
    parser = argparse.ArgumentParser(
        prog="raylane",
        **describe(
            "direct transport, compiled graphs, worker groups, weights in versions, fine-tuning and GRPO on Ray",
            "raylane doctor",
            "raylane sft examples/sft_docstrings.yaml",
            "raylane sft --help",
        ),
    )
    parser.add_argument("--version", action="version", version=f"raylane {raylane.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.summary, **describe(command.summary, *command.examples))
        # Only the module of the called command is imported: `raylane doctor` must not wait for transformers.
        if argv and argv[0] == name:
            importlib.import_module(command.module).add_arguments(subparser)
            subparser.set_defaults(options=[*subparser._option_string_actions])
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; raylane's own errors are printed without a traceback.

    130 after Ctrl-C, with one line that says so.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _run(argv)
    except KeyboardInterrupt:
        print(f"\nraylane {argv[0] if argv else ''}: interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT, as shells report it


def _run(argv: Sequence[str]) -> int:
    """Run one command. Everything slow is imported here, where `main` handles Ctrl-C."""
    parser = build_parser(argv)
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        remedy = MOVED.get(argv[0]) or meant(argv[:1], COMMANDS)
        parser.error(f"there is no command {argv[0]}. {remedy}`raylane --help` lists all")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(
            f"raylane {args.command} does not know {' '.join(unknown)}. {meant(unknown, args.options)}"
            f"`raylane {args.command} --help` lists all options"
        )
    with exit_on_interrupt(args.command):
        from raylane.errors import RaylaneError

        command = importlib.import_module(COMMANDS[args.command].module)
    try:
        status: int = command.run(args)
    except RaylaneError as error:
        print(f"raylane {args.command}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(
            f"raylane {args.command}: the package {error.name!r} is not installed, and this command needs it. "
            f"Run pip install 'raylane[{extra}]'",
            file=sys.stderr,
        )
        return 1
    return status
