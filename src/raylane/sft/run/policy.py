"""Driver-side handle on a model in fine-tuning, whose workers read their own rows.

    policy = SftPolicy(config, prepare(config), total_steps=100)
    policy.train_step(0)                    # each worker reads its own rows; only the step number is sent
    policy.train(batch, loss_fn)            # or the driver sends the rows

Needs an initialised Ray. Called by `trainer`, and by programs that build their own batches.
"""

from __future__ import annotations

from typing import Any, ClassVar

from raylane.sft.config.layout import room_for_prompts
from raylane.sft.config.schema import SftRunConfig
from raylane.sft.data.prepared import NOT_CONFIGURED, PreparedData
from raylane.sft.data.rows import RowSource
from raylane.sft.run.worker import SftWorker
from raylane.training.run.policy import Policy
from raylane.workers.batch import BatchDict
from raylane.workers.future import GroupFuture


class SftPolicy(Policy[SftRunConfig]):
    """Workers that hold a model and fine-tune it; the constructor waits until they are ready."""

    more_keys_for_exact_resume: ClassVar[tuple[str, ...]] = (
        "sft.seed",
        "sft.max_num_steps",
        "sft.max_num_epochs",
        *NOT_CONFIGURED,
        "data.shuffle",
        "data.group_by_length",
    )

    def __init__(self, config: SftRunConfig, prepared: PreparedData, total_steps: int) -> None:
        """Start the workers and build the model in them; `total_steps` determines the learning rate schedule."""
        self._data_key = prepared.train.parent.name
        """Hash of data, tokenizer and template, taken from the name of the cache folder."""
        super().__init__(SftWorker, config, prepared, total_steps)

    def _data_facts(self) -> dict[str, Any]:
        # Paths of the data may change, e.g. on another machine; the weights of the files matter.
        weights = list(self._config.data.train_weights)
        values = (self._data_key, None if set(weights) == {1.0} else weights)
        return dict(zip(NOT_CONFIGURED, values, strict=True))

    def train_step_nowait(self, number: int) -> GroupFuture:
        """Send step `number`; each worker reads its own rows for it. Steps run in the order in which they were sent."""
        self.next_step = number + 1
        return self._send("train_step", number)

    def train_step(self, number: int) -> dict[str, float]:
        """Run step `number` and return its metrics (listed at `TrainingWorker.train_batch`)."""
        return self.result(self.train_step_nowait(number))

    def warm_up(self, rows: RowSource) -> dict[str, float] | None:
        """Run one step of the largest size in the way of the real steps, and undo it; return its metrics.

        Returns None if the configuration asks for no warm-up, or if calls do not run through compiled graphs. `rows`
        are those of the training data. Weights, optimizer, random generators and position in the data stay as they are.
        """
        settings, policy = self._config.policy.compiled_graph, self._config.policy
        count = policy.train_global_batch_size if settings.warmup_gbs is None else settings.warmup_gbs
        if not count or not self.group.compiled:
            return None
        length = settings.warmup_seq_len or policy.max_total_sequence_length
        # In the way of the real steps: a graph of the other way would be compiled for the warm-up alone.
        if self._config.sft.feed == "workers":
            return dict(self.call("warm_up", count // self._dims.readers, length))
        batch = BatchDict.from_arrays(rows.full_rows(count, length))
        return self.result(self._send_batch(batch, None, None, warm_up=True))

    def validate(self) -> dict[str, float]:
        """Return the mean loss on the validation set and the number of supervised tokens in it."""
        return dict(self.call("evaluate"))

    def answer(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the model's answers to tokenised prompts, at most `sft.sample_tokens` tokens each (greedy decoding).

        ValueError if there is no room: prompt and answer must fit into policy.max_total_sequence_length tokens.
        """
        room = room_for_prompts(self._config)
        for number, prompt in enumerate(prompts):
            if not 0 < len(prompt) <= room:
                raise ValueError(
                    f"prompt {number} has {len(prompt)} tokens, and policy.max_total_sequence_length less "
                    f"sft.sample_tokens={self._config.sft.sample_tokens} leaves room for {room}; shorten the prompt, "
                    "or lower sft.sample_tokens"
                )
        answers: list[list[int]] = self.call("answer", prompts)
        return answers
