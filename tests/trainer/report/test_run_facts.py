"""What a run was made with, as far as it was written down."""

from __future__ import annotations

from trainer.report.run_facts import departures_table, facts_table


def test_what_is_not_known_is_left_out() -> None:
    assert facts_table({}, 0.0, 0) is None
    found = facts_table({"machine": {"gpus": ["H100", "H100"]}}, 90.0, 3)
    assert found is not None
    assert found.rows == [["training took", "1:30 (3 steps, with what lies between them)"], ["GPUs", "H100, H100"]]


def test_flags_that_differ_with_what_they_are_by_default() -> None:
    config = {
        "sqlenv": {"refill": 0.5},
        "grpo": {"reward_weights": [1.0, 0.0]},
        "departures": {"refill": 0.0, "reward_weights": None},
    }
    found = departures_table(config)
    assert found is not None
    assert found.rows == [["refill", "0.5", "0.0"], ["reward_weights", "[1.0, 0.0]", "-"]]


def test_a_run_that_did_not_write_them_down_has_no_table() -> None:
    assert departures_table({"grpo": {"beta": 0.1}}) is None
    nothing = departures_table({"departures": {}})
    assert nothing is not None
    assert nothing.rows == []
