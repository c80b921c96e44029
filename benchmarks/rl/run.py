"""Benchmark of reinforcement learning: the queue of samples alone, and the whole loop on the task of sorting digits.

`measure` describes how contenders take turns. Called by `benchmarks.__main__`.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import goals, measure
from benchmarks.local_ray import local_ray
from benchmarks.rl import cases as rl_cases
from benchmarks.rl.cases import PLAIN, QUEUE, RAY_ACTOR, RAY_QUEUE, SYNC, Case, blocks_of
from benchmarks.rl.contenders import STARTS, LoopContender, LoopParts, QueueContender, start_queues
from raylane.rl import sorting

MODEL = Path("runs/grpo/warm_start/step_120/hf")
"""Model of examples/grpo_sort_warm_start.yaml; without it a random one of the same shape takes its place."""
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
"""Shape of that model, a Qwen3."""
TEMPLATE = "{% for message in messages %}{{ message.content }}>{% endfor %}"
"""Chat template of the random model: a question and a mark."""
BYTES = 259
"""Tokens of a tokenizer of bytes: all bytes, and three special tokens."""
LINES = 4000
"""Prompts of a run."""
WARM_UPS = 3
"""Rounds before the measurement, the first one included."""
LOGICAL_CPUS = 16
"""CPUs that Ray counts: actors of all contenders live at the same time, and one contender runs."""

Contender = QueueContender | LoopContender


def run(selected: Sequence[Case], *, quick: bool) -> list[dict[str, Any]]:
    """Start Ray, run every case, and shut Ray down; return one record per case and contender."""
    with local_ray(address="local", num_cpus=LOGICAL_CPUS):
        return [record for case in selected for record in run_case(case, quick=quick)]


def run_case(case: Case, *, quick: bool) -> list[dict[str, Any]]:
    """Run one case on the Ray that this process is connected to; return the record of each contender."""
    began, blocks, first_us = time.perf_counter(), blocks_of(case, quick=quick), {}
    with contextlib.ExitStack() as stack:
        contenders = start(case, stack)
        print(f"{case.name}: {time.perf_counter() - began:.1f} s to get ready", flush=True)
        for contender in contenders:
            first_us[contender.name] = measure.timed(contender.warm)
            for _ in range(1, WARM_UPS):
                contender.warm()
            if case.workload == QUEUE:
                contender.block(blocks)  # as many samples as later: the memory that they take is warm then
        tallies = measure.take_turns(
            contenders,
            blocks.rounds,
            lambda contender: contender.block(blocks),
            seed=case.name,
            warm=lambda contender: contender.warm(),
        )
        for contender in contenders:
            tally = tallies[contender.name]
            tally.extra = contender.extra(tally)
    print(f"{case.name}: {time.perf_counter() - began:.1f} s", flush=True)
    return [measure.record(case.name, name, tally, first_us[name]) for name, tally in tallies.items()]


def start(case: Case, stack: contextlib.ExitStack) -> Sequence[Contender]:
    """Start the contenders of a case; `stack` ends them."""
    if case.workload == QUEUE:
        return start_queues(case, stack)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rl-bench-")))
    sorting.write_sets(folder, LINES)
    model = MODEL if MODEL.is_dir() else make_model(folder / "model")
    started: list[LoopContender] = []
    for label in case.contenders:
        if label not in [contender.name for contender in started]:  # both halves start together
            started += STARTS[label](LoopParts(case, label, model.resolve(), folder), stack)
    by_name = {contender.name: contender for contender in started}
    return [by_name[label] for label in case.contenders]


def make_model(folder: Path) -> Path:
    """Write a random model of SHAPE with a tokenizer of bytes; return its folder."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from raylane.sft.data.chat import train_tokenizer

    tokenizer = train_tokenizer(["0123456789"], BYTES)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(vocab_size=BYTES, **SHAPE, **ends)).save_pretrained(folder)
    return folder


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the records as text, the rates of each contender, and the goals with what was reached."""
    columns = {f"x {name}": (name, "p50") for name in (RAY_QUEUE, RAY_ACTOR, PLAIN, SYNC)}
    present = {record["contender"] for record in records}
    lines = [measure.table(records, {title: base for title, base in columns.items() if base[0] in present}), ""]
    for record in records:
        name = f"{record['case']} {record['contender']}:"
        rates = [f"{record['samples_per_s']:,.0f} samples/s"]
        if "bytes_per_s" in record:
            rates.append(f"{record['bytes_per_s'] / 1e6:,.0f} MB/s")
        else:
            rates.append(f"{record['tokens_per_s']:,.0f} tokens/s")
        lines.append(f"{name:32}{', '.join(rates)}")
    return "\n".join([*lines, *goals.lines(rl_cases.goals(records))])
