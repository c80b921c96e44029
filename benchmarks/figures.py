"""Write the figures of the newest dated runs into the README and the docs: `make figures`.

The generated parts lie between `<!-- figures: NAME -->` and `<!-- end of figures -->`. A test compares them with the
records in `benchmarks/results`. One run of each benchmark feeds all pages, so no two pages can differ.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from raylane.bench import rl_cases
from raylane.bench.weights_cases import Goal, goals

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/index.md", "docs/reference/figures.md")
CONTENDERS = {
    "raylane:auto": "raylane `auto`",
    "raylane:tcp": "`tcp`",
    "raylane:gloo": "`gloo`",
    "raylane:nixl": "`nixl`",
    "ray:object_store": "Ray object store",
    "ray:rdt-gloo": "RDT gloo",
    "ray:rdt-nixl": "RDT NIXL",
}
"""Contenders of the table of transfers, and their columns."""
RDT = ("ray:rdt-gloo", "ray:rdt-nixl")
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
    "scatter-8": "scatter to 8 actors and gather",
    "broadcast-8": "the same dict to 8 actors and back",
    "throughput-8": "1 actor, 8 executions in flight, time per call",
    "array-10MB-4": "broadcast of a 10 MB array to 4 actors",
    "array-10MB-4-empty": "the same, array made by `raylane.empty`",
    "compile-8": "compile and tear down a graph of 8 running actors",
}
"""Cases of the table of graphs, and their rows."""


class Run:
    """Records of the newest run of one benchmark."""

    def __init__(self, benchmark: str) -> None:
        dated = re.compile(rf"{benchmark}-\d{{4}}-\d\d-\d\d\.json")
        path = max(path for path in (ROOT / "benchmarks/results").iterdir() if dated.fullmatch(path.name))
        self.date = path.stem.removeprefix(f"{benchmark}-")
        self.records = {
            (record["case"], record["contender"]): record for record in json.loads(path.read_text())["records"]
        }

    def get(self, case: str, contender: str, figure: str = "p50_us") -> float:
        """Return one figure of a record: microseconds, or seconds for `cpu_s`."""
        return float(self.records[case, contender][figure])

    def ratio(self, case: str, slower: str, faster: str) -> float:
        """Return how many times the p50 of `faster` fits into that of `slower`."""
        return self.get(case, slower) / self.get(case, faster)

    def times(self, case: str, contender: str) -> str:
        """Return p50 and p99 of a record; "" if the contender does not take part."""
        if (case, contender) not in self.records:
            return ""
        return f"{time(self.get(case, contender))} / {time(self.get(case, contender, 'p99_us'))}"


def time(microseconds: float, micro: str = "us") -> str:
    """Return a time with three significant digits and its unit."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= 0.9995 * size:
            return f"{_digits(microseconds / size)} {unit}"
    return f"{_digits(microseconds)} {micro}"


def _digits(number: float) -> str:
    return f"{number:.0f}" if number >= 99.95 else f"{number:.3g}"


def factor(ratio: float) -> str:
    """Return a ratio such as 12.8x, with two or three significant digits."""
    return f"{_digits(ratio)}x" if ratio >= 10 else f"{ratio:.2g}x"


def row(cells: Iterable[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |".replace("|  ", "| ")


def headline() -> str:
    """Return the first sentence of the README and of the site."""
    transfer, graph = Run("transfer"), Run("graph")
    tensors = [time(transfer.get("100MB", name)) for name in ("raylane:auto", "ray:object_store")]
    calls = [time(graph.get("echo", name), "µs") for name in ("raylane", "ray:calls")]
    return (
        f"raylane makes working Ray programs faster: a 100 MB tensor goes from one actor to another in\n{tensors[0]} "
        f"instead of {tensors[1]}, and a fixed pattern of actor calls takes {calls[0]} instead of {calls[1]}."
    )


def bold_headline() -> str:
    """Return the headline of the README."""
    return f"**{headline()}**"


def overview() -> str:
    """Return the table of the README."""
    transfer, graph, sft = Run("transfer"), Run("graph"), Run("sft")
    ours, store = "raylane:auto", "ray:object_store"
    best_rdt = min(RDT, key=lambda name: transfer.get("100MB", name))
    idle = {name: graph.get("idle-8", name, "cpu_s") for name in ("raylane", "ray:compiled", "ray:calls")}
    between = sft.get("train-1", "compiled", "step_us") - sft.get("train-1", "compiled", "work_us")
    return "\n".join(
        [
            f"Measured on a 2-core x86-64 VM with Ray 2.60.0 and torch 2.13.0 on CPU: transfers {transfer.date}, "
            f"graphs {graph.date},\nfine-tuning {sft.date}; median (p50). "
            "[All figures, with missed targets](docs/reference/figures.md).",
            "",
            row(["what", "raylane", "stock Ray", "factor"]),
            row(["---"] * 4),
            row(
                [
                    "100 MB tensor from actor to actor",
                    time(transfer.get("100MB", ours)),
                    f"{time(transfer.get('100MB', store))} (object store), "
                    f"{time(transfer.get('100MB', best_rdt))} (RDT {best_rdt.removeprefix('ray:rdt-')})",
                    f"{factor(transfer.ratio('100MB', store, ours))}, "
                    f"{factor(transfer.ratio('100MB', best_rdt, ours))}",
                ]
            ),
            row(
                [
                    "1 MB tensor from actor to actor",
                    time(transfer.get("1MB", ours)),
                    f"{time(transfer.get('1MB', store))} (object store)",
                    factor(transfer.ratio("1MB", store, ours)),
                ]
            ),
            row(
                [
                    "one call of one actor, small dict",
                    time(graph.get("echo", "raylane"), "µs"),
                    f"{time(graph.get('echo', 'ray:compiled'), 'µs')} (Ray compiled graph), "
                    f"{time(graph.get('echo', 'ray:calls'), 'µs')} (Ray call)",
                    f"{factor(graph.ratio('echo', 'ray:compiled', 'raylane'))}, "
                    f"{factor(graph.ratio('echo', 'ray:calls', 'raylane'))}",
                ]
            ),
            row(
                [
                    "CPU time of 8 idle actors in a graph, over 10 s",
                    f"{idle['raylane']:.2f} s ({idle['ray:calls']:.2f} s without a graph)",
                    f"{idle['ray:compiled']:.1f} s (Ray compiled graph)",
                    f"{idle['ray:compiled'] / idle['raylane']:.0f}x less",
                ]
            ),
            row(
                [
                    f"fine-tuning: time between two steps of {time(sft.get('train-1', 'compiled', 'work_us'))}",
                    time(max(between, 0.0)),
                    "",
                    "",
                ]
            ),
        ]
    )


def transfers() -> str:
    """Return the table of transfers, by size of the tensor."""
    run = Run("transfer")
    cases = [case for case, contender in run.records if contender == "ray:rdt-nixl"]
    sizes = [case for case in cases if re.fullmatch(r"(\d+(B|KB|MB|GB)(-new)?|small-.*)", case)]
    lines = [row(["tensor", *CONTENDERS.values(), "over the store", "over the best RDT"]), row(["---"] * 10)]
    for case in sizes:
        best = min(RDT, key=lambda name: run.get(case, name))
        over = [factor(run.ratio(case, name, "raylane:auto")) for name in ("ray:object_store", best)]
        lines.append(row([case, *(run.times(case, name) for name in CONTENDERS), *over]))
    return "\n".join(lines)


def transfer_cpu() -> str:
    """Return the CPU time of one call with a tensor of 100 MB."""
    run = Run("transfer")
    counts = {name: run.get("100MB", name, "n") for name in CONTENDERS}
    spent = [time(run.get("100MB", name, "cpu_s") / count * 1e6) for name, count in counts.items()]
    return "\n".join([row(CONTENDERS.values()), row(["---"] * 7), row(spent)])


def graphs() -> str:
    """Return the table of compiled graphs."""
    run = Run("graph")
    head = ["pattern", "raylane", "Ray compiled graph", "Ray calls", "speed-up over the compiled graph"]
    lines = [row([*head, "CPU per call, raylane / compiled graph"]), row(["---"] * 6)]
    for case, pattern in PATTERNS.items():
        times = [run.times(case, name) for name in ("raylane", "ray:compiled", "ray:calls")]
        cpu = " / ".join(
            time(run.get(case, name, "cpu_s") / run.get(case, name, "n") * 1e6) for name in ("raylane", "ray:compiled")
        )
        lines.append(row([pattern, *times, factor(run.ratio(case, "ray:compiled", "raylane")), cpu]))
    return "\n".join(lines)


def weights() -> str:
    """Return the table of whole updates: from the call of `publish` until all readers have the version."""
    run = Run("weights")
    others = [name for name in MOVERS if name in {contender for _, contender in run.records}]
    lines = [row(["case", *(MOVERS[name] for name in others)]), row(["---"] * (len(others) + 1))]
    for case in dict.fromkeys(case for case, _ in run.records if case.startswith("move-")):
        lines.append(row([case, *(run.times(case, name) or "-" for name in others)]))
    return "\n".join(lines)


def weights_goals() -> str:
    """Return the table of goals of weights, with what was reached."""
    return goal_table(goals(list(Run("weights").records.values())))


def rl() -> str:
    """Return the table of reinforcement learning: samples per second, and times of one sample or step."""
    run = Run("rl")
    lines = [row(["case", "contender", "samples/s", "p50 / p99", "CPU"]), row(["---"] * 5)]
    for (case, contender), record in run.records.items():
        cpu = time(record["cpu_s"] / record["n"] * 1e6)
        rate = f"{record['samples_per_s']:,.0f}"
        lines.append(row([case, contender, rate, run.times(case, contender), cpu]))
    return "\n".join(lines)


def rl_goals() -> str:
    """Return the table of goals of reinforcement learning, with what was reached."""
    return goal_table(rl_cases.goals(list(Run("rl").records.values())))


def goal_table(reached: Iterable[Goal]) -> str:
    """Return goals as a table."""
    lines = [row(["case", "figure", "measured", "goal", ""]), row(["---"] * 5)]
    for goal in reached:
        bound = "at least" if goal.at_least else "at most"
        verdict = "reached" if goal.reached else "**missed**"
        measured = f"{goal.value:.2f} {goal.unit}"
        lines.append(row([goal.case, goal.text, measured, f"{bound} {goal.limit:g} {goal.unit}", verdict]))
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {
    "bold_headline": bold_headline,
    "headline": headline,
    "overview": overview,
    "transfers": transfers,
    "transfer_cpu": transfer_cpu,
    "graphs": graphs,
    "weights": weights,
    "weights_goals": weights_goals,
    "rl": rl,
    "rl_goals": rl_goals,
}


def filled(text: str) -> str:
    """Return a page with its generated parts made anew. KeyError for an unknown part."""
    return re.sub(
        r"(<!-- figures: (\w+) -->\n).*?(\n<!-- end of figures -->)",
        lambda match: match[1] + PARTS[match[2]]() + match[3],
        text,
        flags=re.DOTALL,
    )


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
