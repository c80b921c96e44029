"""Division of a model into pipeline stages: which worker holds which layers.

    4 stages on 2 workers   stage 0, layers 0-1, worker 0      stage 1, layers 2-3, worker 1
                            stage 2, layers 4-5, worker 0      stage 3, layers 6-7, worker 1

Pure functions without torch. Called by `build` and `lora`; `stage_modules` carries the division out.
"""

from __future__ import annotations

__all__ = ["layer_ranges", "own_stages"]


def own_stages(worker: int, workers: int, per_worker: int) -> list[int]:
    """Return the numbers of the stages of a worker: every `workers`-th one."""
    return [worker + i * workers for i in range(per_worker)]


def layer_ranges(layers: int, stages: int) -> list[range]:
    """Return the layers of each stage; the first stages get one more layer if the numbers do not divide."""
    share, more = divmod(layers, stages)
    ends = [share * (i + 1) + min(i + 1, more) for i in range(stages)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
