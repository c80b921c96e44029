"""Parts that attachments of all engines share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from raylane.weights.state.options import whole_number

PAUSES = ("wait", "keep", "abort")


@dataclass(frozen=True)
class EngineUpdate:
    """Result of an update of an engine."""

    version: int
    step: int
    changed: bool
    """False if the engine had this version already."""
    nbytes: int
    """Bytes of the version that were brought to the engine, all workers together."""
    pause_s: float
    """Seconds in which the engine computed nothing because of the update; with `wait`, after the last request."""
    seconds: float


class WantedVersion(NamedTuple):
    """Version that an update is to take."""

    number: int
    exact: bool
    """False if a later one is taken where there is one."""

    @classmethod
    def of(cls, at_least: int, version: int | None) -> WantedVersion:
        """Return what the options of an update say. ValueError if they contradict each other."""
        if version is None:
            return cls(whole_number("at_least", at_least, 0), exact=False)
        if at_least not in (1, version):
            raise ValueError(f"at_least={at_least} says nothing beside version={version}. Pass one of them")
        return cls(whole_number("version", version, 1), exact=True)


def check_pause(pause: str) -> None:
    """Raise ValueError for an unknown pause."""
    if pause not in PAUSES:
        raise ValueError(f"pause must be one of {', '.join(PAUSES)}, got {pause!r}")


def replace_method(owner: Any, method: str, call: Callable[..., Any]) -> Callable[[], None]:
    """Let `call` take the place of a method, which is its first argument; return a function that undoes it."""
    before = getattr(owner, method)
    had_its_own = method in vars(owner)
    replacement = functools.update_wrapper(functools.partial(call, before), before)  # generate() reads the signature
    setattr(owner, method, replacement)

    def undo() -> None:
        if vars(owner).get(method) is replacement:  # else another library has wrapped it too
            delattr(owner, method)
            if had_its_own:
                setattr(owner, method, before)

    return undo
