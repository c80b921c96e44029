from __future__ import annotations

import itertools
import random

import pytest

from raylane.core.memory.spans import Span, merge, strided_span


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((), (), Span(100, 104)),
        ((3,), (4,), Span(100, 112)),
        ((3,), (-4,), Span(92, 104)),
        ((2, 3), (0, 4), Span(100, 112)),
        ((2, 2), (40, 8), Span(100, 152)),
        ((0, 5), (20, 4), Span(100, 100)),
    ],
)
def test_strided_span(shape: tuple[int, ...], strides: tuple[int, ...], expected: Span) -> None:
    assert strided_span(100, shape, strides, 4) == expected


def test_merge_joins_what_overlaps_and_leaves_what_touches() -> None:
    spans = [Span(10, 20), Span(0, 5), Span(15, 30), Span(30, 40), Span(7, 7)]
    merged, home = merge(spans)
    assert merged == [Span(0, 5), Span(10, 30), Span(30, 40)]
    assert home == [1, 0, 1, 2, -1]


def test_merge_covers_everything_once_whatever_the_spans() -> None:
    rng = random.Random(0)
    for _ in range(200):
        spans = [Span(start, start + rng.randint(0, 12)) for start in (rng.randint(0, 60) for _ in range(8))]
        merged, home = merge(spans)
        assert all(a.stop <= b.start for a, b in itertools.pairwise(merged))
        for span, index in zip(spans, home, strict=True):
            assert (index == -1) == (span.nbytes == 0)
            if index >= 0:
                assert merged[index].start <= span.start
                assert span.stop <= merged[index].stop
        assert {b for m in merged for b in range(*m)} == {b for s in spans for b in range(*s)}
