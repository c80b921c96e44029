"""Which prompts are sampled when, and which groups count. Pure: no clock, no Ray.

Step k trains on `prompts_per_step` groups, and makes the weights of step k + 1. Prompts for step k may be sampled as
soon as the weights of step k - lag are there:

    lag 0     sample k with weights k      trainer and engines take turns
    lag 1     sample k with weights k - 1  while the trainer makes k
    lag n     fully asynchronous: engines are at most n steps ahead of the trainer

    batch    SENT to an actor ──its groups are in the queue──> MADE
               │  the actor died
               └──────────────────────────────> sent again, unless all of its groups have come
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

GroupKey = tuple[int, int]
"""Epoch and number of a prompt."""


@dataclass(frozen=True)
class PromptWork:
    """Numbers of prompts for one call of an actor."""

    number: int
    prompts: tuple[int, ...]
    at_least: int
    """Oldest step whose weights may be used."""


@dataclass
class Schedule:
    """Prompts of a run, cut into batches for `engines` actors."""

    prompts_per_step: int
    steps: int
    """Steps of the run."""
    lag: int
    engines: int
    calls_ahead: int = 2
    """Number of calls that an actor has at the same time: while one ends, the next one is there."""
    done: int = 0
    """Number of steps that the weights have, which actors can read."""
    epoch: int = 0
    sent: dict[int, tuple[int, PromptWork]] = field(default_factory=dict)
    """Actor and work of each batch that was sent and not made, by number."""
    made_again: int = 0
    """Number of prompts that were sent again after a death."""
    _next: int = 0
    """Next prompt."""
    _again: list[tuple[int, ...]] = field(default_factory=list)
    """Batches whose actor has died, and groups that were too old."""
    _open: set[int] = field(default_factory=set)
    """Prompts that were sent, and whose groups have not been taken."""
    _taken: set[int] = field(default_factory=set)
    """Prompts of this epoch whose groups were taken."""
    _numbers: int = 0

    def begin_at(self, step: int) -> None:
        """Begin at a step: a new run at 0, or a run that goes back to a checkpoint."""
        self.done, self._next = step, step * self.prompts_per_step
        # Calls that are under way go on, but what they put has the old epoch in its key.
        self.epoch += 1
        self.sent.clear()
        self._again.clear()
        self._open.clear()
        self._taken.clear()

    def next_work(self) -> tuple[int, PromptWork] | None:
        """Return the actor that gets work next, and the work; None if there is none for now. Note it as sent."""
        # The actor with the fewest calls, and the first of those: the order does not depend on chance.
        busy = [sum(actor == engine for actor, _ in self.sent.values()) for engine in range(self.engines)]
        engine = busy.index(min(busy))
        if busy[engine] >= self.calls_ahead:
            return None
        prompts = self._choose()
        if not prompts:
            return None
        self._numbers += 1
        at_least = max(0, min(prompts) // self.prompts_per_step - self.lag)
        work = PromptWork(self._numbers, prompts, at_least)
        self.sent[work.number] = engine, work
        self._open |= set(prompts) - self._taken
        return engine, work

    def _choose(self) -> tuple[int, ...]:
        size = -(-self.prompts_per_step // self.engines)
        while self._again:
            prompts = self._again.pop(0)
            if self._open.intersection(prompts):  # else all of its groups came before the death
                return prompts
        # No batch reaches into the next step, whose weights may not be there yet.
        end_of_step = (self._next // self.prompts_per_step + 1) * self.prompts_per_step
        end = min(self._next + size, end_of_step, self.steps * self.prompts_per_step)
        if self._next >= end or self._next // self.prompts_per_step > self.done + self.lag:
            return ()
        prompts = tuple(range(self._next, end))
        self._next = end
        return prompts

    def made(self, number: int) -> None:
        """Note that all groups of a batch are in the queue."""
        self.sent.pop(number, None)

    def failed(self, number: int) -> None:
        """Note that the groups of a batch are lost, although its actor lives: it is sent again."""
        _, work = self.sent.pop(number)
        self._again.append(work.prompts)
        self.made_again += len(work.prompts)

    def actor_died(self, engine: int) -> list[int]:
        """Note the death of an actor; return the prompts that will be made again."""
        lost = [number for number, (actor, _) in self.sent.items() if actor == engine]
        # Whole batches: what an actor samples depends on the batch, so the answers are those that were lost.
        batches = [self.sent.pop(number)[1].prompts for number in lost]
        self._again += batches
        again = [prompt for batch in batches for prompt in batch if prompt in self._open]
        self.made_again += len(again)
        return again

    def make_again(self, prompt: int) -> None:
        """Note that the group of a prompt cannot be used; call after `accepts`."""
        self._taken.discard(prompt)
        self._open.add(prompt)
        self._again.append((prompt,))
        self.made_again += 1

    def accepts(self, key: GroupKey) -> bool:
        """Return True if a group is to be trained on: of this epoch, and for the first time."""
        # A group comes twice if its actor died after it had put it, and late after the trainer went back.
        epoch, prompt = key
        if epoch != self.epoch or prompt not in self._open:
            return False
        self._open.discard(prompt)
        self._taken.add(prompt)
        return True

    def stepped(self, steps: int) -> None:
        """Note the weights after so many steps."""
        self.done = max(self.done, steps)


def dispatch(schedule: Schedule, send: Callable[[int, PromptWork], None]) -> int:
    """Send all work that can be sent now; return the number of batches."""
    count = 0
    while (choice := schedule.next_work()) is not None:
        send(*choice)
        count += 1
    return count
