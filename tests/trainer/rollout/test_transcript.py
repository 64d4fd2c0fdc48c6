"""The row that is trained on: exact, within its budgets, and never under a prefix the policy did not have."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.rollout.transcript import TokenBudget, Transcript, masked_row


@dataclass
class Generated:
    """A generated token as the policy saw it: its own id and the whole prefix before it."""

    token: int
    prefix: tuple[int, ...]


def play(prompt: list[int], budget: TokenBudget, turns: list[tuple[int, int]]) -> tuple[Transcript, list[Generated]]:
    """Play turns of (generated, reply) sizes with tokens that are all distinct; stop when there is no room."""
    transcript = Transcript(prompt, budget)
    generated: list[Generated] = []
    fresh = iter(range(10_000, 10**9))
    for size, reply in turns:
        room = transcript.room()
        if room == 0:
            break
        view = transcript.view
        tokens = tuple(next(fresh) for _ in range(min(size, room)))
        generated += [Generated(t, view + tokens[:i]) for i, t in enumerate(tokens)]
        transcript.add_turn(tokens, tuple(-float(t) for t in tokens))
        transcript.add_reply([next(fresh) for _ in range(reply)])
    return transcript, generated


sizes = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=20)
budgets = st.builds(TokenBudget, st.integers(20, 300), st.integers(30, 400), st.integers(1, 40))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), budgets, sizes)
def test_row_is_exact_and_within_budget(prompt: list[int], budget: TokenBudget, turns: list[tuple[int, int]]) -> None:
    transcript, generated = play(prompt, budget, turns)
    if not generated:
        return
    row = transcript.row()
    assert len(row.completion_ids) == len(row.logprobs) == len(row.env_mask)
    assert len(row.completion_ids) <= budget.max_completion
    assert len(row.prompt_ids) + len(row.completion_ids) <= budget.max_context
    prefix_of = {g.token: g.prefix for g in generated}
    ids = [*row.prompt_ids, *row.completion_ids]
    for index, (token, logprob, mask) in enumerate(zip(row.completion_ids, row.logprobs, row.env_mask, strict=True)):
        if mask:
            assert prefix_of[token] == tuple(ids[: len(row.prompt_ids) + index])
            assert logprob == -float(token)
        else:
            assert logprob == 0.0


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), budgets, sizes)
def test_the_last_turn_is_always_trained_on(
    prompt: list[int], budget: TokenBudget, turns: list[tuple[int, int]]
) -> None:
    transcript, generated = play(prompt, budget, turns)
    if generated:
        row = transcript.row()
        assert row.completion_ids[-1] == generated[-1].token
        assert row.env_mask[-1] == 1


def test_without_pressure_nothing_is_dropped_and_every_generated_token_is_trained_on() -> None:
    transcript, generated = play([1, 2], TokenBudget(100, 100, 10), [(5, 5), (5, 5), (5, 5)])
    row = transcript.row()
    assert transcript.dropped_turns == 0
    assert sum(row.env_mask) == len(generated) == 15
    assert len(row.completion_ids) == 25, "the reply after the last turn is not part of the row"


def test_a_full_row_keeps_the_recent_turns_as_context() -> None:
    transcript, generated = play([1], TokenBudget(40, 100, 10), [(5, 5)] * 6)
    row = transcript.row()
    assert transcript.dropped_turns > 0
    first_kept = row.completion_ids[0]
    assert first_kept in [g.token for g in generated], "the row starts with a turn, not inside one"
    assert 0 < sum(row.env_mask) < len(generated)
    assert len(row.completion_ids) > sum(row.env_mask) + 5, "earlier turns are still there as context"


def test_dropping_leaves_room_for_several_turns() -> None:
    transcript = Transcript([1], TokenBudget(100, 200, 10))
    drops = []
    for _ in range(30):
        assert transcript.room() == 10
        drops.append(transcript.dropped_turns)
        transcript.add_turn((7,) * 5, (0.0,) * 5)
        transcript.add_reply([8] * 5)
    changes = sum(a != b for a, b in pairwise(drops))
    assert changes <= 6, "the prefix changes once in several turns, not in each one"


def test_a_context_that_turns_out_to_be_shorter() -> None:
    transcript = Transcript([1] * 10, TokenBudget(100, 100, 10))
    for _ in range(4):
        assert transcript.room() == 10
        transcript.add_turn((5,) * 10, (-1.0,) * 10)
        transcript.add_reply([9] * 5)
    transcript.limit_context(60)
    assert transcript.room() == 10
    assert len(transcript.view) + 10 <= 60
    assert transcript.dropped_turns
    transcript.limit_context(80)
    assert len(transcript.view) + transcript.room() <= 60, "it never grows again"


def test_no_room_at_all() -> None:
    assert Transcript([1] * 50, TokenBudget(100, 50, 10)).room() == 0


def test_a_reply_larger_than_the_row_ends_the_episode() -> None:
    transcript = Transcript([1], TokenBudget(50, 100, 10))
    transcript.add_turn((5,), (-1.0,))
    transcript.add_reply([9] * 60)
    assert transcript.room() == 0
    assert transcript.row().completion_ids == [5]


def test_mismatched_logprobs_are_refused() -> None:
    with pytest.raises(ValueError, match="2 token ids but 1 logprobs"):
        Transcript([1], TokenBudget(10, 10, 5)).add_turn((1, 2), (0.0,))


@pytest.mark.parametrize("budget", [(0, 1, 1), (1, 0, 1), (1, 1, -1)])
def test_budgets_are_positive(budget: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        TokenBudget(*budget)


def test_a_masked_row_has_one_untrained_token() -> None:
    row = masked_row([1, 2], end_id=3)
    assert (row.completion_ids, row.logprobs, row.env_mask) == ([3], [0.0], [0])
