"""Which flags two runs differ in, without what says nothing about learning and without secrets."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trainer.results.run_flags import Differing, differing, flags_of, redacted

VALUES = st.dictionaries(st.sampled_from("abcd"), st.none() | st.integers(0, 2), max_size=4)


@given(VALUES, VALUES)
def test_what_differs_is_antisymmetric_and_nothing_else(a: dict[str, Any], b: dict[str, Any]) -> None:
    found = differing(a, b)
    assert {d.name for d in found} == {name for name in {*a, *b} if a.get(name) != b.get(name)}
    assert sorted((d.name, d.b, d.a) for d in found if d.a != d.b) == sorted(
        (d.name, d.a, d.b) for d in differing(b, a)
    )
    assert differing(a, a) == []


def test_a_flag_that_one_side_lacks_is_none_there() -> None:
    assert differing({"a": 1}, {"a": 1, "b": False}) == [Differing("b", None, False)]


def test_flags_are_those_that_decide_what_is_learnt() -> None:
    config = {
        "sqlenv": {"data": "synthetic"},
        "grpo": {
            "beta": 0.1,
            "output_dir": "runs/a",
            "save_steps": 5,
            "logging_steps": 1,
            "hub_token": "s3cret",
            "model_init_kwargs": {"token": "s3cret"},
        },
        "model": {"use_peft": True},
        "versions": {"torch": "2"},
        "base_notes": "Warmed up.",
    }
    assert flags_of(config) == {
        "data": "synthetic",
        "beta": 0.1,
        "model_init_kwargs": {"token": "(hidden)"},
        "use_peft": True,
        "version of torch": "2",
    }
    assert flags_of({}) == {}


def test_secrets_are_hidden_wherever_they_stand() -> None:
    assert redacted({"a": [{"api_key": "k", "max_tokens": 5}], "token": "", "Password": "p"}) == {
        "a": [{"api_key": "(hidden)", "max_tokens": 5}],
        "token": "",
        "Password": "(hidden)",
    }
