"""Time of preparing conversations for training: raylane and TRL, with one process and with two.

    python benchmarks/studies/prepare_data.py --rows 1000000

Writes short conversations of random words, and lets each contender tokenise them with a mask of the assistant's tokens,
in a process of its own, from the JSON Lines file to what training reads. TRL gets the same tokenizer, whose template
has marks, and no cached result. Prints rows per second and the largest memory: that of the process and of a child with
the pages of files that they have mapped, which the kernel can drop, and that of the process without them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROW_TOKENS = 512


def with_raylane(folder: Path, processes: int) -> None:
    """Prepare by raylane."""
    from raylane.sft.config.load import build_config
    from raylane.sft.data.prepare import prepare

    shape = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 1}
    policy = {"tokenizer": {"name": str(folder / "tokenizer")}, "max_total_sequence_length": ROW_TOKENS}
    data = {
        "train": str(folder / "rows.jsonl"),
        "cache_dir": str(folder / f"raylane-{processes}"),
        "num_proc": processes,
    }
    prepare(build_config({"policy": {**policy, "hf_config_overrides": shape}, "data": data}))


def with_trl(folder: Path, processes: int) -> None:
    """Prepare by the constructor of TRL's trainer."""
    import datasets
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    rows = datasets.load_dataset(
        "json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=str(folder / f"trl-{processes}")
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=len(tokenizer), **shape))
    options = SFTConfig(
        output_dir=str(folder / "trl"),
        assistant_only_loss=True,
        max_length=ROW_TOKENS,
        dataset_num_proc=processes if processes > 1 else None,
        bf16=False,
        use_cpu=True,
        report_to=[],
    )
    SFTTrainer(model=model, args=options, train_dataset=rows, processing_class=tokenizer)


class OwnMemory(threading.Thread):
    """Largest RssAnon (proc_pid_status(5)) of this process, looked at ten times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.mb = 0.0

    def run(self) -> None:
        while True:
            (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line)
            self.mb = max(self.mb, int(line.split()[1]) / 1024)
            time.sleep(0.1)


CONTENDERS = {"raylane": with_raylane, "trl": with_trl}


def measure(folder: Path, name: str, processes: int) -> dict[str, float]:
    """Run one contender in a process of its own; return its seconds and its memory in MB."""
    command = [sys.executable, __file__, "--folder", str(folder), "--contender", name, "--processes", str(processes)]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "TQDM_DISABLE": "1"}
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Measure all contenders in turns, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", choices=CONTENDERS, help="measure one contender")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender is not None:
        own, began = OwnMemory(), time.perf_counter()
        own.start()
        CONTENDERS[args.contender](args.folder, args.processes)
        usage = [resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        memory = {"mb": usage[0], "mb_of_a_child": usage[1], "own_mb": own.mb}
        print(json.dumps({"s": time.perf_counter() - began, **memory}))
        return
    from benchmarks.sft.training import write_conversations
    from raylane.sft.data.chat import ChatTokenizer
    from raylane.training.config.policy import TokenizerConfig

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_conversations(folder / "rows.jsonl", args.rows)
        with (folder / "rows.jsonl").open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in itertools.islice(lines, 5000)]
        texts = [message["content"] for row in rows for message in row["messages"]]
        ChatTokenizer.train(texts, TokenizerConfig(train_vocab_size=4096)).save(folder / "tokenizer")
        for number in range(args.rounds):
            for processes in (1, 2):
                for contender in [args.only] if args.only else [*CONTENDERS][:: 1 - number % 2 * 2]:
                    result = measure(folder, contender, processes)
                    rate, peaks = args.rows / result["s"], (result["mb"], result["mb_of_a_child"])
                    print(
                        f"{contender}, {processes} processes: {rate:,.0f} rows/s ({result['s']:.0f} s), "
                        f"{peaks[0]:,.0f} MB, a child {peaks[1]:,.0f} MB, without files {result['own_mb']:,.0f} MB",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
