"""The table of metrics: one sentence each, and found by the names that are logged."""

from __future__ import annotations

from pathlib import Path

from trainer.eval.metrics import MEANINGS, in_order, meaning


def test_each_metric_has_one_sentence_that_fits_a_table() -> None:
    for name, text in MEANINGS.items():
        assert text[0].isupper(), name
        assert text.endswith("."), name
        assert "|" not in text, name


def test_a_part_of_a_name_may_be_anything() -> None:
    assert meaning("rewards/reward_format/mean") == MEANINGS["rewards/*/mean"]
    assert meaning("rewards/reward_format/median") == ""


def test_the_order_is_that_of_the_table() -> None:
    assert in_order(["zeta", "eval/success_low", "alpha", "entropy", "reward"]) == [
        *("reward", "entropy", "eval/success_low"),
        *("alpha", "zeta"),
    ]


def test_the_documents_have_the_table_as_it_is() -> None:
    page = Path(__file__).parents[3] / "docs" / "commands.md"
    rows = [f"| `{name}` | {text} |" for name, text in MEANINGS.items()]
    assert "\n".join(["| metric | meaning |", "|---|---|", *rows]) in page.read_text(encoding="utf-8")
