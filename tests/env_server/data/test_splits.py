"""The split into training and evaluation: both sides, the share, and that it stays."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.data.splits import split_databases, split_queries
from env_server.dataset import Split


@given(st.sets(st.text(min_size=1, max_size=12), max_size=40))
def test_both_sides_are_covered_and_the_order_does_not_count(db_ids: set[str]) -> None:
    splits = split_databases(sorted(db_ids))
    assert splits == split_databases(sorted(db_ids, reverse=True))
    assert set(splits) == db_ids
    assert set(splits.values()) <= {Split.TRAIN, Split.EVAL}
    if len(db_ids) > 1:
        assert set(splits.values()) == {Split.TRAIN, Split.EVAL}


def test_databases_have_about_the_asked_share_and_stay_on_their_side() -> None:
    db_ids = [f"database_{i}" for i in range(1000)]
    splits = split_databases(db_ids)
    assert 200 <= sum(split is Split.EVAL for split in splits.values()) <= 300
    fewer = split_databases(db_ids[::3])
    assert all(splits[db_id] is split for db_id, split in fewer.items())


def test_the_split_is_the_same_everywhere() -> None:
    """Pinned: another machine, or another day, must not move a database to the other side."""
    splits = split_databases(["farm", "city", "shop", "school", "music"])
    assert [db_id for db_id, split in splits.items() if split is Split.EVAL] == ["city"]


@given(st.lists(st.sampled_from([f"SELECT {i} FROM t" for i in range(12)]), max_size=40))
def test_queries_keep_together_and_the_share_is_kept(queries: list[str]) -> None:
    splits = split_queries(queries)
    sides = dict(zip(queries, splits, strict=True))
    assert [sides[query] for query in queries] == splits
    assert split_queries(queries[::-1]) == splits[::-1]
    held_out = splits.count(Split.EVAL)
    if len(sides) > 1:
        assert set(splits) == {Split.TRAIN, Split.EVAL}
        assert held_out <= max(len(queries) / 4, min(Counter(queries).values()))
    else:
        assert held_out == 0


@pytest.mark.parametrize(("count", "held_out"), [(0, 0), (1, 0), (2, 1), (4, 1), (10, 2), (100, 25)])
def test_different_queries_are_divided_exactly(count: int, held_out: int) -> None:
    assert split_queries([f"SELECT {i}" for i in range(count)]).count(Split.EVAL) == held_out


def test_layout_and_case_do_not_make_another_query() -> None:
    queries = ["SELECT a FROM t", "select  a\nFROM t ;", "SELECT b FROM t", "SELECT c FROM t", "SELECT d FROM t"]
    for rotation in range(5):
        turned = queries[rotation:] + queries[:rotation]
        splits = dict(zip(turned, split_queries(turned), strict=True))
        assert splits[queries[0]] is splits[queries[1]]
