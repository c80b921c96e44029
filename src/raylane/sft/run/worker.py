"""Worker of a fine-tuning run, which reads its own rows of the data. Called by `policy`.

`raylane.training.run.worker` has the model, the steps and the checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch

from raylane.sft.config.schema import SftRunConfig
from raylane.sft.data import order
from raylane.sft.data.mixing import open_rows, open_training_rows, rows_of_step
from raylane.sft.data.prepared import PreparedData
from raylane.sft.data.rows import RowSource
from raylane.sft.run import selfcheck
from raylane.training.model.defaults import with_own_defaults_in_methods
from raylane.training.run import step
from raylane.training.run.micro_batches import FixedRows, division, pinned
from raylane.training.run.worker import TrainingWorker
from raylane.workers.batch import BatchDict


@with_own_defaults_in_methods
class SftWorker(TrainingWorker[SftRunConfig, PreparedData]):
    """Model, optimizer and data of one rank. After `setup` the training data are in the attribute `train_rows`."""

    def __init__(self, device_type: str = "cpu", num_threads: int = 1) -> None:
        """Join the process group, as `TrainingWorker` does."""
        super().__init__(device_type, num_threads)
        self._read_ahead: ReadAhead[BatchDict] | None = None
        """Reader of the next step's rows while the current step computes; None before `setup`."""

    def setup(self, config: SftRunConfig, vocabulary: PreparedData, total_steps: int) -> dict[str, Any]:
        """Build model, optimizer and data, and check that packing keeps documents apart. Replaces an earlier setup.

        Returns the facts of `TrainingWorker.setup`, and the number of training rows.
        """
        facts = super().setup(config, vocabulary, total_steps)
        # Not the arguments: on a node without the driver's disk the folders are others.
        policy, prepared = self.config.policy, self.vocabulary
        self.train_rows: RowSource = open_training_rows(prepared, self.config)
        self._validation: RowSource | None = (
            open_rows(prepared.validation, policy, prepared.pad_id) if prepared.validation else None
        )
        if self._read_ahead is not None:  # of an earlier setup
            self._read_ahead.close()
        # Rows are read while the device computes the step before.
        self._read_ahead = ReadAhead(self._rows_to_move, total_steps)
        selfcheck.check_model(self.model, self.train_rows, self.device, policy.precision, division(policy))
        return {**facts, "train_rows": self.train_rows.num_rows}

    def teardown(self) -> None:
        """End the reading of rows, and leave the process group."""
        # Before the barrier in the base class: the thread must not read while the process ends.
        if self._read_ahead is not None:
            self._read_ahead.close()
        super().teardown()

    def train_step(self, number: int) -> dict[str, float]:
        """Run step `number` on this worker's own rows of its global batch; return the metrics (`train_batch`)."""
        started = time.perf_counter()
        assert self._read_ahead is not None, "setup comes first"
        batch = self._read_ahead.take(number)
        return self._step(batch, number, self._loss, division(self.config.policy), started)

    def warm_up(self, rows: int, row_tokens: int) -> dict[str, float]:
        """Run one step on full rows of tokens from the data, and undo all that it did; return its metrics."""
        batch = BatchDict.from_arrays(self.train_rows.full_rows(rows, row_tokens))
        return self._step(batch, 0, self._loss, division(self.config.policy), time.perf_counter(), undone=True)

    def evaluate(self) -> dict[str, float]:
        """Return loss, perplexity and accuracy per supervised token of the validation set.

        The set is its first `sft.val_batches` batches, or all of it.
        """
        if self._validation is None:
            raise ValueError("cannot validate: no validation set. Set data.validation or data.validation_fraction")
        sft = self.config.sft
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        supervised, dims = 0, self.mesh.dims
        how = division(self.config.policy, sft.val_micro_batch_size)
        assert isinstance(how, FixedRows)
        for rows in order.validation_batches(self._validation.num_rows, sft.val_global_batch_size, sft.val_batches):
            batch = _read_batch(self._validation, order.rank_slice(rows, self.mesh.reader, dims.readers))
            supervised += step.count(batch, self.device, dims).supervised
            total += step.forward_only(self.model, batch, how, self._loss, self.device)
        means = step.means_of(total, step.TokenCounts(supervised, 0), dims)
        self._end_other_work()
        return {**means.metrics, "supervised_tokens": supervised}

    def answer(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the most probable answers to tokenised prompts, at most `sft.sample_tokens` tokens each."""
        return self.generate(prompts, self.config.sft.sample_tokens)

    def own_rows(self, number: int) -> BatchDict:
        """Return this worker's rows of step `number`, as `train_step` reads them. Not collective."""
        rows = rows_of_step(self.train_rows, self.config, number)
        return _read_batch(self.train_rows, order.rank_slice(rows, self.mesh.reader, self.mesh.dims.readers))

    def _rows_to_move(self, number: int) -> BatchDict:
        """Return `own_rows` where copies to the device start from. Runs in the reading thread."""
        batch = self.own_rows(number)
        return pinned(batch) if self.device.type == "cuda" else batch


def _read_batch(source: RowSource, rows: Any) -> BatchDict:
    return BatchDict.from_arrays(source.rows(rows))


T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Reader of numbered items that reads one item ahead, in a thread.

    The thread starts with the first `take` and ends with `close`. `read(number)` must return the same item at any time.
    For one calling thread.
    """

    def __init__(self, read: Callable[[int], T], end: int) -> None:
        """Prepare reading; `end` is the first number without an item."""
        self._read = read
        self._end = end
        self._thread: ThreadPoolExecutor | None = None
        """Reading thread; None before the first `take` and after `close`."""
        self._next: tuple[int, Future[T]] | None = None
        """Number of the item being read, and its future."""

    def take(self, number: int) -> T:
        """Return item `number`, waiting if needed, and start reading the next one. Raises the exceptions of `read`."""
        # After a resume or a skipped step another number is asked for; the item read ahead is then dropped.
        following, self._next = self._next, None
        item = following[1].result() if following is not None and following[0] == number else self._read(number)
        if number + 1 < self._end:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="raylane-rows")
            self._next = (number + 1, self._thread.submit(self._read, number + 1))
        return item

    def close(self) -> None:
        """End the thread, after the item that it reads. A second call does nothing."""
        thread, self._thread, self._next = self._thread, None, None
        if thread is not None:
            thread.shutdown(cancel_futures=True)
