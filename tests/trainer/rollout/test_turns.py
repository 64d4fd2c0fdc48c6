"""A turn with a thought: its budget, what is put into the model's mouth, and what each part is generated under."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3ForCausalLM

from benchmarks.simulated import SimulatedEngine, TurnRequest
from env_server.dataset import Dataset
from env_server.settings import EnvSettings
from inference.engine import Completion, FinishReason
from inference.hf.engine import HFEngine
from tests.logprobs import logprobs_of
from tests.trainer.chat.families import family_tokenizer
from trainer.chat.actions import ParsedAction
from trainer.chat.format import ChatFormat, ChatSettings
from trainer.policy import PlaySettings
from trainer.rollout.client import EpisodeRequest, RolloutClient, RolloutSettings
from trainer.rollout.environments import LocalEnvironments
from trainer.rollout.episodes import record
from trainer.rollout.transcript import TokenBudget
from trainer.rollout.turns import GeneratedTurn, generate_turn
from trainer.training.batch_stats import BatchRecords, BatchTimes, batch_metrics

CHAT = ChatFormat(family_tokenizer("qwen3"), ChatSettings(max_thinking_length=12))
OPENED = ChatFormat(family_tokenizer("qwen3_5_think"), ChatSettings(max_thinking_length=12))
END = CHAT.stop_ids[0]
WORDS = 20


class Script:
    """A model that says given texts whatever it is asked, one a generation, cut where its tokens run out."""

    def __init__(self, chat: ChatFormat, *texts: str, ends: bool = True) -> None:
        self._chat = chat
        self._texts = list(texts)
        self._ends = ends
        self.asked: list[tuple[tuple[int, ...], int]] = []

    async def __call__(self, said: tuple[int, ...], tokens: int, part: int) -> Completion:
        assert part == len(self.asked)
        self.asked.append((said, tokens))
        text = self._texts.pop(0)
        ids = list(family_tokenizer("qwen3").encode(text)) + ([END] if self._ends else [])
        cut = ids[:tokens]
        reason = FinishReason.STOP if cut and cut[-1] == END else FinishReason.LENGTH
        return Completion(tuple(cut), tuple(-0.5 for _ in cut), reason, 7)


async def turn(chat: ChatFormat, script: Script, room: int | None = None) -> tuple[GeneratedTurn, str, ParsedAction]:
    found = await generate_turn(script, chat, WORDS, WORDS + chat.reasoning_length if room is None else room)
    text = chat.text_of(found.token_ids)
    assert len(found.token_ids) == len(found.logprobs)
    assert found.policy_version == 7
    assert found.tokens == sum(logprob is not None for logprob in found.logprobs) <= len(found.token_ids)
    for said, tokens in script.asked:
        assert found.token_ids[: len(said)] == said, "each part follows the ids that the row shows"
        assert tokens > 0
    return found, text, chat.parse(text)


def invented(found: GeneratedTurn) -> tuple[int, ...]:
    return tuple(token for token, logprob in zip(found.token_ids, found.logprobs, strict=True) if logprob is None)


async def test_a_thought_within_its_budget_is_left_alone() -> None:
    found, text, parsed = await turn(CHAT, Script(CHAT, "<think>a</think>ANSWER 3"))
    assert (found.closed, invented(found)) == (True, ())
    assert (text, parsed.action.argument, parsed.parseable) == ("<think>a</think>ANSWER 3", "3", True)


@pytest.mark.parametrize("chat", [CHAT, OPENED], ids=["opens itself", "opened by the template"])
async def test_a_thought_that_never_ends_is_closed_and_the_action_follows(chat: ChatFormat) -> None:
    endless = "and so on " * 20
    script = Script(chat, endless if chat is OPENED else f"<think>{endless}", "ANSWER 3")
    found, text, parsed = await turn(chat, script)
    assert invented(found) == chat.closing_ids
    assert (parsed.action.action_type, parsed.action.argument, parsed.parseable) == ("ANSWER", "3", True)
    assert text.startswith("<think>")
    assert [tokens for _, tokens in script.asked] == [12, WORDS]


async def test_a_turn_that_ends_within_its_thought_goes_on() -> None:
    found, text, parsed = await turn(CHAT, Script(CHAT, "<think>a", "ANSWER 3"))
    assert found.token_ids.count(END) == 1
    assert invented(found) == CHAT.closing_ids
    assert (text, parsed.parseable) == ("<think>a\n</think>\n\nANSWER 3", True)


async def test_words_that_the_thoughts_budget_cut_go_on() -> None:
    found, _, parsed = await turn(CHAT, Script(CHAT, "<think>a</think>QUERY SELECT 12345", "67 FROM t"))
    assert invented(found) == ()
    assert parsed.action.argument.startswith("SELECT 1")
    assert parsed.action.argument.endswith("67 FROM t")


async def test_who_does_not_think_is_not_interrupted() -> None:
    found, text, _ = await turn(CHAT, Script(CHAT, "ANSWER 3"))
    assert (text, invented(found), found.closed) == ("ANSWER 3", (), True)


async def test_no_thought_at_all() -> None:
    chat = ChatFormat(family_tokenizer("deepseek_r1_distill"), ChatSettings(max_thinking_length=0))
    script = Script(chat, "ANSWER 3")
    found, text, _ = await turn(chat, script)
    assert (text, script.asked) == ("<think>\n</think>\n\nANSWER 3", [(chat.closing_ids, WORDS)])
    assert invented(found) == chat.closing_ids
    without = ChatFormat(family_tokenizer("qwen2_5"), ChatSettings(max_thinking_length=0))
    assert without.thinking_tokens is None


@given(
    st.integers(1, WORDS + OPENED.reasoning_length),
    st.lists(st.sampled_from(["<think>", "</think>", "a ", "ANSWER 3", "<|im_end|>"]), max_size=30).map("".join),
    st.booleans(),
    st.sampled_from([CHAT, OPENED]),
)
async def test_a_turn_never_exceeds_its_room(room: int, text: str, ends: bool, chat: ChatFormat) -> None:
    found, _, parsed = await turn(chat, Script(chat, text + "a", text + "b", ends=ends), room)
    assert 0 < len(found.token_ids) <= room
    assert invented(found) in ((), chat.closing_ids)
    assert "<think>" not in parsed.action.argument


async def test_rows_with_thoughts_are_token_exact(
    random_policy: Callable[..., Qwen3ForCausalLM], pets: Dataset
) -> None:
    """A policy that never closes its thoughts still acts, turn after turn, and its row is what it saw and said."""
    tokenizer = family_tokenizer("qwen3_5_think")
    model = random_policy(tokenizer, context=4_096)
    chat = ChatFormat(tokenizer, ChatSettings(max_thinking_length=6, custom_system_prompt="Explore."))
    environments = LocalEnvironments(pets, EnvSettings(step_budget=3), threads=1)
    engine = HFEngine(model, stop_ids=chat.stop_ids, pad_id=0, linger_s=0.0, max_context=4_096)
    budget = TokenBudget(1_500, 3_000, 5, chat.reasoning_length)
    client = RolloutClient(engine, environments, chat, RolloutSettings(budget))
    (episode,) = await client.play([EpisodeRequest("cats", seed=1)])
    await engine.aclose()
    environments.close()
    row = episode.row
    assert episode.failure == ""
    assert len(episode.turns) == 3, "the environment's steps, and not the tokens, end it"
    assert all(turn.text.startswith("<think>") and "</think>" in turn.text for turn in episode.turns)
    assert not any("<think>" in turn.argument for turn in episode.turns)
    expected = logprobs_of(model, row.prompt_ids, row.completion_ids)
    gaps = [abs(a - b) for own, a, b in zip(row.env_mask, row.logprobs, expected, strict=True) if own]
    assert len(gaps) >= 3 * 7
    assert max(gaps) < 1e-4
    # What closed each thought is in the row, and is not learned.
    closed = [i for i, token in enumerate(row.completion_ids) if token == tokenizer.convert_tokens_to_ids("</think>")]
    assert len(closed) >= 3
    assert sum(row.env_mask[i] == 0 for i in closed) >= 3


@pytest.mark.parametrize("turns", [9, 15])
@pytest.mark.parametrize("thinking", [None, True])
async def test_by_default_a_template_that_thinks_leaves_no_generated_token_untrained(
    turns: int, thinking: bool | None, pets: Dataset
) -> None:
    """At the default lengths; where thinking was chosen, the metric shows what the row had no room for."""
    variables = {} if thinking is None else {"enable_thinking": thinking}
    chat = ChatFormat(family_tokenizer("qwen3"), ChatSettings(chat_template_kwargs=variables))
    play = PlaySettings()
    tokenizer, texts = family_tokenizer("qwen3"), ["QUERY SELECT name FROM pets"] * (turns - 1) + ["ANSWER 3"]
    generated: list[int] = []

    def say(request: TurnRequest) -> list[int]:
        """Think until it is stopped where its thought is not closed already, else say the next text."""
        if chat.renderer.decode_turn(request.prompt_ids).endswith("</think>\n\n"):
            ids = [*tokenizer.encode(texts.pop(0)), END]
        else:
            ids = tokenizer.encode("<think>" + "and so on " * 4_096)[: chat.thinking_tokens]
        generated.append(len(ids))
        return ids

    engine = SimulatedEngine(say, stop_ids=chat.stop_ids)
    budget = TokenBudget(play.max_completion_length, 32_768, play.max_turn_length, chat.reasoning_length)
    with closing(LocalEnvironments(pets, EnvSettings(step_budget=turns), threads=1)) as environments:
        client = RolloutClient(engine, environments, chat, RolloutSettings(budget))
        (episode,) = await client.play([EpisodeRequest("cats", seed=1)])
    assert (episode.failure, len(episode.turns)) == ("", turns)
    share = sum(episode.row.env_mask) / sum(generated)
    batch = BatchRecords([record(episode, with_versions=True)])
    metrics = batch_metrics(batch, 1, BatchTimes(1.0, 0.0), 0)
    assert metrics["rollout/trained_token_share"] == share
    assert share == 1.0 if thinking is None else share < 0.8
