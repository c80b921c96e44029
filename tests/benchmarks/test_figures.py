"""The README, the site and the page of figures quote the same dated runs."""

from __future__ import annotations

import re

import pytest

from benchmarks import figures


@pytest.mark.parametrize("page", figures.PAGES)
def test_figures_of_pages_are_those_of_the_newest_runs(page: str) -> None:
    text = (figures.ROOT / page).read_text()
    assert figures.filled(text) == text, "run `make figures`"


def test_every_generated_part_is_on_a_page() -> None:
    pages = "".join((figures.ROOT / page).read_text() for page in figures.PAGES)
    assert set(re.findall(r"<!-- figures: (\w+) -->", pages)) == set(figures.PARTS)


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [(6.7, "6.7 us"), (999.4, "999 us"), (999.6, "1 ms"), (16957.2, "17 ms"), (231080.4, "231 ms"), (3.66e6, "3.66 s")],
)
def test_times_have_three_digits_and_a_unit(microseconds: float, text: str) -> None:
    assert figures.time(microseconds) == text
