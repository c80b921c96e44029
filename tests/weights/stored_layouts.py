"""Layouts of versions for tests without Ray, and what a record brings into tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from raylane.weights.layout.boxes import StoredLayout, store
from raylane.weights.layout.recording import Record
from raylane.weights.memory.tensors import layout_of


def stored_whole(tensors: Mapping[str, torch.Tensor], same: Mapping[str, str] | None = None) -> StoredLayout:
    """Return the layout of a trainer of one rank."""
    return store([layout_of(tensors, None, None)], None, same)


def apply_record(record: Record, published: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    """Copy published tensors into those of a reader, region by region, with torch alone."""
    with torch.no_grad():
        for name, regions in record.regions.items():
            for region in regions:
                source = published[name][tuple(slice(a, a + b) for a, b in zip(*region.box, strict=True))]
                region.view.of(targets[region.name]).copy_(source)
        for target, view, value in record.constants:
            view.of(targets[target]).fill_(value)
