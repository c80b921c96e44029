"""The schedule of prompts, without Ray."""

from __future__ import annotations

import random

import pytest

from raylane.rl.schedule import PromptWork, Schedule, dispatch


def begun(lag: int = 0, engines: int = 2, steps: int = 4, prompts: int = 4) -> Schedule:
    schedule = Schedule(prompts, steps, lag, engines)
    schedule.begin_at(0)
    return schedule


def sent(schedule: Schedule) -> list[tuple[int, PromptWork]]:
    found: list[tuple[int, PromptWork]] = []
    dispatch(schedule, lambda engine, work: found.append((engine, work)))
    return found


def prompts_of(works: list[tuple[int, PromptWork]]) -> list[int]:
    return [prompt for _, work in works for prompt in work.prompts]


@pytest.mark.parametrize(("lag", "ahead"), [(0, 1), (1, 2), (2, 3)])
def test_engines_are_at_most_lag_steps_ahead(lag: int, ahead: int) -> None:
    schedule = begun(lag)
    schedule.calls_ahead = 100
    assert prompts_of(sent(schedule)) == list(range(4 * ahead))
    assert sent(schedule) == []
    schedule.stepped(1)
    works = sent(schedule)
    assert prompts_of(works) == list(range(4 * ahead, min(16, 4 * ahead + 4)))
    assert {work.at_least for _, work in works} == {1}


def test_work_goes_to_idle_engines_and_ends_with_the_run() -> None:
    schedule = begun(lag=5)
    works = sent(schedule)
    assert [engine for engine, _ in works] == [0, 1, 0, 1]
    schedule.made(works[1][1].number)
    ((engine, _),) = sent(schedule)
    assert engine == 1
    for _ in range(20):
        for number in list(schedule.sent):
            schedule.made(number)
        sent(schedule)
    assert schedule.sent == {}
    assert schedule._next == 16


def test_prompts_of_a_dead_actor_are_made_again() -> None:
    schedule = begun()
    (_, first), (_, second) = sent(schedule)
    assert schedule.accepts((schedule.epoch, first.prompts[0]))  # its group came before the death
    assert schedule.actor_died(0) == list(first.prompts[1:])
    ((engine, again),) = sent(schedule)
    assert (engine, again.prompts) == (0, first.prompts)  # the whole batch, so that its answers are the same
    assert schedule.made_again == 1
    assert not schedule.accepts((schedule.epoch, first.prompts[0]))
    assert all(schedule.accepts((schedule.epoch, prompt)) for prompt in (*again.prompts[1:], *second.prompts))


def test_group_counts_once() -> None:
    schedule = begun()
    (_, work), _ = sent(schedule)
    schedule.actor_died(0)  # its groups lie in the queue already
    assert all(schedule.accepts((schedule.epoch, prompt)) for prompt in work.prompts)
    assert sent(schedule) == []
    assert not schedule.accepts((schedule.epoch, work.prompts[0]))
    assert not schedule.accepts((schedule.epoch, 99))


def test_run_that_goes_back_wants_nothing_from_before() -> None:
    schedule = begun(lag=1)
    sent(schedule)
    schedule.stepped(3)
    before = schedule.epoch
    schedule.begin_at(2)
    assert not schedule.accepts((before, 8))
    assert prompts_of(sent(schedule)) == list(range(8, 16))
    assert schedule.accepts((schedule.epoch, 8))


def test_group_that_is_too_old_is_made_again() -> None:
    schedule = begun()
    works = sent(schedule)
    assert schedule.accepts((schedule.epoch, 0))
    schedule.make_again(0)
    for _, work in works:
        schedule.made(work.number)
    assert prompts_of(sent(schedule)) == [0]


@pytest.mark.parametrize("seed", range(20))
def test_random_deaths_lose_and_double_no_prompt(seed: int) -> None:
    chance = random.Random(seed)
    lag, steps, size = chance.randint(0, 3), 6, 5
    schedule = Schedule(size, steps, lag, chance.randint(1, 3))
    schedule.begin_at(0)
    queue: list[tuple[int, int]] = []
    trained: list[int] = []
    while schedule.done < steps:
        dispatch(schedule, lambda engine, work: None)
        for number, (engine, work) in list(schedule.sent.items()):
            if number not in schedule.sent:
                continue
            fate = chance.random()
            if fate < 0.3:
                made = work.prompts[: chance.randint(0, len(work.prompts))]
                queue += [(schedule.epoch, prompt) for prompt in made]
                schedule.actor_died(engine)
            elif fate < 0.8:
                queue += [(schedule.epoch, prompt) for prompt in work.prompts]
                schedule.made(number)
        chance.shuffle(queue)
        accepted = [key for key in queue if schedule.accepts(key)]
        queue.clear()
        trained += [prompt for _, prompt in accepted]
        if len(trained) >= size * (schedule.done + 1):
            schedule.stepped(schedule.done + 1)
    assert sorted(trained) == list(range(size * steps))
