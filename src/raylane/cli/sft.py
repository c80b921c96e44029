"""The `raylane sft` command: print the forecast of a run, train, and print the result.

Also holds the functions shared by all commands that read a run's configuration.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from raylane.cli.interrupt import announce_interrupt, exit_on_interrupt
from raylane.cli.usage import config_problem, other_command

if TYPE_CHECKING:
    from raylane.sft.config.schema import SftRunConfig
    from raylane.sft.config.starter import Starter
    from raylane.sft.run.trainer import RunResult


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG and overrides."""
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?",
        help="YAML file with the configuration of the run; for fine-tuning also MODEL DATA..., a folder of a model or "
        "hf:NAME, and files, folders or data sets",
    )
    parser.add_argument(
        "--config", dest="config_option", metavar="CONFIG", help="the same, as in command lines of NeMo-RL"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="change of one key: a.b=c sets it, +a.b=c adds it to an open mapping, ++a.b=c does either, "
        "~a.b removes it",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG and overrides, and --dry-run; all other settings are keys of the configuration."""
    add_config_arguments(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="show the configuration, the plan and the first batch; train nothing"
    )


def config_words(args: argparse.Namespace) -> tuple[str, list[str]]:
    """Return the path of the configuration and the overrides. ConfigError if no configuration is named."""
    from raylane.errors import ConfigError

    words = [word for word in (args.config, *args.overrides) if word is not None]
    # With --config, argparse takes the first override for CONFIG.
    path = args.config_option if args.config_option is not None else words.pop(0) if words else None
    if path is None:
        raise ConfigError(
            f"no configuration is named. Give CONFIG, the path of a YAML file: raylane {args.command} CONFIG"
            + f", or a model and data: raylane {args.command} MODEL DATA..." * (args.command != "grpo")
        )
    return path, words


def check_config_word(command: str, path: str) -> None:
    """Raise ConfigError with a remedy for a word that is no configuration, or that of another kind of training."""
    from raylane.errors import ConfigError
    from raylane.training.config.overrides import read_yaml

    if (problem := config_problem(command, path)) is not None:
        raise ConfigError(problem)
    if (problem := other_command(command, path, read_yaml(Path(path)))) is not None:
        raise ConfigError(problem)


def load(args: argparse.Namespace) -> SftRunConfig:
    """Return the configuration that CONFIG, or a model and data in its place, and the overrides describe.

    Its log level is in effect then.
    """
    return read_command(args)[0]


def read_command(args: argparse.Namespace) -> tuple[SftRunConfig, Starter | None]:
    """Return the configuration as `load` does, and what to write when a model and data stand in place of CONFIG."""
    with exit_on_interrupt(args.command):
        from raylane.nemo.dialect import NEMO_RL
        from raylane.sft.config.load import load_config
        from raylane.sft.config.starter import names_model, starter
        from raylane.sft.run.places import check_places, fetch_models

    set_up_logging("info")  # the file names its own level, and reading the file may log already
    path, words = config_words(args)
    run_starter = None
    if names_model(path):
        with exit_on_interrupt(args.command):
            import torch

        run_starter = starter(path, words, torch.cuda.device_count(), NEMO_RL)
        config = run_starter.config()
    else:
        check_config_word(args.command, path)
        config = load_config(path, words, NEMO_RL)
    set_up_logging(config.logger.log_level)
    check_places(config)
    return fetch_models(config), run_starter


class LogLines(logging.Formatter):
    """Lines such as 'warning: ...', and bare ones for what is no warning."""

    def __init__(self, start: str) -> None:
        super().__init__("%(message)s")
        self._start = start

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a message."""
        kind = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"{self._start}{kind}{super().format(record)}"


def set_up_logging(level: str) -> None:
    """Write raylane's log messages from `level` on to standard error; other libraries are not changed."""
    handler = logging.StreamHandler()
    # On a terminal a log line replaces the live progress bar (carriage return, then ECMA-48 EL: erase in line).
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    handler.setFormatter(LogLines(clear))
    # Only raylane's logger: a root handler would also print the messages of all other libraries.
    log = logging.getLogger("raylane")
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(level.upper())


def run(args: argparse.Namespace) -> int:
    """Train until the configured end and return the exit status.

    0 after a finished run, also after SIGTERM once everything is saved; 130 after Ctrl-C.
    """
    try:
        config, starter = read_command(args)  # before the slow imports, so that a wrong key is reported at once
        if starter is not None and not args.dry_run:
            starter.check()
        with exit_on_interrupt(args.command):
            from raylane.sft.run import trainer
            from raylane.sft.run.planning import plan_run, render

        if args.dry_run:
            print_configuration(config)
        print(render(plan_run(config), config), flush=True)
        if args.dry_run:
            print_first_batch(config)
            return 0
        if starter is not None:  # not before the plan, which reads the data
            starter.write()
            logging.getLogger(__name__).info("the configuration is in %s", starter.path)
    except KeyboardInterrupt:
        print(
            "\nraylane sft: interrupted before training began, nothing was saved. Run the same command again to start",
            file=sys.stderr,
        )
        return 130
    try:
        with announce_interrupt(args.command):
            result = trainer.run(config)
        print(summary(result))
    except KeyboardInterrupt:
        print(f"raylane sft: interrupted. {trainer.resume_advice(config)}", file=sys.stderr)
        return 130
    return 0


def print_configuration(config: SftRunConfig) -> None:
    """Print the keys that differ from the defaults, as YAML."""
    import yaml

    from raylane.training.config.load import differences, dump_to_share

    print(yaml.safe_dump(differences(dump_to_share(config), type(config)), sort_keys=False), flush=True)


SHOWN_DOCUMENTS = 8


def print_first_batch(config: SftRunConfig) -> None:
    """Print documents of the first step, with the supervised text marked."""
    from raylane.sft.data import audit
    from raylane.sft.data.chat import ChatTokenizer
    from raylane.sft.data.mixing import documents_of_step, open_training_rows
    from raylane.sft.data.prepare import prepare

    prepared = prepare(config)
    rows = open_training_rows(prepared, config)
    documents = documents_of_step(rows, config, 0)
    tokenizer = ChatTokenizer.load(prepared.tokenizer_dir)
    style = audit.marks(sys.stdout.isatty())
    print(f"\nfirst batch: {len(documents)} documents, the first {min(len(documents), SHOWN_DOCUMENTS)} of them:")
    print(audit.sample(rows, tokenizer, style, documents[:SHOWN_DOCUMENTS]))


def summary(result: RunResult) -> str:
    """Return the result of a run as plain text, several lines."""
    from raylane.training.report.metrics import counted

    # The loss of one batch is no loss of the run: its name says so.
    losses = (("last step", result.train_loss, "loss "), ("held-out loss", result.val_loss, ""))
    lines = [
        ("ended", f"{'on SIGTERM ' if result.stopped else ''}after {counted(result.steps, 'step')}"),
        *((name, f"{words}{loss:.4f}") for name, loss, words in losses if loss is not None),
        *(
            (name, str(path))
            for name, path in (
                ("checkpoint", result.checkpoint),
                ("model", result.hf_dir),
                ("report", result.report),
            )
            if path is not None
        ),
    ]
    if result.sample is not None:
        sample = result.sample
        from raylane.sft.data.audit import printable

        lines += [
            (name, printable(" ".join(text.split())))
            for name, text in (("asked", sample.prompt), ("answered", sample.answer))
        ]
    return "\n".join(f"{name:<14}{text}" for name, text in lines)
