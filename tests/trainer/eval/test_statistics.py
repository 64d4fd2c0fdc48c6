"""Intervals, paired differences and summaries."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binomtest, ttest_rel

from tests.trainer.records import make_record
from trainer.eval.statistics import (
    Interval,
    NothingJudgedError,
    clustered_interval,
    compare,
    group_summary,
    keyed,
    mean_difference,
    paired_difference,
    summarize,
    wilson,
)
from trainer.rollout.episodes import EpisodeRecord

CLUSTERED = st.lists(st.tuples(st.booleans(), st.sampled_from("abcdef")), min_size=1, max_size=60)


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_agrees_with_scipy(case: tuple[int, int]) -> None:
    successes, n = case
    expected = binomtest(successes, n).proportion_ci(0.95, method="wilson")
    ours = wilson(successes, n)
    assert (ours.low, ours.high) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_wilson_of_nothing_knows_nothing() -> None:
    assert wilson(0, 0) == Interval(0.0, 1.0)


@pytest.mark.parametrize(("successes", "n"), [(-1, 3), (4, 3), (0, -1)])
def test_wilson_refuses_impossible_counts(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="successes"):
        wilson(successes, n)


@given(CLUSTERED)
@example([(True, f"db{i % 10}") for i in range(40)])
@example([(False, f"db{i % 10}") for i in range(40)])
def test_clustered_interval_is_proper_never_narrower_than_independence_and_of_any_order(
    rows: list[tuple[bool, str]],
) -> None:
    outcomes, clusters = zip(*rows, strict=True)
    interval = clustered_interval(outcomes, clusters)
    independent = wilson(sum(outcomes), len(outcomes))
    assert 0 <= interval.low <= np.mean(outcomes) <= interval.high <= 1
    assert interval.low < interval.high
    assert interval.low <= independent.low + 1e-12
    assert interval.high >= independent.high - 1e-12
    other = clustered_interval(outcomes[::-1], clusters[::-1])
    assert (other.low, other.high) == pytest.approx((interval.low, interval.high))


def test_one_cluster_falls_back_to_wilson() -> None:
    assert clustered_interval([True, False, False], ["db"] * 3) == wilson(1, 3)


def test_questions_that_fall_together_count_as_few() -> None:
    outcomes = [i < 60 for i in range(120)]
    together = clustered_interval(outcomes, [f"db{i // 10}" for i in range(120)])
    spread = clustered_interval(outcomes, [f"db{i % 12}" for i in range(120)])
    assert together.high - together.low > 2 * (spread.high - spread.low)


@pytest.mark.parametrize(("outcomes", "clusters"), [([0.5, 1.5], ["a", "b"]), ([-0.1], ["a"]), ([True], ["a", "b"])])
def test_clustered_interval_refuses(outcomes: list[float], clusters: list[str]) -> None:
    with pytest.raises(ValueError, match=r"outcomes"):
        clustered_interval(outcomes, clusters)


def percentile_bootstrap(values: NDArray[np.float64], index: NDArray[np.int64], rng: np.random.Generator) -> Interval:
    sums, sizes = np.bincount(index, weights=values), np.bincount(index)
    draws = rng.integers(0, len(sizes), (300, len(sizes)))
    low, high = np.quantile(sums[draws].sum(1) / sizes[draws].sum(1), [0.025, 0.975])
    return Interval(float(low), float(high))


def test_coverage_with_twelve_unequal_clusters_beats_the_bootstrap() -> None:
    """The choice that the module states: 12 databases, correlation 0.1 within them, true rate 0.3, fixed seed."""
    rng = np.random.default_rng(7)
    rate, spread, runs = 0.3, 9.0, 400
    ours = bootstrap = 0
    for _ in range(runs):
        sizes = rng.geometric(1 / 15, 12) + 3
        index = np.repeat(np.arange(12), sizes)
        values = (rng.random(len(index)) < rng.beta(rate * spread, (1 - rate) * spread, 12)[index]).astype(float)
        interval = clustered_interval(values.tolist(), [str(i) for i in index])
        ours += interval.low <= rate <= interval.high
        interval = percentile_bootstrap(values, index, rng)
        bootstrap += interval.low <= rate <= interval.high
    assert ours / runs >= 0.92
    assert bootstrap / runs < ours / runs


@pytest.mark.parametrize("correlation", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("rate", [0.005, 0.02, 0.05, 0.1])
@pytest.mark.parametrize(("databases", "least", "most"), [(5, 20, 30), (11, 5, 60), (16, 25, 25)])
def test_coverage_at_low_rates(databases: int, least: int, most: int, rate: float, correlation: float) -> None:
    """Beta-binomial databases, fixed seed; of the complement, too, for a rate near 1 is a rate of failures near 0."""
    rng = np.random.default_rng(11)
    runs, covered = 600, 0
    spread = 1 / correlation - 1 if correlation else 0.0
    for run in range(runs):
        sizes = rng.integers(least, most, databases, endpoint=True)
        rates = rng.beta(rate * spread, (1 - rate) * spread, databases) if correlation else np.full(databases, rate)
        index = np.repeat(np.arange(databases), sizes)
        values = rng.random(len(index)) < rates[index]
        wanted, outcomes = (rate, values) if run % 2 else (1 - rate, ~values)
        interval = clustered_interval(outcomes.tolist(), [str(i) for i in index])
        covered += interval.low <= wanted <= interval.high
    assert covered / runs >= 0.93


OUTCOME_PAIRS = st.lists(st.tuples(st.booleans(), st.booleans(), st.sampled_from("abcdef")), min_size=1, max_size=60)


@given(OUTCOME_PAIRS)
def test_paired_difference_is_proper_and_antisymmetric(rows: list[tuple[bool, bool, str]]) -> None:
    before, after, clusters = zip(*rows, strict=True)
    paired = paired_difference(before, after, clusters)
    assert paired.mean == pytest.approx(np.mean([a - b for b, a, _ in rows]))
    assert -1 <= paired.interval.low <= paired.mean <= paired.interval.high <= 1
    assert paired.interval.high - paired.interval.low > 0.01
    back = paired_difference(after, before, clusters)
    assert (back.better, back.worse) == (paired.worse, paired.better)
    assert (back.interval.low, back.interval.high) == pytest.approx((-paired.interval.high, -paired.interval.low))


def test_paired_difference_by_hand() -> None:
    """One database: Bonett and Price, with 6 better and 2 worse of 20: 7/22 and 3/22."""
    before, after = [i in (0, 1) for i in range(20)], [2 <= i < 8 for i in range(20)]
    paired = paired_difference(before, after, ["db"] * 20)
    half = 1.959964 * ((7 / 22 + 3 / 22 - (4 / 22) ** 2) / 22) ** 0.5
    assert (paired.better, paired.worse, paired.n, paired.clusters) == (6, 2, 20, 1)
    assert paired.mean == pytest.approx(0.2)
    assert (paired.interval.low, paired.interval.high) == pytest.approx((4 / 22 - half, 4 / 22 + half), abs=1e-6)


def test_a_change_in_one_database_only_is_not_sure() -> None:
    before, clusters = [False] * 120, [f"db{i // 10}" for i in range(120)]
    one_database = paired_difference(before, [i < 10 for i in range(120)], clusters)
    every_database = paired_difference(before, [i % 12 == 0 for i in range(120)], clusters)
    assert one_database.mean == every_database.mean
    assert one_database.interval.low < 0 < every_database.interval.low


WEIGHTED = st.tuples(st.floats(-5, 5), st.integers(0, 9))
MEASURED = st.lists(st.tuples(WEIGHTED, WEIGHTED, st.sampled_from("abcdef")), min_size=1, max_size=40)


@given(MEASURED)
def test_mean_difference_is_proper_antisymmetric_and_never_narrower_than_independence(
    rows: list[tuple[tuple[float, int], tuple[float, int], str]],
) -> None:
    before, after, clusters = zip(*rows, strict=True)
    found = mean_difference(before, after, clusters)
    assert found.mean == pytest.approx(found.after - found.before)
    weights = [weight for _, weight in after]
    expected = np.average([value for value, _ in after], weights=weights) if sum(weights) else 0.0
    assert found.after == pytest.approx(expected)
    assert found.interval.low <= found.mean <= found.interval.high
    back = mean_difference(after, before, clusters)
    assert (back.interval.low, back.interval.high) == pytest.approx((-found.interval.high, -found.interval.low))
    independent = mean_difference(before, after, ["one"] * len(rows)).interval
    assert found.interval.high - found.interval.low >= independent.high - independent.low - 1e-9


def test_mean_difference_of_independent_questions_is_the_paired_t_interval() -> None:
    """With a cluster for each question, the jackknife of a plain mean is the usual variance."""
    before, after = np.arange(12.0), np.arange(12.0) ** 1.5
    found = mean_difference([(v, 1) for v in before], [(v, 1) for v in after], [str(i) for i in range(12)])
    expected = ttest_rel(after, before).confidence_interval()
    assert (found.interval.low, found.interval.high) == pytest.approx((expected.low, expected.high))


def test_mean_difference_of_questions_that_move_together_is_less_sure() -> None:
    before = [(0.0, 1.0)] * 120
    after = [(float(i < 60), 1.0) for i in range(120)]
    together = mean_difference(before, after, [f"db{i // 10}" for i in range(120)]).interval
    spread = mean_difference(before, after, [f"db{i % 12}" for i in range(120)]).interval
    assert together.high - together.low > 2 * (spread.high - spread.low)


def test_mean_difference_weighs_and_refuses_what_does_not_fit() -> None:
    found = mean_difference([(1.0, 1), (0.0, 3)], [(1.0, 2), (0.5, 2)], ["a", "b"])
    assert (found.before, found.after, found.mean) == (0.25, 0.75, 0.5)
    for before, clusters in (([(1.0, 1.0)], ["a", "b"]), ([], [])):
        with pytest.raises(ValueError, match="clusters"):
            mean_difference(before, before, clusters)
        with pytest.raises(ValueError, match="clusters"):
            paired_difference([True] * len(before), [False] * len(before), clusters)


def test_keyed_pairs_repeated_plays_in_order_and_skips_failures() -> None:
    records = [make_record("q", "failed"), make_record("q", "wrong"), make_record("p")]
    assert {key: r.outcome for key, r in keyed(records).items()} == {"q#2": "wrong", "p#1": "correct"}


@pytest.mark.parametrize("databases", ["a", "ab"])
def test_a_question_that_is_played_again_tells_nothing_new(databases: str) -> None:
    """Twenty questions of which each always comes out alike are twenty, however often they are played."""

    def played(times: int, share: float) -> list[EpisodeRecord]:
        outcomes = ["correct" if i < 20 * share else "wrong" for i in range(20)]
        once = [make_record(f"q{i}", outcome, databases[i % len(databases)]) for i, outcome in enumerate(outcomes)]
        return [record for record in once for _ in range(times)]

    once, often = group_summary(played(1, 0.5)).interval, group_summary(played(8, 0.5)).interval
    assert often.high - often.low >= once.high - once.low
    pairs = [compare(played(times, 0.3), played(times, 0.5)).interval for times in (1, 8)]
    assert pairs[1].high - pairs[1].low > 0.85 * (pairs[0].high - pairs[0].low)
    numbers = [(float(i % 3), 1.0) for i in range(20)]
    nothing = [(0.0, 1.0)] * 20
    whose = [databases[i % len(databases)] for i in range(20)]
    one = mean_difference(nothing, numbers, whose, [str(i) for i in range(20)]).interval
    eight = mean_difference(8 * nothing, 8 * numbers, 8 * whose, 8 * [str(i) for i in range(20)]).interval
    assert (eight.low, eight.high) == pytest.approx((one.low, one.high))


def test_compare_pairs_by_question_whatever_the_order() -> None:
    before = [make_record("a", "wrong"), make_record("b", "correct"), make_record("c", "wrong")]
    after = [make_record("c", "correct"), make_record("b", "correct"), make_record("a", "failed")]
    paired = compare(before, after)
    assert (paired.n, paired.better, paired.worse) == (2, 1, 0)
    with pytest.raises(ValueError, match="clusters"):
        compare(before, [make_record("d")])


def test_summarize_counts_judged_episodes_and_names_the_rest() -> None:
    records = [
        make_record("a", "correct", "x"),
        make_record("b", "wrong", "y", hardness="hard", family=""),
        make_record("c", "out_of_budget", "y", hardness="hard", family="join"),
        make_record("d", "failed", "z"),
    ]
    summary = summarize(records, {"gold_empty": 4})
    assert (summary.episodes, summary.successes, summary.failed, summary.databases) == (3, 1, 1, 2)
    assert summary.success_rate == pytest.approx(1 / 3)
    assert summary.interval.low < 1 / 3 < summary.interval.high
    assert {name: (g.successes, g.episodes) for name, g in summary.by_hardness.items()} == {
        "easy": (1, 1),
        "hard": (0, 2),
    }
    assert set(summary.by_family) == {"count", "join"}
    assert summary.mean_reward == pytest.approx(0.8 / 3)
    assert summary.mean_steps == pytest.approx(10 / 3)
    assert summary.parse_rate == pytest.approx((2 + 2 + 2) / 10)
    assert summary.outcomes == {"correct": 1, "wrong": 1, "out_of_budget": 1, "failed": 1}
    assert summary.excluded == {"gold_empty": 4}


def test_summarize_refuses_an_evaluation_of_failures_and_says_why() -> None:
    with pytest.raises(NothingJudgedError, match="1 failed: ConnectionError: gone"):
        summarize([make_record("a", "failed")], {})
