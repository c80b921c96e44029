"""All environment variables that raylane reads, in one table: name, accepted values, default and meaning.

Each is read when it is used, so that a program or a test can set it while it runs. `raylane doctor` prints those that
are set; docs/reference/settings.md is made from the table.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True)
class Setting(Generic[_T]):
    """One environment variable."""

    name: str
    parse: Callable[[str], _T]
    """Function that reads a text that is not empty; ValueError if it is not accepted."""
    default: _T
    """Value where the variable is unset or empty."""
    accepted: str
    """Accepted values, as in "must be ..."."""
    meaning: str
    """Sentences for the reference, in Markdown."""
    shown_default: str = ""
    """Default for people, where that is not the value."""

    def read(self) -> _T:
        """Return the value now. ValueError names the variable, what it accepts and its text."""
        text = os.environ.get(self.name)
        if not text or not (text := text.strip()):
            return self.default
        try:
            return self.parse(text)
        except (ValueError, KeyError):
            raise ValueError(f"{self.name} must be {self.accepted}, got {text!r}") from None


def _seconds(text: str, *, least: float = math.ulp(0.0), most: float = math.inf) -> float:
    if not least <= (seconds := float(text)) <= most:  # also for nan
        raise ValueError
    return seconds


def _count(text: str) -> int:
    if not text.isdigit():
        raise ValueError
    return int(text)


def _or_none(parse: Callable[[str], _T], *none: str) -> Callable[[str], _T | None]:
    return lambda text: None if text.lower() in none else parse(text)


_FLAG: dict[str, bool] = {"0": False, "1": True, "false": False, "true": True}


def _flag(text: str) -> bool:
    return _FLAG[text.lower()]


def _one_of(*words: str) -> Callable[[str], str]:
    return lambda text: {word: word for word in words}[text.lower()]


LONGEST_PAUSE_S = 4_000_000.0
"""Longest time in seconds for which a thread can wait (`threading.TIMEOUT_MAX` is 4.29 million on some systems)."""

TIMEOUT_S: Setting[float | None] = Setting(
    "RAYLANE_TIMEOUT_S",
    _or_none(lambda text: _seconds(text, least=0.0), "none", "inf"),
    60.0,
    "a number of seconds such as 60, or none",
    "Limit in seconds of a transfer, and of a wait without a timeout of its own; `none` for no limit.",
)
POOL_BYTES: Setting[int | None] = Setting(
    "RAYLANE_POOL_BYTES",
    _count,
    None,
    "a number of bytes such as 1073741824",
    "Most idle memory that each process keeps: received into, and as much of `raylane.empty`.",
    "1/16 of memory, at most 2 GiB",
)
POOL_IDLE_S: Setting[float] = Setting(
    "RAYLANE_POOL_IDLE_S",
    _seconds,
    60.0,
    "a number of seconds > 0 such as 60, or inf",
    "Seconds after which idle memory (received into, of shared copies or `raylane.empty`) goes back to the system, "
    "and idle connections and channels are closed; `inf` for never.",
)
SHARE_FROM_BYTES: Setting[int | None] = Setting(
    "RAYLANE_SHARE_FROM_BYTES",
    _or_none(_count, "none"),
    4 << 20,
    "a number of bytes or none",
    "Size from which the second and all further readers of a value on its host share one copy, which the source keeps "
    "until the value is freed, and from which readers of another host share one transfer by `tcp`; `none`: every "
    "reader makes its own.",
)
BUDGET_BYTES: Setting[int | None] = Setting(
    "RAYLANE_BUDGET_BYTES",
    _count,
    None,
    "a number of bytes such as 1073741824",
    "Most bytes that a process holds for readers, see [budget](transport.md#budget).",
    "no limit",
)
CHECKSUM: Setting[bool] = Setting(
    "RAYLANE_CHECKSUM",
    _flag,
    False,
    "0 or 1",
    "`1`, in the producer: every published value gets a checksum, see [changed memory](transport.md#changed-memory).",
)
ALLOW_CLEARTEXT: Setting[bool] = Setting(
    "RAYLANE_ALLOW_CLEARTEXT",
    _flag,
    False,
    "0 or 1",
    "`1`: with `RAY_USE_TLS=1`, `gloo`, `nccl` and `nixl` are allowed although nobody encrypts them.",
)
PTRACER: Setting[str] = Setting(
    "RAYLANE_PTRACER",
    _one_of("any", "none"),
    "any",
    "any or none",
    "`none`: other processes of this user may not read this process where Yama would forbid it (no "
    "PR_SET_PTRACER_ANY); `tcp` then replaces `host`.",
)
METRICS_S: Setting[float | None] = Setting(
    "RAYLANE_METRICS_S",
    lambda text: _seconds(text, most=LONGEST_PAUSE_S),
    None,
    "a number of seconds > 0 such as 5",
    "Seconds between two updates of [Ray's metrics](transport.md#metrics-and-traces).",
    "off",
)
TRACE: Setting[str] = Setting(
    "RAYLANE_TRACE", str, "", "a folder", "Folder for [traces](transport.md#metrics-and-traces).", "off"
)
HOST: Setting[str] = Setting(
    "RAYLANE_HOST",
    str,
    "",
    "a text",
    "Processes with different values treat each other in graphs as processes of different hosts: for containers that "
    "share a kernel but not `/proc`, and for tests.",
    "empty",
)
WAIT: Setting[str] = Setting(
    "RAYLANE_WAIT",
    _one_of("adaptive", "block"),
    "adaptive",
    "adaptive (the default) or block",
    "`block`: processes of a graph never yield the CPU before they sleep, for comparisons.",
)

SETTINGS: tuple[Setting[Any], ...] = (
    TIMEOUT_S,
    POOL_BYTES,
    POOL_IDLE_S,
    SHARE_FROM_BYTES,
    BUDGET_BYTES,
    CHECKSUM,
    ALLOW_CLEARTEXT,
    PTRACER,
    METRICS_S,
    TRACE,
    HOST,
    WAIT,
)


def default_text(setting: Setting[Any]) -> str:
    """Return the default of a setting for people."""
    value = setting.default
    if setting.shown_default:
        return setting.shown_default
    return f"{value:g}" if isinstance(value, float) else str(int(value) if isinstance(value, bool) else value)


def set_here() -> str:
    """Return the variables that are set in this process: `name=text`, with commas, unknown ones with a mark."""
    known = {setting.name for setting in SETTINGS}
    present = sorted((name, text) for name, text in os.environ.items() if name.startswith("RAYLANE_"))
    return ", ".join(f"{name}={text}{'' if name in known else ' (unknown)'}" for name, text in present)


HEAD = """# Environment variables

Generated from the code by `python -m raylane.core.settings`; do not edit.

A process reads each of them when it uses it. Actors get them by `runtime_env={"env_vars": {...}}`, as in any program of
Ray; `raylane doctor` prints those that are set. Other text than what is accepted is a ValueError.

| variable | accepted | default | meaning |
| --- | --- | --- | --- |
"""


def reference_markdown() -> str:
    """Return the page docs/reference/settings.md."""
    return HEAD + "".join(f"| `{s.name}` | {s.accepted} | {default_text(s)} | {s.meaning} |\n" for s in SETTINGS)


if __name__ == "__main__":
    print(reference_markdown(), end="")
