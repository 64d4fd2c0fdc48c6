"""Tables: what is unknown is left out or a dash, groups and failures are in order, no text is markup."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tests.trainer.records import make_record
from trainer.eval.statistics import summarize
from trainer.report.tables import (
    NONE,
    Table,
    clock,
    cut,
    exploration_table,
    facts_table,
    failure_table,
    for_terminal,
    group_table,
    metrics_table,
    non_default_table,
    success_table,
)

RECORDS = [make_record(f"q{i}", hardness=level) for i, level in enumerate(("extra", "hard", "medium", "easy"))]
SUMMARY = summarize(RECORDS, {})


def test_success_has_the_number_of_failed_episodes_and_a_change_where_there_is_one() -> None:
    failed = summarize([*RECORDS, make_record("lost", "failed")], {})
    table = success_table({"before": SUMMARY, "after": failed}, "title", {"after": "+1.0"})
    assert [row[-2:] for row in table.rows] == [["4", NONE], ["4 (+1 failed)", "+1.0"]]
    assert {len(row) for row in table.rows} == {len(table.header)}
    assert success_table({"before": SUMMARY}, "title").header == table.header[:-1]


def test_difficulty_is_in_spiders_order_and_a_missing_group_a_dash() -> None:
    easy = summarize([make_record("q", hardness="easy"), make_record("r", hardness="easy")], {})
    table = group_table("difficulty", {"all": SUMMARY, "easy": easy}, intervals=True, changes={"easy": "+1.0"})
    assert table is not None
    assert [row[0] for row in table.rows] == ["easy (2)", "medium (1)", "hard (1)", "extra (1)"]
    assert table.rows[0][2].startswith("100.0% (")
    assert [row[2:] for row in table.rows[1:]] == [[NONE, NONE]] * 3
    assert group_table("family", {}, intervals=False) is None


def test_the_most_frequent_failure_comes_first() -> None:
    lost = [make_record(f"l{i}", "out_of_tokens") for i in range(3)]
    table = failure_table({"a": [*RECORDS, make_record("w", "wrong")], "b": lost})
    assert [row[1:] for row in table.rows] == [["0 (0.0%)", "3 (100.0%)"], ["1 (100.0%)", "0 (0.0%)"]]


def test_exploration_leaves_out_what_nobody_did_or_counted() -> None:
    assert [row[0] for row in exploration_table({"a": RECORDS}).rows] == ["steps per question"]
    counted = [make_record("a", prompt_tokens=1200)]
    assert exploration_table({"a": RECORDS, "b": counted}).rows[-1] == ["prompt tokens per question", NONE, "1,200"]


def test_what_is_not_known_of_a_run_is_left_out() -> None:
    assert facts_table({}, 0.0, 0) is None
    found = facts_table({"machine": {"gpus": ["H100", "H100"]}}, 90.0, 3)
    assert found is not None
    assert found.rows == [["training took", "1:30 (3 steps, with what lies between them)"], ["GPUs", "H100, H100"]]
    assert metrics_table([]) is None


def test_non_default_arguments_without_places_and_secrets() -> None:
    departures = {"dynamic_sampling": 0.0, "reward_weights": None, "output_dir": "runs/a", "hub_token": None}
    config = {
        "sqlenv": {"dynamic_sampling": 0.5},
        "grpo": {"reward_weights": [1.0, 0.0], "hub_token": "s3cret"},
        "departures": departures,
    }
    found = non_default_table(config)
    assert found is not None
    assert found.rows == [["dynamic_sampling", "0.5", "0.0"], ["reward_weights", "[1.0, 0.0]", NONE]]
    assert non_default_table({"grpo": {"beta": 0.1}}) is None, "an older run"
    assert non_default_table({"departures": {}}) == Table(found.caption, found.header, [])


def test_no_text_is_markup_in_the_terminal() -> None:
    file = io.StringIO()
    table = Table("[red]title[/nothing]", ["[b]", "A"], [["[bold]x[/nothing]", "[link]"]])
    Console(file=file, width=80).print(for_terminal(table))
    for text in ("[red]title[/nothing]", "[b]", "[bold]x[/nothing]", "[link]"):
        assert text in file.getvalue()


def test_long_texts_are_cut_and_marked() -> None:
    assert cut("abcd", 4) == "abcd"
    assert cut("abcdef", 4) == "abcd ... (2 more characters)"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.9, "0:59"), (3599, "59:59"), (36_060, "10h01")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text
