"""A crew of one actor, which the tests of a file share (fixture `crew` in conftest.py)."""

from __future__ import annotations

from typing import Any

import ray


class OneMaker:
    """Starts one actor of `maker_class`, a class with a method `stats` that returns `raylane.stats()`."""

    maker_class: type[Any]

    def __init__(self) -> None:
        self.maker: Any = ray.remote(num_cpus=0)(self.maker_class).remote()
        ray.get(self.maker.__ray_ready__.remote())

    def makers(self) -> list[Any]:
        """Return the actors that must hold no value after a test."""
        return [self.maker]
