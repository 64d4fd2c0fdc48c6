"""Episodes of said texts: really played, so that records hold what the environment answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from env_server.dataset import Question
from env_server.environment import SQLEnvironment
from trainer.chat.actions import parse_action
from trainer.rollout.episodes import EpisodeRecord, TokenRow, episode_without_tokens, record, turn_of


def recite(environment: SQLEnvironment, question: Question, texts: Sequence[str], read: int = 0) -> EpisodeRecord:
    """Play an episode of these turns, as a policy that says them would; each is one token, `read` are its prompts'."""
    observation = environment.reset(question_id=question.question_id)
    turns = []
    for text in texts:
        assert not observation.done, "the episode ended before its texts did"
        parsed = parse_action(text)
        observation = environment.step(parsed.action)
        turns.append(turn_of(text, parsed.action, observation, parsed.parseable))
    ids = list(range(len(turns)))
    row = TokenRow([0], ids, [0.0] * len(ids), [1] * len(ids), [0] * len(ids))
    episode = episode_without_tokens(question, environment.state.episode_id, observation, turns)
    return record(replace(episode, row=row, prompt_tokens=read))
