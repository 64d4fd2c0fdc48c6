"""The times of a step: they add up to it, whatever is waited for, and where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerControl, TrainerState, TrainingArguments

from tests.clock import Clock
from trainer.rollout.timing import Phase
from trainer.training.step_times import StepTimes


class Run:
    """A trainer that does what it is told, for as long as it is told."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.logged: dict[str, list[float]] = defaultdict(list)
        self.times = StepTimes(lambda name, seconds: self.logged[name].append(seconds), self.clock)
        self.does(0.0, self.times.on_train_begin)

    def does(self, seconds: float, then: Callable[..., None] | None = None) -> None:
        self.clock.now += seconds
        if then is not None:
            then(TrainingArguments(use_cpu=True, bf16=False), TrainerState(), TrainerControl())

    def waits(self, wait: str, seconds: float) -> None:
        with self.times.waiting(wait):
            self.clock.now += seconds

    def step(self, rollout: float, push: float, training: float, other: float = 0.0) -> None:
        self.does(other, self.times.on_step_begin)
        self.waits("push", push)
        self.waits("rollout", rollout)
        self.does(training, self.times.on_step_end)

    def last(self, *names: str) -> list[float]:
        return [self.logged[f"time/{name}"][-1] for name in names]


def test_a_step_is_divided_by_what_the_trainer_waited_for() -> None:
    run = Run()
    run.step(rollout=4, push=1, training=8, other=2)
    assert run.last("rollout", "push", "training", "other") == [4, 1, 8, 2]
    run.waits("push", 16)  # for an evaluation
    run.step(rollout=0, push=0, training=8, other=32)
    assert run.last("rollout", "push", "training", "other") == [0, 16, 8, 32]


def test_a_batch_that_was_played_meanwhile_costs_what_was_waited_for_it() -> None:
    run = Run()
    run.times.played({Phase.GENERATION: 30.0, Phase.ENVIRONMENT: 10.0})
    run.step(rollout=2, push=0, training=40)
    assert run.last("generation", "environment", "queue", "judging", "client") == [1.5, 0.5, 0, 0, 0]
    run.step(rollout=2, push=0, training=40)
    assert run.last(*Phase) == [0] * len(Phase), "its times were told once"


SECONDS = st.floats(0, 100)


@given(
    st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=5),
    st.dictionaries(st.sampled_from(Phase), st.floats(0.01, 100), min_size=1),
)
def test_the_parts_add_up(steps: list[tuple[float, float, float, float]], parts: dict[Phase, float]) -> None:
    run = Run()
    for step in steps:
        before = run.clock.now
        run.times.played(parts)
        run.step(*step)
        assert sum(run.last("rollout", "push", "training", "other")) == pytest.approx(run.clock.now - before)
        assert sum(run.last(*Phase)) == pytest.approx(run.last("rollout")[0])
    assert {len(values) for values in run.logged.values()} == {len(steps)}
