"""Costs of an update of weights in large clusters, computed with the code that plans it, for links of 400 Gbit/s.

    python -m benchmarks.studies.weights_scale

256 ranks of a trainer (FSDP over all, 8 on each host) publish; 128 readers (8 on each host) take the version, once as
16 engines of tensor parallelism 8, once as one engine of 128 ranks. Where boxes lie, which chunks each host needs and
who sends them to whom is decided by `weights.layout` and `weights.chunks.spread`; the order in which transfers end is
random. The time is that of the busiest link; nothing else is modelled.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from raylane.weights.chunks.spread import Spread
from raylane.weights.layout.boxes import Division, Layout, TensorLayout, divide, store
from raylane.weights.layout.plan import make_plans

RANKS, READERS, PER_HOST = 256, 128, 8
LINK_BYTES_S = 400e9 / 8
Shapes = dict[str, tuple[int, ...]]


def dense_70b() -> Shapes:
    """Return the shapes of Llama 3 70B (its published configuration)."""
    hidden, inner, heads = 8192, 28672, 1024
    shapes: Shapes = {"embed": (128256, hidden), "head": (128256, hidden), "norm": (hidden,)}
    for layer in range(80):
        sizes = {"q": hidden, "k": heads, "v": heads, "o": hidden, "gate": inner, "up": inner}
        shapes |= {f"{layer}.{name}": (size, hidden) for name, size in sizes.items()}
        shapes |= {f"{layer}.down": (hidden, inner), f"{layer}.norm1": (hidden,), f"{layer}.norm2": (hidden,)}
    return shapes


def mixture_1t() -> Shapes:
    """Return shapes of a mixture of experts with 10^12 parameters: 60 layers of 384 experts, stacked."""
    hidden, inner, experts = 7168, 2048, 384
    shapes: Shapes = {"embed": (163840, hidden), "head": (163840, hidden)}
    for layer in range(60):
        shapes |= {f"{layer}.{name}": (hidden, hidden) for name in ("q", "k", "v", "o")}
        shapes |= {f"{layer}.{name}": (experts, inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{layer}.down": (experts, hidden, inner), f"{layer}.norm": (hidden,)}
    return shapes


def layouts(shapes: Shapes, world: int) -> Iterator[Layout]:
    """Yield the layout of each rank: every tensor divided by its first dimension."""
    for rank in range(world):
        yield {
            name: TensorLayout(shape, "bfloat16", 2, divide(shape, [world], [rank], [Division(0)]))
            for name, shape in shapes.items()
        }


def spread_all(needed: dict[str, dict[str, list[int]]], part_bytes: dict[str, int]) -> tuple[Counter[str], int]:
    """Run the transfers of all parts; return the bytes that each host sends and the number of transfers."""
    chance, sent, transfers = random.Random(0), Counter[str](), 0
    for part, by_host in needed.items():
        spread = Spread(part, part_bytes[part], len(part_bytes))
        for host, chunks in by_host.items():
            spread.want(host, chunks)
        under_way = spread.assign()
        while under_way:
            transfer = under_way.pop(chance.randrange(len(under_way)))
            spread.end(transfer)
            sent[transfer.holder] += spread.place(transfer.chunks)[1]
            transfers += 1
            under_way += spread.assign()
    return sent, transfers


def report(title: str, shapes: Shapes, engines: int) -> list[str]:
    """Return one row of the table as cells."""
    hosts = [f"trainer {rank // PER_HOST}" for rank in range(RANKS)]
    registered, wanted = list(layouts(shapes, RANKS)), list(layouts(shapes, READERS // engines))
    began = time.perf_counter()
    stored = store(registered, hosts)
    stored_s, began = time.perf_counter() - began, time.perf_counter()
    plans = make_plans(stored, wanted)
    planned_s = time.perf_counter() - began
    parts = dict(zip(stored.parts, stored.nbytes, strict=True))
    needed: dict[str, dict[str, list[int]]] = {part: {} for part in parts}
    received: Counter[str] = Counter()
    for number in range(READERS // PER_HOST):
        host, mine = f"reader {number}", plans_of(number, engines, len(plans))
        for part in parts:
            chunks = sorted({chunk for index in mine for chunk in plans[index].chunks(part)})
            if chunks:
                needed[part][host] = chunks
                whole = Spread(part, parts[part])
                received[host] += sum(whole.place(range(chunk, chunk + 1))[1] for chunk in chunks)
    began = time.perf_counter()
    sent, transfers = spread_all(needed, parts)
    decided_s = time.perf_counter() - began
    from_trainer = max(nbytes for host, nbytes in sent.items() if host.startswith("trainer"))
    by_readers = max((nbytes for host, nbytes in sent.items() if host.startswith("reader")), default=0)
    into_reader = max(received.values())
    busiest = max(from_trainer, by_readers, into_reader)
    cells: Sequence[object] = (
        title,
        f"{sum(parts.values()) / 1e9:,.0f} GB",
        f"{from_trainer / 1e9:,.1f} GB",
        f"{into_reader / 1e9:,.1f} GB",
        f"{by_readers / 1e9:,.1f} GB",
        f"{busiest / LINK_BYTES_S:.2f} s",
        f"{2 * RANKS + 3 * READERS + transfers:,}",
        f"{stored_s:.1f} s, {planned_s / len(plans):.2f} s",
        f"{decided_s:.1f} s",
    )
    return [str(cell) for cell in cells]


def plans_of(number: int, engines: int, count: int) -> range:
    """Return the plans of the readers on a host: all ranks of an engine, or some ranks of the only one."""
    return range(count) if engines > 1 else range(number * PER_HOST, (number + 1) * PER_HOST)


def main() -> None:
    """Print the table of `docs/design/scaling.md`."""
    heads = (
        "weights and readers",
        "version",
        "out of each trainer's host",
        "into each reader's host",
        "out of each reader's host",
        "busiest link",
        "messages of the catalogue",
        "layout, plan of a reader",
        "choice of transfers",
    )
    print("| " + " | ".join(heads) + " |")
    print("| " + " | ".join("---" for _ in heads) + " |")
    for name, shapes in (("70B", dense_70b()), ("1T", mixture_1t())):
        for engines, how in ((16, "16 engines of 8"), (1, "one of 128")):
            print("| " + " | ".join(report(f"{name}, {how}", shapes, engines)) + " |", flush=True)


if __name__ == "__main__":
    main()
