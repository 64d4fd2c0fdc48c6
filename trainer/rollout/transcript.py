"""The token ids of one episode as they grow, and the row that is trained on. Pure; no I/O.

Invariants:
- Ids are only appended. What the policy generated is kept as the ids it generated.
- The row never exceeds `max_completion` completion tokens, nor prompt + completion `max_context` tokens.
- When there is no room for another turn, the oldest turns are dropped and the recent ones kept. The row is then
  the final segment as the model saw it: the turns that were generated before the drop saw another prefix, so
  they are context (mask 0), and only what is generated afterwards is trained on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainer.rollout.episodes import TokenRow


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Bounds on one row, in tokens. `max_turn` is for a turn's text, `max_reasoning` for a closed reasoning block."""

    max_completion: int
    max_context: int
    max_turn: int
    max_reasoning: int = 0

    def __post_init__(self) -> None:
        if min(self.max_completion, self.max_context, self.max_turn) <= 0 or self.max_reasoning < 0:
            raise ValueError(f"token budgets must be positive: {self}")

    @property
    def turn(self) -> int:
        """The most tokens of one turn."""
        return self.max_turn + self.max_reasoning


@dataclass(frozen=True, slots=True)
class _Turn:
    """A generated turn and the environment's reply to it (empty until it comes)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    reply_ids: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return len(self.token_ids) + len(self.reply_ids)


class Transcript:
    """Grows by `add_turn` and `add_reply`; `room` says how many tokens the next turn may have."""

    def __init__(self, prompt_ids: list[int], budget: TokenBudget) -> None:
        self._prompt = tuple(prompt_ids)
        self._budget = budget
        self._turns: list[_Turn] = []
        self._context_turns = 0
        self._dropped = 0

    @property
    def dropped_turns(self) -> int:
        """Oldest turns that are no longer in the row."""
        return self._dropped

    @property
    def view(self) -> tuple[int, ...]:
        """What the model sees when it generates the next turn."""
        ids = list(self._prompt)
        for turn in self._turns:
            ids += turn.token_ids
            ids += turn.reply_ids
        return tuple(ids)

    def limit_context(self, tokens: int) -> None:
        """Know of a context that is shorter than the budget's: the next `room` keeps to it."""
        self._budget = replace(self._budget, max_context=min(self._budget.max_context, tokens))

    def room(self) -> int:
        """Make room and return the number of tokens that the next turn may have; 0 when there is none.

        Drops oldest turns only when a full turn does not fit. Drops down to half of the budget, so that the
        prefix then stays stable for several turns (prefix caches, and trained tokens, depend on it).
        """
        if self._free() < self._budget.turn:
            self._drop(self._oldest_to_drop())
        return max(0, min(self._free(), self._budget.turn))

    def _oldest_to_drop(self) -> int:
        """How many turns to drop: none when even the last turn alone leaves no room, since dropping is a loss."""
        used, capacity = self._used(), self._capacity()
        for count, turn in enumerate(self._turns[:-1], start=1):
            used -= turn.size
            if used <= capacity // 2 and capacity - used >= self._budget.turn:
                return count
        return max(0, len(self._turns) - 1) if used < capacity else 0

    def _drop(self, count: int) -> None:
        if count:
            del self._turns[:count]
            self._dropped += count
            self._context_turns = len(self._turns)

    def add_turn(self, token_ids: tuple[int, ...], logprobs: tuple[float | None, ...]) -> None:
        """Append what the policy generated on `view`; a token that it did not choose has None for a logprob."""
        if len(token_ids) != len(logprobs):
            raise ValueError(f"{len(token_ids)} token ids but {len(logprobs)} logprobs")
        self._turns.append(_Turn(token_ids, logprobs))

    def add_reply(self, reply_ids: list[int]) -> None:
        """Append the environment's tokens after the last turn, up to the next generation prompt."""
        last = self._turns[-1]
        self._turns[-1] = _Turn(last.token_ids, last.logprobs, tuple(reply_ids))

    def row(self) -> TokenRow:
        """Return the row; needs at least one turn."""
        row = TokenRow(prompt_ids=list(self._prompt), completion_ids=[], logprobs=[], env_mask=[], turn_ids=[])
        for index, turn in enumerate(self._turns):
            trained = index >= self._context_turns
            row.completion_ids.extend(turn.token_ids)
            if trained:
                row.logprobs.extend([0.0 if logprob is None else logprob for logprob in turn.logprobs])
                row.env_mask.extend([int(logprob is not None) for logprob in turn.logprobs])
            else:
                row.logprobs.extend([0.0] * len(turn.logprobs))
                row.env_mask.extend([0] * len(turn.logprobs))
            if turn is not self._turns[-1]:
                row.completion_ids.extend(turn.reply_ids)
                row.logprobs.extend([0.0] * len(turn.reply_ids))
                row.env_mask.extend([0] * len(turn.reply_ids))
            row.turn_ids.extend([self._dropped + index] * (len(row.completion_ids) - len(row.turn_ids)))
        return row

    def _capacity(self) -> int:
        return min(self._budget.max_completion, self._budget.max_context - len(self._prompt))

    def _used(self) -> int:
        return sum(turn.size for turn in self._turns)

    def _free(self) -> int:
        return self._capacity() - self._used()


def masked_row(prompt_ids: list[int], end_id: int) -> TokenRow:
    """The row of a failed episode: one end token that is not trained on (TRL cannot take an empty one)."""
    return TokenRow(prompt_ids=prompt_ids, completion_ids=[end_id], logprobs=[0.0], env_mask=[0], turn_ids=[0])
