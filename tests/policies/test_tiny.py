"""The tiny policy: a lossless tokenizer with one token per word, an untied network, play of mixed quality, training."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from env_server.data.loading import load_dataset
from env_server.dataset import Dataset
from env_server.environment import SQLEnvironment
from policies.tiny.build import MuonAdamW, Stage, build_model, mixed_play, texts, train
from policies.tiny.stumbling import StumblingPlayer
from policies.tiny.tokenizer import END, build_tokenizer
from trainer.chat.renderer import ChatRenderer
from trainer.models import load_policy
from trainer.rollout.players import play
from trainer.tiny import BASE_CHECKPOINT, BASE_NOTES

TEXTS = ["How many pets are there? owner_id Pets", "QUERY SELECT name FROM pets WHERE age > 12", "cat | dog"]
TOKENIZER = build_tokenizer(TEXTS)


@given(st.text())
def test_every_text_survives_a_round_trip(text: str) -> None:
    ids = TOKENIZER(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert TOKENIZER.decode(ids) == text.encode("utf-8", "ignore").decode()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("pets", 1),
        ("QUERY SELECT ", 2),
        (" WHERE ", 1),
        ("owner_id", 3),
        ("pets pets", 3),
        ("12", 2),
        ("zebra", 5),
        ("T1.name", 2),
        (" rowspets", 1 + len("rowspets")),
    ],
)
def test_known_words_and_skeletons_are_one_token_each(text: str, count: int) -> None:
    assert len(TOKENIZER(text, add_special_tokens=False)["input_ids"]) == count


def test_words_are_chosen_by_frequency_then_spelling() -> None:
    tokenizer = build_tokenizer(["bb bb aa cc"], max_words=2)
    assert [len(tokenizer(word)["input_ids"]) for word in ("aa", "bb", "cc")] == [1, 1, 2]


def test_saved_and_loaded_it_is_the_same(tmp_path: object) -> None:
    TOKENIZER.save_pretrained(str(tmp_path))
    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    assert [loaded(text)["input_ids"] for text in TEXTS] == [TOKENIZER(text)["input_ids"] for text in TEXTS]
    assert loaded.chat_template == TOKENIZER.chat_template
    assert loaded.eos_token == END


def test_its_template_leaves_the_system_prompt_out_and_renders_by_appending() -> None:
    renderer = ChatRenderer(TOKENIZER)
    prompt = renderer.prompt_ids([{"role": "system", "content": "long"}, {"role": "user", "content": "pets"}])
    assert TOKENIZER.decode(prompt) == "<obs>pets<act>"
    assert TOKENIZER.decode(renderer.observation_ids("cat", closed=True)) == "<obs>cat<act>"
    assert TOKENIZER.decode(renderer.observation_ids("cat", closed=False)) == "<end><obs>cat<act>"


def test_the_network_is_untied_small_and_seeded() -> None:
    model = build_model(TOKENIZER, seed=1)
    assert model.get_input_embeddings().weight.data_ptr() != model.get_output_embeddings().weight.data_ptr()
    assert model.num_parameters() < 1_500_000
    again = build_model(TOKENIZER, seed=1)
    assert all((a == b).all() for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_the_shipped_base_policy_is_small_untied_and_says_how_it_was_made() -> None:
    files = {path.name: path for path in BASE_CHECKPOINT.iterdir()}
    assert files["model.safetensors"].stat().st_size <= 6_000_000
    notes = files[BASE_NOTES].read_text(encoding="utf-8")
    assert "after stage 1" in notes
    assert "after stage 2" in notes
    model = AutoModelForCausalLM.from_pretrained(BASE_CHECKPOINT, dtype=torch.float32)
    assert not model.config.tie_word_embeddings


def test_every_word_of_the_generated_data_is_one_token_of_the_shipped_policy() -> None:
    """A generator that uses new words needs a new base policy: it would be spelled in bytes, and not copied."""
    tokenizer = AutoTokenizer.from_pretrained(BASE_CHECKPOINT)
    words = {word for q in load_dataset("synthetic").questions for word in re.findall("[A-Za-z]+", q.text)}
    assert [word for word in words if len(tokenizer(word)["input_ids"]) != 1] == []


def test_play_of_mixed_quality_is_mostly_wrong_valid_and_seeded(pets: Dataset) -> None:
    played = [episode for seed in range(30) for episode, _ in mixed_play(pets, 0.0, seed)]
    assert len(played) == 90
    assert 0 < sum(episode.correct for episode in played) < 36
    assert all(turn.action_type in ("DESCRIBE", "SAMPLE", "QUERY", "ANSWER") for e in played for turn in e.turns)
    assert all(episode.turns[-1].action_type == "ANSWER" for episode in played)
    assert all(episode.correct for episode, _ in mixed_play(pets, 1.0))
    assert [e.turns for e, _ in mixed_play(pets, 0.5, 1)] == [e.turns for e, _ in mixed_play(pets, 0.5, 1)]


def test_a_guess_comes_from_what_was_seen(environment: SQLEnvironment, pets: Dataset) -> None:
    for seed in range(40):
        player = StumblingPlayer(pets.question("cats"), random.Random(seed))
        episode, _ = play(environment, pets.question("cats"), player)
        answer, before = episode.turns[-1].argument, episode.turns[-2]
        assert answer in before.result or answer == "0"


def test_hidden_matrices_go_to_muon_and_everything_else_to_adamw() -> None:
    model = build_model(TOKENIZER)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    muon, adamw = MuonAdamW(model, muon_lr=0.02, adamw_lr=0.003).param_groups
    matrices, others = ({names[id(p)] for p in group["params"]} for group in (muon, adamw))
    assert matrices == {name for name in names.values() if "_proj." in name}
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= others
    assert matrices | others == set(names.values())
    assert (muon["lr"], adamw["lr"]) == (0.02, 0.003)


def test_a_stage_trains_by_both_optimizers_and_saves_a_policy(pets: Dataset, tmp_path: Path) -> None:
    conversations = [conversation for seed in range(8) for _, conversation in mixed_play(pets, 0.5, seed)]
    tokenizer = build_tokenizer(texts(conversations))
    model, start = build_model(tokenizer), build_model(tokenizer)
    train(model, tokenizer, conversations, Stage(1.0, 0.02, 0.02, max_steps=2), tmp_path)
    assert all(not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True))
    saved, same = load_policy(str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), saved.parameters(), strict=True))
    assert same.get_vocab() == tokenizer.get_vocab()
