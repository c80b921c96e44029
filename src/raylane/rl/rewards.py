"""Reward functions: plain Python functions of an answer and the line of data with its prompt.

What can be wrong with one is found in the driver, before anything is started: `load_rewards` checks how it is called,
and `try_rewards` calls it once.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import logging
import operator
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raylane.errors import ConfigError, DataError

_log = logging.getLogger(__name__)

MOST_REWARD = 1e12
"""Largest reward times its weight."""
RewardFunction = Callable[[str, Mapping[str, Any]], float]
"""Function of the text of an answer and the line of the data file; returns a finite number."""


@dataclass(frozen=True)
class Reward:
    """A reward function with its name and weight."""

    name: str
    """module:function"""
    weight: float
    function: RewardFunction


def load_reward(name: str, weight: float = 1.0) -> Reward:
    """Return the reward function `module:function`. ConfigError if there is none."""
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise ConfigError(f"a reward must be named as module:function, got {name!r}", key="grpo.rewards")
    try:
        function = operator.attrgetter(attribute)(importlib.import_module(module))
    except (Exception, SystemExit) as error:  # also those of the user's module
        raise ConfigError(
            f"the reward {name} cannot be loaded: {_text(error)}. Modules are searched for on PYTHONPATH and in the "
            "working directory",
            key="grpo.rewards",
        ) from error
    if (fault := _fault(function)) is not None:
        raise ConfigError(f"the reward {name} {fault}", key="grpo.rewards")
    return Reward(name, weight, function)


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"


def _fault(function: Any) -> str | None:
    """Return why this cannot be a reward, and the remedy; None if it can."""
    if not callable(function):
        return f"is a {type(function).__name__}; name a function"
    if inspect.isclass(function):
        return "is a class; name a function, or an object of the class"
    # An object is called by the method of its class.
    for called in (function, type(function).__call__):
        if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
            return "is asynchronous (async def); name a function that returns a number, for example with asyncio.run"
        if inspect.isgeneratorfunction(called):
            return "is a generator (it has a yield); name a function that returns a number"
    try:
        inspect.signature(function).bind("", {})
    except TypeError as error:
        return f"must be called as reward(answer, row), and cannot: {error}. Its signature is {_signature(function)}"
    except ValueError:  # of a function that is not written in Python
        return None
    return None


def _signature(function: Any) -> str:
    return f"{getattr(function, '__name__', type(function).__name__)}{inspect.signature(function)}"


def load_rewards(names: Sequence[tuple[str, float]], folder: str) -> list[Reward]:
    """Return reward functions by name and weight; their modules may lie in `folder`, where the driver runs."""
    if folder not in sys.path:  # neither the `raylane` command nor an actor searches it by itself
        sys.path.append(folder)
    return [load_reward(name, weight) for name, weight in names]


def try_rewards(rewards: Sequence[Reward], row: Mapping[str, Any], limit_s: float | None) -> None:
    """Call each reward once, with an empty answer; DataError if it fails, or after `limit_s` seconds.

    The limit holds in the main thread only, where a signal can interrupt the reward; None means none.
    """
    for reward in rewards:
        _log.debug("calling the reward %s once", reward.name)
        with _limited(reward.name, limit_s):
            score([reward], "", row)


@contextlib.contextmanager
def _limited(name: str, limit_s: float | None) -> Iterator[None]:
    if limit_s is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    passed = threading.Event()

    def interrupt() -> None:
        passed.set()
        os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C: it interrupts system calls too, and rewards may use SIGALRM

    timer = threading.Timer(limit_s, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    except KeyboardInterrupt:
        if not passed.is_set():
            raise
        raise DataError(
            f"the reward {name} did not return within grpo.step_timeout_s={limit_s:g} s. Give it a limit of its own, "
            "or raise grpo.step_timeout_s"
        ) from None
    finally:
        timer.cancel()


def score(rewards: Sequence[Reward], answer: str, row: Mapping[str, Any]) -> tuple[float, list[float]]:
    """Return the weighted sum of all rewards of an answer, and each of them. DataError if one of them fails."""
    values = []
    for reward in rewards:
        try:
            # A copy of its own: what a reward changes in it must not reach other answers.
            value = float(reward.function(answer, copy.deepcopy(dict(row))))
        except (Exception, SystemExit) as error:  # sys.exit would end the actor, and name nobody
            raise DataError(
                f"the reward {reward.name} failed for the answer {answer!r:.200} to the line {dict(row)!r:.200}: "
                f"{type(error).__name__}: {error}"
            ) from error
        # A NaN would make the advantages of the whole group NaN, and then the weights.
        # Products of larger ones would overflow the float32 of the loss.
        if not abs(reward.weight * value) <= MOST_REWARD:
            weighed = "" if reward.weight == 1 else f", times its weight of {reward.weight:g},"
            raise DataError(
                f"the reward {reward.name} returned {value}{weighed} for the answer {answer!r:.200} to the line "
                f"{dict(row)!r:.200}: it must be a number from {-MOST_REWARD:g} to {MOST_REWARD:g}. Scale it"
            )
        values.append(value)
    return sum(reward.weight * value for reward, value in zip(rewards, values, strict=True)), values
