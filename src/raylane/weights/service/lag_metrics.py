"""Readers that are too far behind, by name in `ray.util.metrics`. A part of the catalogue."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable
from typing import Any

from ray.util import metrics

from raylane.core import settings
from raylane.weights.state.readers import ReaderInfo

TAGS = ("weights", "reader", "node")


@functools.cache
def gauge() -> Any:
    """Return Ray's gauge. One for each process: Ray would warn of a second one."""
    text = "Versions that a reader of weights is behind, for readers that are more than max_lag behind"
    return metrics.Gauge("raylane_weights_reader_lag", text, TAGS)


class LagGauge:
    """Gauge with one series for each reader that is, or was, too far behind."""

    def __init__(self) -> None:
        self._named: set[tuple[str, str, str]] = set()
        """Tags of the readers whose lag is not 0 in the gauge."""

    def push(self, infos: Iterable[ReaderInfo]) -> None:
        """Pass the present lags to Ray; 0 for readers that have caught up or left since."""
        lags = {(info.name, info.label, info.host): info.lag for info in infos if info.too_far}
        for values in self._named | lags.keys():
            gauge().set(lags.get(values, 0), dict(zip(TAGS, values, strict=True)))
        self._named = set(lags)


async def report_lags(infos: Callable[[], Iterable[ReaderInfo]]) -> None:
    """Pass lags to Ray every `RAYLANE_METRICS_S` seconds, without an end; return at once if that is not set."""
    pause_s = settings.METRICS_S.read()
    lags = LagGauge()
    while pause_s is not None:
        await asyncio.sleep(pause_s)
        lags.push(infos())
