"""Model as a Hugging Face folder, written by all workers: safetensors with index, configuration, tokenizer.

Every file has one writer among the ranks that hold its weights. Weights are gathered one after the other, in an order
that keeps several writers busy, and go straight into the files: no process holds more than a few whole weights, and
nothing is written twice. The place may be a folder that all nodes see, or a URL. Called by `worker`, on all ranks.

    gather   a (file 1)   g (file 2)   b (file 1)   h (file 2) ...      all ranks that hold the weight
    write      [-- a, rank 0 --]         [-- b, rank 0 --]              in a thread of the writer's
                        [-- g, rank 1 --]         [-- h, rank 1 --]
"""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raylane.errors import CheckpointError
from raylane.sft.checkpoint.hf_folder import (
    ADAPTER_FOLDER,
    WeightFile,
    plan_files,
    stored_bytes,
    write_beside,
    write_index,
)
from raylane.sft.checkpoint.state import on_rank_zero
from raylane.sft.data.storage import Place
from raylane.sft.model import lora
from raylane.sft.model.adapter_files import Adapters, gather_adapters, write_adapter
from raylane.sft.model.supervised import RunModel
from raylane.sft.parallel.sharded import whole

_WEIGHTS_WAITING = 2
"""Number of gathered weights that may wait for their writer; with the one being written, the memory that is needed."""


def save_hf(
    folder: Place,
    model: RunModel,
    tokenizer_dir: Path,
    end_ids: Sequence[int] = (),
    start: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a Hugging Face folder with weights of this data type; wait until all files are written.

    `end_ids` are the tokens that end a turn, at which `generate` will stop. `start` is the folder that the weights came
    from; its other generation settings are kept. LoRA adapters are added into the weights, and also written by
    themselves in PEFT's format, in the folder `adapter`. CheckpointError on all ranks if one of them cannot write.
    """
    failed = f"the model could not be written to {folder}"
    files = _write_weights(failed, folder, model.causal_lm, dtype)
    adapters = gather_adapters(model.causal_lm, model.mesh.pp_group)
    on_rank_zero(
        failed, folder, lambda: _write_beside(folder, model, tokenizer_dir, end_ids, start, files, adapters, dtype)
    )


def rounds(files: Sequence[WeightFile]) -> list[list[WeightFile]]:
    """Return the files in groups that are written at the same time: each rank writes one file after the other. Pure."""
    of_writer: dict[int, list[WeightFile]] = {}
    for file in files:
        of_writer.setdefault(file.writer, []).append(file)
    return [[file for file in together if file is not None] for together in zip_longest(*of_writer.values())]


def _write_weights(failed: str, folder: Place, causal_lm: Any, dtype: torch.dtype) -> list[WeightFile]:
    """Write all safetensors files; return their plan. Collective."""
    weights, adapters = lora.base_parameters(causal_lm), lora.adapted(causal_lm)
    rank, world = dist.get_rank(), dist.get_world_size()
    held: list[dict[str, tuple[int, ...]]] = [{} for _ in range(world)]
    dist.all_gather_object(held, {name: tuple(weight.shape) for name, weight in weights.items()})
    files = plan_files(held, dtype.itemsize)
    writer = _WeightWriter(folder)
    try:
        # One weight of each file in turn, so that all writers have work.
        for together in rounds(files):
            for names in zip_longest(*(file.shapes for file in together)):
                for file, name in zip(together, names, strict=True):
                    if name is None or rank not in file.holders:
                        continue
                    # Rounded before it is gathered: half the bytes on the wire.
                    gathered = whole(lora.merged_weight(name, weights, adapters).to(dtype))
                    if file.writer == rank:
                        writer.add(file, dtype, gathered.cpu())
    finally:
        error = writer.close()
    errors: list[str | None] = [None] * world
    dist.all_gather_object(errors, error)
    if any(errors):
        reasons = "; ".join(sorted({reason for reason in errors if reason is not None}))
        ranks = [number for number, reason in enumerate(errors) if reason is not None]
        raise CheckpointError(f"{failed}: {reasons}", path=str(folder), ranks=ranks)
    return files


class _WeightWriter:
    """Thread that writes the files of this rank, in the order in which their weights are added.

    After an error it takes weights without writing them: the other ranks still need this one to gather.
    """

    def __init__(self, folder: Place) -> None:
        self._folder = folder
        self._waiting: queue.Queue[tuple[WeightFile, torch.dtype, torch.Tensor] | None] = queue.Queue(_WEIGHTS_WAITING)
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="raylane-hf-export", daemon=True)
        self._thread.start()

    def add(self, file: WeightFile, dtype: torch.dtype, weight: torch.Tensor) -> None:
        """Give the next weight of a file; wait while too many are waiting already."""
        self._waiting.put((file, dtype, weight))

    def close(self) -> str | None:
        """Wait until all weights are written; return the reason if they are not."""
        self._waiting.put(None)
        self._thread.join()
        return self._error

    def _run(self) -> None:
        file: WeightFile | None = None
        stream: Any = None
        while (item := self._waiting.get()) is not None:
            if self._error is not None:
                continue
            try:
                if item[0] is not file:
                    if stream is not None:
                        stream.close()
                    file = item[0]
                    if isinstance(self._folder, Path):
                        self._folder.mkdir(parents=True, exist_ok=True)
                    stream = (self._folder / file.name).open("wb")
                    stream.write(file.header(item[1]))
                stream.write(stored_bytes(item[2]))
            except Exception as error:
                self._error = str(error) or type(error).__name__
        try:
            if stream is not None:
                stream.close()
        except Exception as error:
            self._error = self._error or str(error) or type(error).__name__


def _write_beside(
    folder: Place,
    model: RunModel,
    tokenizer_dir: Path,
    end_ids: Sequence[int],
    start: Path | None,
    files: Sequence[WeightFile],
    adapters: Adapters | None,
    dtype: torch.dtype,
) -> None:
    """Write everything of a Hugging Face folder except the weights. Runs on rank 0 only."""
    # transformers writes to local folders only, and the place may be a URL.
    with tempfile.TemporaryDirectory() as name:
        draft = Path(name)
        write_beside(draft, model.causal_lm, tokenizer_dir, end_ids, start, dtype)
        write_index(draft, files, dtype)
        if adapters is not None:
            write_adapter(draft / ADAPTER_FOLDER, adapters, start, torch.float32)
            if isinstance(folder, Path):
                (folder / ADAPTER_FOLDER).mkdir()
        for file in draft.rglob("*"):
            if file.is_file():
                target = folder
                for part in file.relative_to(draft).parts:
                    target = target / part
                target.write_bytes(file.read_bytes())
