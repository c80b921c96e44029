"""Fine-tuning against the Hugging Face trainer and TRL's SFTTrainer: the same model, rows and settings.

Each contender is a process of its own, which trains the same steps once in each round; contenders take turns. The model
has random weights, and the rows come in a fixed order. Unpacked, a step has eight conversations, padded to the longest;
packed, it has four rows of 256 tokens. raylane runs as a user would run it: a driver, Ray, and one worker.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.sft.training import THREADS, training_config, write_conversations

RAYLANE, TRAINER, TRL = "raylane", "transformers", "trl"
NEEDS = {RAYLANE: (), TRAINER: ("accelerate",), TRL: ("accelerate", "trl")}
"""Packages that a contender needs."""
LAYOUTS = ("unpacked", "packed")
STEPS, QUICK_STEPS = 40, 3
WARM_STEPS = 5
"""Steps at the start that are not timed."""
ROUNDS = 3
LEARNING_RATE = 1e-4


def contenders() -> list[str]:
    """Return the contenders whose packages are installed."""
    return [name for name, needed in NEEDS.items() if all(importlib.util.find_spec(package) for package in needed)]


def run(*, quick: bool, layouts: Sequence[str] = LAYOUTS) -> list[dict[str, Any]]:
    """Train with each contender, in turns; return one record per layout, contender and round."""
    steps, rounds = (QUICK_STEPS, 1) if quick else (STEPS, ROUNDS)
    records = []
    for layout in layouts:
        with tempfile.TemporaryDirectory() as folder:
            write_run(Path(folder), layout, steps)
            for number in range(rounds):
                # The order changes, so that nobody always follows the same contender.
                names = contenders()
                for name in names if number % 2 == 0 else names[::-1]:
                    command = [sys.executable, "-m", "benchmarks.sft.peers", folder, name]
                    done = subprocess.run(command, check=False, capture_output=True, text=True)
                    if done.returncode:
                        raise RuntimeError(f"{name} ended with status {done.returncode}: {done.stderr[-2000:]}")
                    # Libraries print to the same stream before.
                    measured = json.loads(done.stdout.splitlines()[-1])
                    records.append({"case": f"peers-{layout}", "contender": name, "round": number, **measured})
    return records


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return tokens per second, ratio to each other contender, memory, and the largest difference of losses."""
    lines = []
    for case in dict.fromkeys(record["case"] for record in records):
        of_case = [record for record in records if record["case"] == case]
        ours = [record for record in of_case if record["contender"] == RAYLANE]
        for name in dict.fromkeys(record["contender"] for record in of_case):
            theirs = [record for record in of_case if record["contender"] == name]
            rates = sorted(record["tokens_per_s"] for record in theirs)
            memory = max(record["peak_mb"] for record in theirs)
            text = f"{case} {name}: {statistics.median(rates):,.0f} tokens/s ({rates[0]:,.0f} to {rates[-1]:,.0f}), "
            text += f"{memory:,.0f} MB"
            if name != RAYLANE and ours:
                pairs = zip(ours, theirs, strict=True)
                ratios = sorted(mine["tokens_per_s"] / other["tokens_per_s"] for mine, other in pairs)
                losses = zip(ours[0]["losses"], theirs[0]["losses"], strict=True)
                difference = max(abs(mine - other) for mine, other in losses)
                text += (
                    f"; raylane is {ratios[0]:.2f} to {ratios[-1]:.2f} times as fast, losses differ by {difference:.1e}"
                )
            lines.append(text)
    return "\n".join(lines)


def run_document(folder: Path, layout: str, steps: int) -> dict[str, Any]:
    """Return the configuration of a run on the data and the model in `folder`."""
    packed = layout == "packed"
    return {
        "sft": {"max_num_epochs": None, "max_num_steps": steps, "seed": 1, "log_interval": 1},
        "policy": {
            "model_name": str(folder / "model"),
            "max_total_sequence_length": 256,
            "train_global_batch_size": 4 if packed else 8,
            "train_micro_batch_size": 4 if packed else 8,
            "precision": "float32",
            "max_grad_norm": 1.0,
            "sequence_packing": {"enabled": packed},
            "optimizer": {"kwargs": {"lr": LEARNING_RATE, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8}},
            "scheduler": {"name": "constant"},
        },
        "data": {"train": str(folder / "train.jsonl"), "cache_dir": str(folder / "cache"), "shuffle": False},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(folder / "logs")},
        "cluster": {"num_workers": 1, "cpus_per_worker": THREADS, "address": "local"},
    }


def write_run(folder: Path, layout: str, steps: int) -> None:
    """Write the conversations, the model, and the rows of each step as the other contenders get them."""
    import torch
    from transformers import AutoModelForCausalLM

    from raylane.sft.config.load import build_config
    from raylane.sft.data.mixing import open_training_rows, rows_of_step
    from raylane.sft.data.prepare import prepare
    from raylane.training.model.hf_config import model_config
    from raylane.training.model.initial import fill_random

    write_conversations(folder / "train.jsonl", 2000)
    shape = training_config(folder, 1)
    prepared = prepare(shape)
    hf_config = model_config(shape.policy, prepared.vocab_size, prepared.pad_id, min(prepared.end_ids))
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    fill_random(model, 1)
    model.save_pretrained(folder / "model")
    for file in prepared.tokenizer_dir.iterdir():
        (folder / "model" / file.name).write_bytes(file.read_bytes())
    document = run_document(folder, layout, steps)
    (folder / "run.json").write_text(json.dumps({"layout": layout, "document": document}))
    config = build_config(document)
    rows = open_training_rows(prepare(config), config)
    documents = []
    for number in range(steps):
        for row in rows_of_step(rows, config, number):
            arrays = {name: array[0] for name, array in rows.rows([int(row)]).items()}
            length = int((arrays["document_ids"] >= 0).sum())
            # The others shift labels themselves.
            labels = [-100, *arrays["labels"][: length - 1].tolist()]
            part = {name: arrays[name][:length].tolist() for name in ("input_ids", "position_ids")}
            documents.append({**part, "labels": labels})
    (folder / "rows.json").write_text(json.dumps(documents))


def run_raylane(document: dict[str, Any]) -> dict[str, Any]:
    """Train by raylane; return loss, end in seconds and tokens of each step."""
    from raylane.sft.config.load import build_config
    from raylane.sft.run import trainer

    config = build_config(document)
    trainer.run(config)
    lines = [json.loads(line) for line in (Path(config.logger.log_dir) / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train:loss" in line]
    (Path(config.logger.log_dir) / "metrics.jsonl").unlink()
    return {
        "losses": [step["train:loss"] for step in steps],
        "ends_s": [step["time_s"] for step in steps],
        "tokens": [step["train:tokens"] for step in steps],
    }


def _batch(chosen: Sequence[Mapping[str, Any]], packed: bool) -> dict[str, Any]:
    """Return rows as one batch of tensors, int64 [B, T], padded to the longest."""
    import torch

    length = max(len(row["input_ids"]) for row in chosen)

    def padded(key: str, filler: int) -> Any:
        return torch.tensor([[*row[key], *[filler] * (length - len(row[key]))] for row in chosen])

    batch = {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100)}
    if packed:  # without a mask, transformers keeps packed documents apart by their positions
        batch["position_ids"] = padded("position_ids", 0)
    else:
        batch["attention_mask"] = torch.tensor(
            [[1] * len(row["input_ids"]) + [0] * (length - len(row["input_ids"])) for row in chosen]
        )
    return batch


def run_peer(name: str, folder: Path, layout: str, document: dict[str, Any]) -> dict[str, Any]:
    """Train by another trainer on the rows in `folder`; return the same as `run_raylane`."""
    import torch
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

    torch.set_num_threads(THREADS)
    rows = json.loads((folder / "rows.json").read_text())
    policy, packed = document["policy"], layout == "packed"
    size = policy["train_global_batch_size"]
    ends: list[float] = []
    losses: list[float] = []

    class Times(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_log(self, _args: Any, _state: Any, _control: Any, logs: Any = None, **__: Any) -> None:
            if logs and "loss" in logs:
                losses.append(logs["loss"])

    settings = policy["optimizer"]["kwargs"]
    options = {
        "output_dir": str(folder / name),
        "per_device_train_batch_size": size,
        "max_steps": len(rows) // size,
        "learning_rate": settings["lr"],
        "weight_decay": settings["weight_decay"],
        "adam_beta1": settings["betas"][0],
        "adam_beta2": settings["betas"][1],
        "adam_epsilon": settings["eps"],
        "max_grad_norm": policy["max_grad_norm"],
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": not torch.cuda.is_available(),
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
    }
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="sdpa")
    common = {"model": model, "data_collator": functools.partial(_batch, packed=packed), "callbacks": [Times()]}
    base: Any = Trainer
    if name == TRL:
        import datasets
        from trl import SFTConfig, SFTTrainer

        base = SFTTrainer
        arguments: Any = SFTConfig(
            **options,
            # Its own defaults are bfloat16 and checkpointing of activations.
            bf16=False,
            gradient_checkpointing=False,
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        common |= {"processing_class": tokenizer, "train_dataset": datasets.Dataset.from_list(rows)}
    else:
        arguments = TrainingArguments(**options)
        common["train_dataset"] = rows

    class InOrder(base):  # type: ignore[misc]
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(dataset or self.train_dataset)

    InOrder(args=arguments, **common).train()
    counts = [len(row["input_ids"]) for row in rows]
    tokens = [sum(counts[start : start + size]) for start in range(0, len(counts), size)]
    return {"losses": losses, "ends_s": ends, "tokens": tokens}


class _WorkerMemory(threading.Thread):
    """Largest memory of the processes of actors on this machine, read from /proc until `end`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._done = threading.Event()
        self._peaks_kb: dict[str, int] = {}
        self.start()

    def run(self) -> None:
        while not self._done.wait(0.2):
            for status in Path("/proc").glob("[0-9]*/status"):
                try:
                    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
                except OSError:
                    continue  # the process has ended
                name = fields["Name"].strip()
                if name.startswith("ray::") and "IDLE" not in name and "VmHWM" in fields:
                    self._peaks_kb[status.parent.name] = int(fields["VmHWM"].split()[0])

    def end(self) -> int:
        """Stop; return the sum over processes in kB."""
        self._done.set()
        self.join()
        return sum(self._peaks_kb.values())


def main(folder: str, name: str) -> None:
    """Train as one contender, and print what was measured as JSON in the last line."""
    spec = json.loads((Path(folder) / "run.json").read_text())
    if name == RAYLANE:
        watch = _WorkerMemory()
        result = run_raylane(spec["document"])
        others_kb = watch.end()
    else:
        result = run_peer(name, Path(folder), spec["layout"], spec["document"])
        others_kb = 0
    warm = min(WARM_STEPS, len(result["ends_s"]) // 2)
    seconds = result["ends_s"][-1] - result["ends_s"][warm - 1]
    print(
        json.dumps(
            {
                "tokens_per_s": sum(result["tokens"][warm:]) / seconds,
                "losses": result["losses"],
                "peak_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + others_kb) / 1024,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
