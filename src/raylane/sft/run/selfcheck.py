"""Checks of the real model before the first step: loss and hidden states are those of transformers' own computation.

Both can go wrong without any error. Attention between packed documents, an argument of a model that an attention
function ignores, and a class whose head does more than a matrix product only change losses a little. A few forward
passes detect them.

    checked      rows as in training: packed or padded, several in a micro-batch, attention of the run
    reference    each document alone, without padding, with transformers' own eager attention and masks

The rows are the first one with two documents, the one with the longest document, and the one with the most padding; of
each the first, the longest and the last document, which lies at the padding. A check whose two sides share attention or
masks would prove nothing about them. In bfloat16 two right ways to the same hidden states differ, and a token may take
another expert. There each layer's attention is compared with eager attention of the same input, and the rows with the
same documents alone in rows of the same shape, by the same kernels.

The check must run wherever a training step runs, so it needs less memory: no gradients, hidden states [B, T, H] instead
of logits where whole rows are compared, logits [1, N, V] only of N <= 16 tokens, and of eager attention only the scores
of some queries at a time. Called by `worker.setup`; collective.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from raylane.errors import ConfigError
from raylane.sft.data.packing import Packs
from raylane.sft.data.rows import RowSource
from raylane.training.labels import IGNORED
from raylane.training.model import attention
from raylane.training.model.attention import PackedRows
from raylane.training.model.loss import CrossEntropy
from raylane.training.model.pipeline import PipelinedModel
from raylane.training.model.supervised import OnHost, RunModel, release_gathered
from raylane.training.run.micro_batches import Division, FixedRows, divide, on_device
from raylane.training.run.step import evaluating, forward_only
from raylane.workers.batch import BatchDict

# Largest accepted norm of a difference, relative to the norm of the reference. Measured with torch 2.13 on a CPU with
# random weights of 25 model types: at most 6e-7 in float32 and 4e-3 in bfloat16; 0.2 to 1 if attention crosses
# documents, and 0.3 without the attention sinks of gpt-oss.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}

_REFERENCE = "raylane-reference"
"""Name in transformers' registry of its eager attention, computed for some queries at a time."""

_COMPARED = (attention.NAME, "sdpa", "flash_attention_2", "flash_attention_3")
"""Attention functions that take the arguments of eager attention; flex_attention needs masks of its own kind."""

_QUERIES = 256
"""Queries whose eager scores are in memory at the same time."""

_REFERENCE_TOKENS = 8192
"""Tokens of a document that are compared; transformers' eager mask of T x T numbers needs 256 MiB then."""

_ONE_ROW = FixedRows(1)

_LOSS_TOKENS = 16
"""Number of tokens whose logits are computed in full, to compare the two ways to the loss."""


def check_model(
    model: RunModel, source: RowSource, device: torch.device, precision: str, how: Division = _ONE_ROW
) -> None:
    """Raise ConfigError unless loss and hidden states of real rows are those of transformers' own computation.

    `how` is the division into micro-batches of the run. Runs in evaluation mode: with dropout any two passes would
    differ. In a pipeline, where no worker can compute hidden states alone, losses are compared.
    """
    check, packs = _Check(model, source, device, precision), compared_packs(source)
    if isinstance(model, PipelinedModel):
        for pack in packs:
            check.losses(pack)
    else:
        with torch.no_grad(), evaluating(model):
            check.loss()
            check.hidden(packs, how)
    release_gathered(model)


def compared_packs(source: RowSource) -> Packs:
    """Return the rows that are compared, at most three, each once: see the module docstring."""
    several = next((pack for pack in source.packs if len(pack) > 1), source.packs[0])
    # Without a loop over the packs, of which there may be millions.
    counts = np.fromiter(map(len, source.packs), np.int64, len(source.packs))
    documents = np.fromiter(itertools.chain.from_iterable(source.packs), np.int64, int(counts.sum()))
    lengths, starts = source.cache.lengths[documents], np.cumsum(counts) - counts
    longest = source.packs[int(np.maximum.reduceat(lengths, starts).argmax())]
    emptiest = source.packs[int(source.row_lengths.argmin())]
    return list(dict.fromkeys((several, longest, emptiest)))


def compared_documents(source: RowSource, pack: tuple[int, ...]) -> list[int]:
    """Return the places in a row of the documents that are compared: the first, the longest and the last."""
    longest = int(np.argmax(source.cache.lengths[list(pack)]))
    return sorted({0, longest, len(pack) - 1})


class _Eager:
    """Eager attention of a model's own class, in the form of transformers' attention functions.

    Compares the attention of the run with it, layer by layer, if `row` holds a plan of one document.
    """

    def __init__(self, implementation: str, row: PackedRows | None) -> None:
        self._compared = row is not None and implementation in _COMPARED
        self._implementation = implementation
        self._row = row
        self.difference = 0.0
        """Largest relative difference of a layer's attention of the run so far; NaN stays."""

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Return the output of eager attention, which is independent for each query."""
        eager = sys.modules[type(module).__module__].eager_attention_forward
        outputs = []
        for start in range(0, query.shape[2], _QUERIES):
            part = slice(start, start + _QUERIES)
            mask = None if attention_mask is None else attention_mask[:, :, part]
            outputs.append(eager(module, query[:, :, part], key, value, mask, *args, **kwargs)[0])
        output = torch.cat(outputs, dim=1)
        if self._compared:
            # Only sdpa reads the same masks; the others know which keys come before a query.
            mask = attention_mask if self._implementation == "sdpa" else None
            plan = {"packed_rows": self._row} if self._implementation == attention.NAME else {}
            from transformers import AttentionInterface

            ours = AttentionInterface()[self._implementation]
            difference = _difference(ours(module, query, key, value, mask, *args, **kwargs, **plan)[0], output)
            # `max` would drop NaN.
            self.difference = difference if not difference <= self.difference else self.difference
        return output, None


@contextmanager
def _by_transformers(model: RunModel, row: PackedRows | None = None) -> Iterator[_Eager]:
    """Compute whole rows with transformers' own eager attention and masks in a `with` block."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    parts: Any = model.own_stages if isinstance(model, PipelinedModel) else [model]
    # Layers of a pipeline stage and their decoder have configurations of their own.
    modules: list[Any] = [module for part in parts for module in part.causal_lm.modules()]
    configs = {
        id(module.config): module.config
        for module in modules
        if hasattr(getattr(module, "config", None), "_attn_implementation")
    }
    before = {key: config._attn_implementation for key, config in configs.items()}
    plans = model.swap_plans({}) if isinstance(model, PipelinedModel) else {}
    eager = _Eager(parts[0].causal_lm.config._attn_implementation, row)
    AttentionInterface.register(_REFERENCE, eager)
    AttentionMaskInterface.register(_REFERENCE, eager_mask)
    try:
        for config in configs.values():
            config._attn_implementation = _REFERENCE
        for part in parts:
            part.is_reference = True
        # Compiled layers would be compiled once more.
        with torch.compiler.set_stance("force_eager"):
            yield eager
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]
        for part in parts:
            part.is_reference = False
        if isinstance(model, PipelinedModel):
            model.swap_plans(plans)


class _Extremes:
    """Cross-entropy from logits that notes the most and the least probable token of each place."""

    def __init__(self, labels: Tensor) -> None:
        self.highest, self.lowest = labels.clone(), labels.clone()
        """int64 [1, T]; places that another worker computes keep their labels."""

    def __call__(self, logits: Tensor, batch: BatchDict) -> Tensor:
        places = batch["position_ids"][0]
        self.highest[0, places], self.lowest[0, places] = logits[0].argmax(dim=-1), logits[0].argmin(dim=-1)
        return CrossEntropy()(logits, batch)


class _Check:
    """Comparisons of one model on rows of the training data; each raises ConfigError unless the two sides are equal."""

    def __init__(self, model: RunModel, source: RowSource, device: torch.device, precision: str) -> None:
        self._model, self._source, self._device, self._precision = model, source, device, precision
        self._first: Any = model.own_stages[0] if isinstance(model, PipelinedModel) else model
        self._multiple = model.mesh.dims.row_multiple
        """Divisor of the length of rows that tensor and context parallelism need."""

    def _differ(self, value: float, reference: float, scale: float) -> bool:
        # Written as `not <=`, so that a NaN on either side fails the check.
        return not abs(value - reference) <= _TOLERANCE[self._precision] * scale

    def _rows(self, packs: Packs) -> RowSource:
        return RowSource(self._source.cache, packs, self._source.row_tokens, self._source.pad_id)

    def losses(self, pack: tuple[int, ...]) -> None:
        """Compare the loss of some documents in one row with those of each document in a row of its own."""
        chosen = tuple(pack[place] for place in compared_documents(self._source, pack))
        rows = self._rows([chosen, *((document,) for document in chosen)])
        tokens = min(self._source.row_tokens, _REFERENCE_TOKENS // self._multiple * self._multiple)
        batches = [_first_tokens(BatchDict.from_arrays(rows.rows([number])), tokens) for number in range(rows.num_rows)]
        totals = [forward_only(self._model, batches[0], _ONE_ROW, CrossEntropy(), self._device)[0]]
        with _by_transformers(self._model) if self._first.has_reference else nullcontext():
            totals += [
                forward_only(self._model, batch, _ONE_ROW, CrossEntropy(), self._device)[0] for batch in batches[1:]
            ]
        summed = torch.stack(totals)
        dist.all_reduce(summed)
        # Every context-parallel worker has computed whole rows of the reference.
        copies = self._model.mesh.dims.cp if self._first.has_reference else 1
        packed, alone = float(summed[0]), float(summed[1:].sum()) / copies
        if self._differ(packed, alone, max(1.0, abs(alone))):
            raise ConfigError(
                f"this model does not separate packed documents: {len(chosen)} documents have the loss {packed:.6g} in "
                f"one row and {alone:.6g} alone. Set policy.sequence_packing.enabled=false, "
                "or policy.hf_config_overrides.attn_implementation=eager"
            )

    def loss(self) -> None:
        """Compare the loss from logits with the loss from hidden states, and the ranges of the logits.

        Of a model with random weights the loss alone is nearly that of equal logits, whatever their scale. Compared on
        one row of at most `_LOSS_TOKENS` tokens around the first supervised token of the data.
        """
        tokens, supervised = self._source.cache.document(0)
        first = int(np.argmax(supervised)) if supervised.any() else 0
        start = max(0, min(first - _LOSS_TOKENS // 2, len(tokens) - _LOSS_TOKENS))
        ids = torch.from_numpy(tokens[start : start + _LOSS_TOKENS].astype(np.int64))[None]
        labels = torch.full_like(ids, IGNORED)
        labels[:, :-1] = ids[:, 1:]  # all positions, supervised or not: the two losses can be compared on any labels
        # The repeated last token has no label.
        missing = -ids.shape[1] % self._multiple
        ids = torch.cat([ids, ids[:, -1:].expand(1, missing)], dim=1)
        labels = F.pad(labels, (0, missing), value=IGNORED)
        row = BatchDict(input_ids=ids, labels=labels, position_ids=torch.arange(ids.shape[1])[None])
        batch = row.to(self._device)
        extremes = _Extremes(batch["labels"])
        by_logits = float(self._model(batch, extremes))
        by_hidden = float(self._model(batch, CrossEntropy()))
        if not math.isfinite(by_logits):
            raise ConfigError(
                f"the loss is {by_logits} before the first step: the weights are not finite, or overflow in "
                f"policy.precision={self._precision}. Check policy.model_name, or use policy.precision=float32"
            )
        ends = [BatchDict({**batch, "labels": labels}) for labels in (extremes.lowest, extremes.highest)]
        ranges = [[float(self._model(end, loss)) for end in ends] for loss in (_from_logits, CrossEntropy())]
        of_logits, of_hidden = (low - high for low, high in ranges)
        if self._differ(by_hidden, by_logits, abs(by_logits)) or self._differ(of_hidden, of_logits, abs(of_logits)):
            raise ConfigError(
                f"this model class changes its logits after its output head: the loss is {by_logits:.6g} from its "
                f"logits and {by_hidden:.6g} from its hidden states, the range of its logits {of_logits:.6g} and "
                f"{of_hidden:.6g}. Use an architecture that can be trained: llama, qwen2, qwen3, gemma, mistral"
            )

    def hidden(self, packs: Packs, how: Division) -> None:
        """Compare the hidden states of documents in rows as in training with those of each document alone."""
        numbers = [*range(len(packs))]
        if isinstance(how, FixedRows):
            how = replace(how, rows=min(how.rows, len(packs)))
            numbers += [0] * (-len(packs) % how.rows)  # full micro-batches
        batch = BatchDict.from_arrays(self._rows(packs).rows(numbers))
        batch["pack"] = torch.tensor(numbers)
        for part, host in on_device(divide(batch, how), self._device):
            hidden = self._states(part, host)
            for row, number in enumerate(host["pack"].tolist()):
                edges = np.cumsum([0, *self._source.cache.lengths[list(packs[number])]])
                for place in compared_documents(self._source, packs[number]):
                    trained = hidden[row, edges[place] : edges[place + 1]][:_REFERENCE_TOKENS]
                    document = packs[number][place]
                    difference = _difference(trained, self._reference(document, len(trained), hidden.shape))
                    if self._differ(difference, 0.0, 1.0):
                        raise ConfigError(
                            f"this model does not separate packed documents: the hidden states of document {document} "
                            f"in a row differ by {difference:.2g} (relative) from those of the same document alone. "
                            "Set policy.sequence_packing.enabled=false, and policy.train_micro_batch_size=1 if that is "
                            "not enough"
                        )

    def _states(self, batch: BatchDict, host: BatchDict) -> Tensor:
        """Return the hidden states of rows, float32 [B, T, H]; `host` is the batch in CPU memory."""
        hidden: Tensor = self._model(batch, None, host=OnHost(host), hidden_only=True)
        return hidden.float()

    def _reference(self, document: int, tokens: int, shape: tuple[int, ...]) -> Tensor:
        """Return the hidden states float32 [tokens, H] of the start of a document alone.

        They are computed in float32 by eager attention, unpadded. In bfloat16, and for layers that are not
        transformers', they are computed by the run's attention in rows of `shape` (B, T, H). ConfigError if the
        attention of the run computes something else than eager attention on the same input.
        """
        if self._first.has_reference:
            ids = torch.from_numpy(self._source.cache.document(document)[0][:tokens].astype(np.int64))[None]
            # Attention is causal, so more tokens change nothing.
            ids = F.pad(ids, (0, -tokens % self._multiple), value=self._source.pad_id)
            positions = torch.arange(ids.shape[1])[None]
            batch = BatchDict(input_ids=ids, labels=torch.full_like(ids, IGNORED), position_ids=positions)
            with _by_transformers(self._model, PackedRows.of(positions)) as eager:
                hidden = self._states(batch.to(self._device), batch)[0, :tokens]
            if self._differ(eager.difference, 0.0, 1.0):
                causal_lm = self._model.causal_lm
                raise ConfigError(
                    f"attn_implementation={causal_lm.config._attn_implementation} is wrong for this model: the "
                    f"attention of a layer of {type(causal_lm).__name__} differs by {eager.difference:.2g} (relative) "
                    "from transformers' eager attention. Set policy.hf_config_overrides.attn_implementation=eager",
                    key="attn_implementation",
                )
            if self._precision == "float32":
                return hidden
            del hidden, eager  # before the next forward pass, which needs the memory
        # Rows of another shape could be rounded in another way.
        rows = self._rows([(document,)]).rows([0] * shape[0])
        batch = _first_tokens(BatchDict.from_arrays(rows), shape[1])
        return self._states(batch.to(self._device), batch)[0, :tokens]


def _from_logits(logits: Tensor, batch: BatchDict) -> Tensor:
    """Return the same loss as CrossEntropy; as another function, the model gives it logits instead of hidden states."""
    return CrossEntropy()(logits, batch)


def _first_tokens(batch: BatchDict, tokens: int) -> BatchDict:
    """Return the first tokens of rows whose tensors all have a value for each token."""
    return BatchDict({name: values[:, :tokens] for name, values in batch.items()})


def _difference(values: Tensor, reference: Tensor) -> float:
    """Return the norm of the difference, relative to that of the reference."""
    return float((values.float() - reference.float()).norm() / reference.float().norm().clamp(min=1e-12))
