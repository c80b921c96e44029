"""Write the figures of the newest dated runs into the README and the docs: `make figures`.

The generated parts lie between `<!-- figures: NAME -->` and `<!-- end of figures -->`. A test compares them with the
records in `benchmarks/results`. The same runs of each benchmark feed all pages, so no two pages can differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks import goals
from benchmarks.goals import CPU
from benchmarks.graph import cases as graph_cases
from benchmarks.graph.cases import BLOCKING, CALLS, COMPILED, RAYLANE, WAKE_UPS
from benchmarks.rl import cases as rl_cases
from benchmarks.runs import RESULTS, ROOT, Runs, factor, goal_table, table, time, with_parts
from benchmarks.sft import cases as sft_cases
from benchmarks.transfer import cases as transfer_cases
from benchmarks.transfer.cases import BASELINE, OURS, RDT
from benchmarks.weights import cases as weights_cases

PAGES = (
    "README.md",
    "docs/index.md",
    "docs/reference/figures.md",
    "docs/howto/from-ray-compiled-graphs.md",
    "docs/howto/from-ray-direct-transport.md",
)
CONTENDERS = {
    OURS: "raylane `auto`",
    "raylane:tcp": "`tcp`",
    "raylane:gloo": "`gloo`",
    "raylane:nixl": "`nixl`",
    BASELINE: "Ray object store",
    "ray:rdt-gloo": "RDT gloo",
    "ray:rdt-nixl": "RDT NIXL",
}
"""Contenders of the table of transfers, and their columns."""
MOVERS = {
    "raylane": "raylane",
    "ray:object_store": "Ray object store, tensors",
    "ray:numpy": "Ray object store, NumPy",
    "ray:rdt-gloo": "RDT gloo",
    "ray:rdt-nixl": "RDT NIXL",
    "gloo:broadcast": "gloo broadcast",
    "dcp:tmpfs": "DCP on tmpfs",
}
"""Contenders of the table of weights, and their columns."""
PATTERNS = {
    "echo": "1 actor, small dict",
    "echo-1ms": "1 actor, 1 ms between calls",
    "echo-10ms": "1 actor, 10 ms between calls",
    "async": "1 actor, asyncio",
    "chain-4": "chain of 4 actors",
    "chain-4-1ms": "the same, 1 ms between calls",
    "scatter-4": "scatter to 4 actors and gather",
    "scatter-8": "scatter to 8 actors and gather",
    "broadcast-8": "the same dict to 8 actors and back",
    "throughput-8": "1 actor, 8 executions in flight, time per call",
    "array-10MB-4": "broadcast of a 10 MB array to 4 actors",
    "array-10MB-4-empty": "the same, array made by `raylane.empty`",
    "compile-8": "compile and tear down a graph of 8 running actors",
}
"""Cases of the table of graphs, and their rows."""
SIZES = r"\d+(B|KB|MB|GB)(-new|-mapped)?|small-.*"
"""Pattern of the cases of transfers that are sizes: those of the table of transfers."""


def headline() -> str:
    """Return the first sentence of the README and of the site."""
    transfer, graph = Runs("transfer"), Runs("graph")
    tensors = [time(transfer.get("100MB", name)) for name in (OURS, BASELINE)]
    calls = [time(graph.get("echo", name), "µs") for name in (RAYLANE, CALLS)]
    return (
        f"raylane makes working Ray programs faster: a 100 MB tensor goes from one actor to another in\n{tensors[0]} "
        f"instead of {tensors[1]}, and a fixed pattern of actor calls takes {calls[0]} instead of {calls[1]}."
    )


def bold_headline() -> str:
    """Return the headline of the README."""
    return f"**{headline()}**"


def overview() -> str:
    """Return the table of the README."""
    transfer, graph, sft = Runs("transfer"), Runs("graph"), Runs("sft")
    best_rdt = min(RDT, key=lambda name: transfer.get("100MB", name))
    idle = {name: graph.get("idle-8", name, "cpu_s") for name in (RAYLANE, COMPILED, CALLS)}
    between = sft.get("train-1", "compiled", "step_us") - sft.get("train-1", "compiled", "work_us")
    rows = [
        [
            "100 MB tensor from actor to actor",
            time(transfer.get("100MB", OURS)),
            f"{time(transfer.get('100MB', BASELINE))} (object store), "
            f"{time(transfer.get('100MB', best_rdt))} (RDT {best_rdt.removeprefix('ray:rdt-')})",
            f"{factor(transfer.ratio('100MB', BASELINE, OURS))}, {factor(transfer.ratio('100MB', best_rdt, OURS))}",
        ],
        [
            "the same, made by `raylane.empty`",
            time(transfer.get("100MB-mapped", OURS)),
            f"{time(transfer.get('100MB-mapped', BASELINE))} (object store)",
            factor(transfer.ratio("100MB-mapped", BASELINE, OURS)),
        ],
        [
            "one call of one actor, small dict",
            time(graph.get("echo", RAYLANE), "µs"),
            f"{time(graph.get('echo', COMPILED), 'µs')} (Ray compiled graph), "
            f"{time(graph.get('echo', CALLS), 'µs')} (Ray call)",
            f"{factor(graph.ratio('echo', COMPILED, RAYLANE))}, {factor(graph.ratio('echo', CALLS, RAYLANE))}",
        ],
        [
            "CPU time of 8 idle actors in a graph, over 10 s",
            f"{idle[RAYLANE]:.2f} s ({idle[CALLS]:.2f} s without a graph)",
            f"{idle[COMPILED]:.1f} s (Ray compiled graph)",
            f"{idle[COMPILED] / idle[RAYLANE]:.0f}x less",
        ],
        [
            f"fine-tuning: time between two steps of {time(sft.get('train-1', 'compiled', 'work_us'))}",
            time(max(between, 0.0)),
            "",
            "",
        ],
    ]
    return "\n".join(
        [
            f"Measured on a VM with 2 cores, on CPU: transfers {transfer.number()}; graphs {graph.number()};\n"
            f"fine-tuning {sft.number()}. Medians, and the range over the runs. "
            "[All figures, with missed targets](docs/reference/figures.md).",
            "",
            table(["what", "raylane", "stock Ray", "factor"], rows),
        ]
    )


def from_ray_graphs() -> str:
    """Return the table of the page for programs written for Ray's compiled graphs."""
    runs = Runs("graph")
    names = (RAYLANE, COMPILED)
    rows = [
        [PATTERNS[case], *(time(runs.get(case, name)) for name in names), factor(runs.ratio(case, COMPILED, RAYLANE))]
        for case in ("echo", "chain-4", "scatter-8", "array-10MB-4")
    ]
    idle = [runs.get("idle-8", name, "cpu_s") for name in names]
    rows.append(
        ["CPU time of 8 idle actors over 10 s", f"{idle[0]:.2f} s", f"{idle[1]:.1f} s", f"{idle[1] / idle[0]:.0f}x"]
    )
    return "\n".join([f"Medians ({runs.origin()}):", "", table(["pattern", "raylane", "Ray's graph", "factor"], rows)])


def from_ray_transport() -> str:
    """Return the table of the page for programs written for Ray's direct transport."""
    runs = Runs("transfer")
    rows = []
    for case in runs.cases("4KB|1MB|100MB|1GB|small-10000x4KB"):
        best = min(RDT, key=lambda name: runs.get(case, name))
        times = [time(runs.get(case, name)) for name in (OURS, *RDT)]
        rows.append([case, *times, factor(runs.ratio(case, best, OURS))])
    head = ["tensor", "raylane", *(CONTENDERS[name] for name in RDT), "over the better"]
    return "\n".join([f"Medians ({runs.origin()}):", "", table(head, rows)])


def machine() -> str:
    """Return when and on what the benchmarks ran."""
    names = ("transfer", "graph", "sft", "weights", "rl")
    return "\n".join(f"- `python -m benchmarks {name}`: {Runs(name).origin()}" for name in names)


def transfers() -> str:
    """Return the table of transfers, by size of the tensor."""
    runs = Runs("transfer")
    rows = []
    for case in runs.cases(SIZES):
        best = min(RDT, key=lambda name: runs.get(case, name))
        over = [factor(runs.ratio(case, name, OURS)) for name in (BASELINE, best)]
        rows.append([case, *(runs.times(case, name) for name in CONTENDERS), *over])
    return table(["tensor", *CONTENDERS.values(), "over the store", "over the better RDT"], rows)


def graphs() -> str:
    """Return the table of compiled graphs."""
    runs = Runs("graph")
    rows = []
    for case, pattern in PATTERNS.items():
        if not runs.has(case, RAYLANE):
            continue
        times = [runs.times(case, name) for name in (RAYLANE, COMPILED, CALLS, WAKE_UPS)]
        cpu = " / ".join(time(runs.get(case, name, CPU)) for name in (RAYLANE, COMPILED))
        rows.append([pattern, *times, factor(runs.ratio(case, COMPILED, RAYLANE)), cpu])
    head = ["pattern", "raylane", "Ray compiled graph", "Ray calls", "bare wake-ups", "over the compiled graph"]
    return table([*head, "CPU per call, raylane / compiled graph"], rows)


def graph_busy(folder: Path = RESULTS) -> str:
    """Return the table of calls beside processes that compute, and that of actors with Ray's niceness if it was run."""
    parts = [_busy_table(Runs("graph", folder))]
    if any(folder.glob("graph-niceness-*.json")):
        runs = Runs("graph-niceness", folder)
        parts += [f"With actors of niceness {runs.machine['niceness']} ({runs.number()}):", _busy_table(runs)]
    return "\n\n".join(parts)


def _busy_table(runs: Runs) -> str:
    rows = [
        [case, *(runs.times(case, name) for name in (RAYLANE, BLOCKING, COMPILED, CALLS))]
        for case in runs.cases(".*-busy.")
    ]
    return table(["case", "raylane", "raylane that always sleeps", "Ray compiled graph", "Ray calls"], rows)


def collectives() -> str:
    """Return the table of sums over actors."""
    runs = Runs("graph")
    names = (RAYLANE, graph_cases.IN_METHOD, COMPILED)
    rows = []
    for case in runs.cases("allreduce-.*"):
        cells = [f"{runs.times(case, name)}, CPU {time(runs.get(case, name, CPU))}" for name in names]
        rows.append([case.rpartition("-")[2], *cells])
    return table(["actors", "raylane", "in method (gloo)", "Ray's graph"], rows)


def steps() -> str:
    """Return the table of overheads of a step."""
    runs = Runs("sft")
    names = ("compiled", "rpc", "ray:compiled")
    rows = [
        [
            f"`{case}`",
            *(runs.times(case, name) for name in names),
            factor(runs.ratio(case, "rpc", "compiled")),
            ", ".join(time(runs.get(case, name, CPU)) for name in names),
        ]
        for case in runs.cases("noop-.*")
    ]
    return table(["case", "compiled", "rpc", "Ray", "rpc / compiled", "CPU per step: compiled, rpc, Ray"], rows)


def weights() -> str:
    """Return the table of whole updates: from the call of `publish` until all readers have the version."""
    runs = Runs("weights")
    others = [name for name in MOVERS if any(contender == name for _, contender in runs.of_all)]
    rows = [[case, *(runs.times(case, name) or "-" for name in others)] for case in runs.cases("move-.*")]
    return table(["case", *(MOVERS[name] for name in others)], rows)


def rl() -> str:
    """Return the table of reinforcement learning: samples per second, and times of one sample or step."""
    runs = Runs("rl")
    rows = [
        [
            case,
            contender,
            f"{runs.get(case, contender, 'samples_per_s'):,.0f}",
            runs.times(case, contender),
            time(runs.get(case, contender, CPU)),
        ]
        for case, contender in runs.of_all
    ]
    return table(["case", "contender", "samples/s", "p50 / p99", "CPU"], rows)


def _goals(benchmark: str, ratios: list[goals.Ratio], floors: Mapping[str, str] | None = None) -> str:
    return goal_table(Runs(benchmark).goals(lambda records: goals.reached(ratios, records, floors)))


PARTS: dict[str, Callable[[], str]] = {
    "bold_headline": bold_headline,
    "headline": headline,
    "overview": overview,
    "from_ray_graphs": from_ray_graphs,
    "from_ray_transport": from_ray_transport,
    "machine": machine,
    "transfers": transfers,
    "transfer_goals": lambda: _goals("transfer", transfer_cases.GOALS, transfer_cases.FLOORS),
    "graphs": graphs,
    "graph_busy": graph_busy,
    "collectives": collectives,
    "graph_goals": lambda: _goals("graph", graph_cases.GOALS, graph_cases.FLOORS),
    "steps": steps,
    "sft_goals": lambda: _goals("sft", sft_cases.GOALS),
    "weights": weights,
    "weights_goals": lambda: goal_table(Runs("weights").goals(weights_cases.goals)),
    "rl": rl,
    "rl_goals": lambda: goal_table(Runs("rl").goals(rl_cases.goals)),
}


def filled(text: str) -> str:
    """Return a page with its generated parts made anew. KeyError for an unknown part."""
    return with_parts(text, "figures", PARTS)


def main() -> int:
    """Write all pages, and print which have changed."""
    for page in PAGES:
        text = (ROOT / page).read_text()
        if (new := filled(text)) != text:
            (ROOT / page).write_text(new)
            print(f"{page} has changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
