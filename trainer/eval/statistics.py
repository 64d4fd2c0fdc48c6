"""How certain an evaluation is: intervals, paired comparisons, summaries. Pure: no I/O, no randomness.

Outcomes of questions about one database are correlated, so the database, not the question, is the sampling unit:
every interval here takes the database as its cluster.

Guarantees:

1. An interval lies inside the range of its quantity, contains the estimate and is never of width zero,
   whatever the data: all right, all wrong, one question, one database. Only that of a mean (steps, tokens) is as
   narrow as what was seen: where no question differs, it has no width.
2. Clustering only ever widens: an interval is at least as wide as the same number of independent questions
   would give (a design effect below 1, estimated from a dozen clusters, is noise). Several episodes of one
   question are no more questions.
3. A failed episode (the infrastructure broke) is not counted as an attempt, and its number is reported.

Method. With about 12 clusters the usual robust standard error (CR1) and the percentile bootstrap over clusters
are too narrow (Cameron, Gelbach & Miller, Review of Economics and Statistics 2008). The jackknife variance that
leaves out one cluster at a time (CV3), with the quantile of t(G - 1), is the sturdy choice among those that need
no simulation (MacKinnon, Nielsen & Webb, Journal of Econometrics 2023). A symmetric interval is poor near 0 and 1,
so the variance is not used directly but as a design effect: it shrinks n to an effective sample size, which goes
into an interval made for proportions (Korn & Graubard, Survey Methodology 1998): Wilson's score interval for a
rate, Bonett & Price's adjusted Wald interval (Journal of Educational and Behavioral Statistics 2012) for a paired
difference. With a single cluster there is no spread to estimate, and both fall back to independence. The difference
of two means has no such bounds, and its interval is the symmetric one, of the same variance and quantile.
Simulated with 12 clusters of unequal size (beta-binomial, intra-cluster correlation 0.05 and 0.2, rates 0.15 to
0.9), the 95% interval covers 91 to 96%; CR1 with t(G - 1) covers 85 to 93%, the bootstrap 85 to 91%, and
independent questions 48 to 77%. A test repeats the comparison with the bootstrap.

A handful of successes cannot show how they cluster: at a rate of 2% and a correlation of 0.2 that interval covered 75
to 85%. Near 0 and 1 a correlation of LEAST_CORRELATION is therefore assumed at least. Simulated with 5 to 19 clusters
of 5 to 60 questions, rates of 0.5 to 20% and correlations of 0 to 0.3, the interval then covers 93% or more (and up to
100% where the questions are in truth independent).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from env_server.dataset import Hardness
from env_server.errors import SQLEnvError
from trainer.rollout.episodes import EpisodeRecord, Outcome

UPPER = 0.975
"""The upper quantile of a two-sided interval of 95%."""
HARDNESS = tuple(hardness.value for hardness in Hardness)


LEAST_CORRELATION = 0.1
"""The correlation between questions of a database that is assumed where there are too few successes, or failures, to
see one."""
FULL_FLOOR, NO_FLOOR = 0.1, 0.2
"""Up to the first share (or from one minus it) LEAST_CORRELATION is assumed, from the second on nothing."""


class NothingJudgedError(SQLEnvError):
    """Every episode of an evaluation failed; the text has the first cause."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval; low < high."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """After minus before over the questions that both played, as a share (0.1 is ten points).

    `better` went from wrong to right, `worse` from right to wrong, out of `n` questions in `clusters` databases.
    """

    mean: float
    interval: Interval
    better: int
    worse: int
    n: int
    clusters: int


@dataclass(frozen=True, slots=True)
class MeanDifference:
    """Two means over the questions that both played, and after minus before."""

    before: float
    after: float
    mean: float
    interval: Interval


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """The success of one hardness or family. `episodes` are the judged ones."""

    episodes: int
    successes: int
    success_rate: float
    interval: Interval


@dataclass(frozen=True, slots=True)
class EvaluationSummary:
    """What an evaluation showed.

    `episodes` are the judged ones: rates and means are over them. `failed` episodes are left out of every rate
    and named in `outcomes`, which counts every episode by how it ended. `parse_rate` is the share of turns that
    parsed. `excluded` counts, by reason, the questions that the data set left out at load.
    """

    episodes: int
    successes: int
    failed: int
    databases: int
    success_rate: float
    interval: Interval
    by_hardness: dict[str, GroupSummary]
    by_family: dict[str, GroupSummary]
    mean_reward: float
    mean_steps: float
    parse_rate: float
    outcomes: dict[str, int]
    excluded: dict[str, int]


def percent(share: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * share:.1f}%"


def interval_text(interval: Interval) -> str:
    """An interval of shares in percent."""
    return f"{100 * interval.low:.1f} to {100 * interval.high:.1f}"


def wilson(successes: int, n: int) -> Interval:
    """Return Wilson's score interval (JASA 1927) of a share; [0, 1] when n is 0.

    Raises ValueError unless 0 <= successes <= n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes must lie in 0..n, got {successes} of {n}")
    return _score_interval(successes / n if n else 0.0, n, _quantile(1))


def clustered_interval(
    outcomes: Sequence[bool | float], clusters: Sequence[str], questions: Sequence[str] = ()
) -> Interval:
    """Return the interval of the mean of outcomes in [0, 1]; `clusters[i]` is the cluster of `outcomes[i]`.

    `questions[i]` is what was asked, where that may be the same of several. Wilson's interval at the effective sample
    size, with the quantile of t(G - 1); Wilson's own for one cluster. Raises ValueError when the lengths differ or an
    outcome lies outside [0, 1].
    """
    values = np.asarray(outcomes, dtype=float)
    if values.size == 0:
        return wilson(0, 0)
    if values.min() < 0 or values.max() > 1:
        raise ValueError("outcomes must lie in [0, 1]")
    mean = float(values.mean())
    variance, groups = _sampling_variance(values, clusters, questions)
    effect = max(_design_effect(variance, mean * (1 - mean) / values.size), _least_effect(mean, clusters))
    return _score_interval(mean, values.size / effect, _quantile(groups))


def paired_difference(
    before: Sequence[bool], after: Sequence[bool], clusters: Sequence[str], questions: Sequence[str] = ()
) -> PairedDifference:
    """Compare two evaluations question by question: `clusters[i]` is the database of `before[i]` and `after[i]`.

    `questions[i]` is what was asked, where that may be the same of several. Raises ValueError when the lengths differ
    or there is no question.
    """
    if not len(before) == len(after) == len(clusters) > 0:
        raise ValueError(f"{len(before)} and {len(after)} outcomes but {len(clusters)} clusters")
    values = np.array(after, dtype=float) - np.array(before, dtype=float)
    better, worse, n = int((values > 0).sum()), int((values < 0).sum()), len(before)
    variance, groups = _sampling_variance(values, clusters, questions)
    effect = _design_effect(variance, float(values.var()) / n)
    interval = _adjusted_wald(better / effect, worse / effect, n / effect, _quantile(groups))
    return PairedDifference((better - worse) / n, interval, better, worse, n, groups)


def mean_difference(
    before: Sequence[tuple[float, float]],
    after: Sequence[tuple[float, float]],
    clusters: Sequence[str],
    questions: Sequence[str] = (),
) -> MeanDifference:
    """Compare two means question by question: each is a value with its weight, `clusters[i]` the database of both.

    `questions[i]` is what was asked, where that may be the same of several. The weight of a question's steps, say, is
    1, and that of its share of turns that parsed the number of its turns. Raises ValueError when the lengths differ or
    there is no question.
    """
    if not len(before) == len(after) == len(clusters) > 0:
        raise ValueError(f"{len(before)} and {len(after)} values but {len(clusters)} clusters")
    sides = np.array([before, after], dtype=float)
    weights = sides[..., 1]
    sums = np.stack([sides[..., 0] * weights, weights])
    left, right = _means(sums.sum(axis=2))
    variance = max(_jackknife_of_means(sums, names) for names in (clusters, questions or range(len(clusters))))
    half = _quantile(len(set(clusters))) * math.sqrt(variance)
    mean = float(right - left)
    return MeanDifference(float(left), float(right), mean, Interval(mean - half, mean + half))


def judged(records: Sequence[EpisodeRecord]) -> list[EpisodeRecord]:
    """Return the episodes that count as attempts: all but the failed ones."""
    return [r for r in records if r.outcome != Outcome.FAILED]


def successful(record: EpisodeRecord) -> bool:
    """Return whether the ANSWER was judged correct."""
    return record.outcome == Outcome.CORRECT


def keyed(records: Sequence[EpisodeRecord]) -> dict[str, EpisodeRecord]:
    """Key the judged episodes for pairing: by question, and by occurrence where a question was played repeatedly."""
    seen: Counter[str] = Counter()
    result: dict[str, EpisodeRecord] = {}
    for record in records:
        seen[record.question_id] += 1
        if record.outcome != Outcome.FAILED:
            result[f"{record.question_id}#{seen[record.question_id]}"] = record
    return result


def compare(before: Sequence[EpisodeRecord], after: Sequence[EpisodeRecord]) -> PairedDifference:
    """Return the paired difference of two evaluations' success, over the questions that both were judged on.

    Raises ValueError when there is none.
    """
    left, right = keyed(before), keyed(after)
    common = sorted(left.keys() & right.keys())
    return compare_pairs([(left[key], right[key]) for key in common])


def compare_pairs(
    pairs: Sequence[tuple[EpisodeRecord, EpisodeRecord]], holds: Callable[[EpisodeRecord], bool] = successful
) -> PairedDifference:
    """Return the paired difference of the share of which something holds; errors as `paired_difference`."""
    return paired_difference(
        [holds(a) for a, _ in pairs],
        [holds(b) for _, b in pairs],
        [a.db_id for a, _ in pairs],
        [a.question_id for a, _ in pairs],
    )


def summarize(records: Sequence[EpisodeRecord], excluded: Mapping[str, int]) -> EvaluationSummary:
    """Summarize an evaluation. Raises NothingJudgedError when every episode failed, with the first failure's text."""
    counted = judged(records)
    if not counted:
        cause = next((f": {r.failure}" for r in records if r.failure), "")
        raise NothingJudgedError(f"no episode was judged, {len(records)} failed{cause}")
    whole = group_summary(counted)
    steps = sum(r.steps for r in counted)
    return EvaluationSummary(
        episodes=whole.episodes,
        successes=whole.successes,
        failed=len(records) - len(counted),
        databases=len({r.db_id for r in counted}),
        success_rate=whole.success_rate,
        interval=whole.interval,
        by_hardness=_groups(counted, "hardness"),
        by_family=_groups(counted, "family"),
        mean_reward=math.fsum(r.reward for r in counted) / len(counted),
        mean_steps=steps / len(counted),
        parse_rate=math.fsum(r.parse_rate * r.steps for r in counted) / steps if steps else 0.0,
        outcomes=dict(Counter(r.outcome for r in records).most_common()),
        excluded=dict(excluded),
    )


def group_summary(records: Sequence[EpisodeRecord]) -> GroupSummary:
    """Return the success of judged episodes, at least one."""
    outcomes = [successful(r) for r in records]
    interval = clustered_interval(outcomes, [r.db_id for r in records], [r.question_id for r in records])
    return GroupSummary(len(outcomes), sum(outcomes), sum(outcomes) / len(outcomes), interval)


def intervals_as_pairs(items: list[tuple[str, Any]]) -> Any:
    """Write an `Interval` as [low, high]."""
    fields = dict(items)
    return [fields["low"], fields["high"]] if fields.keys() == {"low", "high"} else fields


def _groups(records: Sequence[EpisodeRecord], field: str) -> dict[str, GroupSummary]:
    members: dict[str, list[EpisodeRecord]] = defaultdict(list)
    for record in records:
        members[getattr(record, field)].append(record)
    return {name: group_summary(members[name]) for name in sorted(members) if name}


def _quantile(groups: int) -> float:
    """The quantile of t(groups - 1), or of the normal where there is no spread between groups."""
    # It takes a third of a second to import, which --help need not wait for.
    from scipy.special import ndtri, stdtrit

    return float(ndtri(UPPER)) if groups < 2 else float(stdtrit(groups - 1, UPPER))


def _sampling_variance(
    values: NDArray[np.float64], clusters: Sequence[str], questions: Sequence[str]
) -> tuple[float, int]:
    """The variance of the mean, and the number of clusters; no less than what the questions alone would give."""
    variance, groups = _jackknife_variance(values, clusters)
    if len(set(questions)) < len(questions):
        variance = max(variance, _jackknife_variance(values, questions)[0])
    return variance, groups


def _jackknife_variance(values: NDArray[np.float64], clusters: Sequence[str]) -> tuple[float, int]:
    """The variance of the mean by leaving out one cluster at a time (CV3), and the number of clusters G.

    (G - 1) / G times the sum over clusters of (mean without the cluster - mean) squared; 0 for one cluster.
    """
    if len(clusters) != values.size:
        raise ValueError(f"{values.size} outcomes but {len(clusters)} clusters")
    number = {name: i for i, name in enumerate(dict.fromkeys(clusters))}
    index = np.array([number[name] for name in clusters])
    sizes = np.bincount(index)
    groups = len(number)
    if groups < 2:
        return 0.0, groups
    sums = np.bincount(index, weights=values)
    without = (values.sum() - sums) / (values.size - sizes)
    return float((groups - 1) / groups * np.square(without - values.mean()).sum()), groups


def _jackknife_of_means(sums: NDArray[np.float64], clusters: Sequence[Hashable]) -> float:
    """The variance of the difference of two weighted means, as above; `sums` are (value and weight, side, question)."""
    number = {name: i for i, name in enumerate(dict.fromkeys(clusters))}
    groups = len(number)
    if groups < 2:
        return 0.0
    index = np.array([number[name] for name in clusters])
    own = np.stack([np.bincount(index, row) for row in sums.reshape(4, -1)]).reshape(2, 2, groups)
    whole = sums.sum(axis=2)
    without = _means(whole[..., None] - own)
    left, right = _means(whole)
    return float((groups - 1) / groups * np.square(without[1] - without[0] - (right - left)).sum())


def _means(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Values over weights; 0 where nothing weighs."""
    values, weights = sums
    return np.where(weights > 0, values / np.where(weights > 0, weights, 1.0), 0.0)


def _design_effect(variance: float, independent: float) -> float:
    """How many clustered questions are worth one independent question: at least 1."""
    return max(1.0, variance / independent) if independent > 0 else 1.0


def _least_effect(share: float, clusters: Sequence[str]) -> float:
    """The design effect that is assumed at least: Kish's, 1 + (size of a cluster - 1) x correlation, near 0 and 1."""
    edge = min(share, 1 - share)
    correlation = LEAST_CORRELATION * min(1.0, max(0.0, (NO_FLOOR - edge) / (NO_FLOOR - FULL_FLOOR)))
    sizes = Counter(clusters).values()
    return 1 + (sum(size * size for size in sizes) / len(clusters) - 1) * correlation


def _score_interval(share: float, n: float, quantile: float) -> Interval:
    """Wilson's interval for a share of n, which may be an effective (fractional) sample size."""
    if n == 0:
        return Interval(0.0, 1.0)
    square = quantile * quantile / n
    centre = (share + square / 2) / (1 + square)
    half = quantile * math.sqrt(share * (1 - share) / n + square / (4 * n)) / (1 + square)
    return Interval(max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share)))


def _adjusted_wald(better: float, worse: float, n: float, quantile: float) -> Interval:
    """Bonett and Price's interval of a difference of paired shares: one discordant pair is added each way."""
    up, down = (better + 1) / (n + 2), (worse + 1) / (n + 2)
    half = quantile * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    mean = (better - worse) / n
    return Interval(max(-1.0, min(up - down - half, mean)), min(1.0, max(up - down + half, mean)))
