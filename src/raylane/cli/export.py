"""The `raylane export` command: write the model of a checkpoint as a Hugging Face or PEFT folder."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CHECKPOINT, the new folder, its form and the data type of the weights."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of one checkpoint: checkpoint_dir/step_N")
    parser.add_argument("--out", metavar="FOLDER", required=True, help="folder to create")
    parser.add_argument(
        "--form",
        choices=("merged", "adapter"),
        default="merged",
        help="merged: the whole model, with LoRA adapters added in; adapter: the adapters alone, in PEFT's format",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="type of the weights")


def run(args: argparse.Namespace) -> int:
    """Write the folder and print its path."""
    import torch

    from raylane.sft.run.export import export_checkpoint
    from raylane.training import storage

    print(export_checkpoint(storage.at(args.checkpoint), Path(args.out), args.form, getattr(torch, args.dtype)))
    return 0
