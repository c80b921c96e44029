"""The `raylane grpo` command: train a model by GRPO, and print the result."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from raylane.cli.interrupt import announce_interrupt, exit_on_interrupt
from raylane.cli.sft import add_config_arguments, check_config_word, config_words, set_up_logging

if TYPE_CHECKING:
    from raylane.rl.config import GrpoRunConfig
    from raylane.rl.trainer import GrpoResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG and overrides; all other settings are keys of the configuration."""
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Train until the configured end and return the exit status: 130 after Ctrl-C, else 0."""
    with exit_on_interrupt(args.command):
        from raylane.rl.config import load_config

    set_up_logging("info")
    path, words = config_words(args)
    check_config_word(args.command, path)
    config = load_config(path, words)
    set_up_logging(config.logger.log_level)
    print(plan(config), flush=True)
    try:
        with exit_on_interrupt(args.command):
            from raylane.rl import trainer

        with announce_interrupt(args.command):
            result = trainer.run(config)
        print(summary(result))
    except KeyboardInterrupt:
        print("\nraylane grpo: interrupted. Run the same command again to resume", file=sys.stderr)
        return 130
    return 0


def plan(config: GrpoRunConfig) -> str:
    """Return what the run will do as plain text, several lines. Pure."""
    from raylane.training.report.metrics import counted

    loop, rollout, cluster, saving = config.grpo, config.rollout, config.cluster, config.checkpointing
    answers = loop.prompts_per_step * loop.samples_per_prompt
    ages = {"sync": "of the newest weights", "one_step": "of the weights one step before"}
    age = ages.get(loop.mode, f"at most {counted(loop.max_lag, 'step')} old")
    validates = f"every {loop.val_period} steps" if loop.val_period else "at the configured ends only"
    period = f"every {saving.save_period} steps and " * bool(saving.save_period)
    lines = [
        ("model", f"{config.policy.model_name}, {config.policy.precision}"),
        ("steps", f"{loop.max_num_steps:,} of {loop.prompts_per_step} prompts x {loop.samples_per_prompt} answers"),
        (
            "answers",
            f"{answers} a step, {age} (mode {loop.mode}), of at most {rollout.max_new_tokens} tokens, at "
            f"temperature {rollout.temperature:g}",
        ),
        ("engines", f"{rollout.engines} x {rollout.engine}, {_devices(rollout.cpus, rollout.gpus)} each"),
        (
            "workers",
            f"{cluster.num_workers}, {_devices(cluster.cpus_per_worker, bool(cluster.gpus_per_node))} each, in "
            f"micro-batches of {config.policy.train_micro_batch_size} answers",
        ),
        ("validate", validates if config.data.validation is not None else "never, as data.validation is null"),
        ("save", f"{period}at the end, to {saving.checkpoint_dir}" if saving.enabled else "never"),
    ]
    return "\n".join(f"{name:<11}{text}" for name, text in lines)


def _devices(cpus: int, gpus: float) -> str:
    return f"{cpus} CPU{'s' if cpus > 1 else ''}" + f" and {gpus:g} GPUs" * bool(gpus)


def summary(result: GrpoResult) -> str:
    """Return the result of a run as plain text, several lines."""
    lines = [("ended", f"{'on SIGTERM ' if result.stopped else ''}after {result.steps:,} steps")]
    for name, accuracy in (("before", result.first), ("after", result.last)):
        if accuracy is not None:
            lines.append((name, f"held-out reward {accuracy.greedy:.3f} greedy, {accuracy.sampled:.3f} sampled"))
    places = (("checkpoint", result.checkpoint), ("model", result.hf_dir), ("report", result.report))
    lines += [(name, str(path)) for name, path in places if path is not None]
    return "\n".join(f"{name:<14}{text}" for name, text in lines)
