"""What ails a training run, told from its metrics in the way of somebody who has watched many. Pure.

`diagnose` reads what a run has logged so far, the newest row last, and returns what the newest rows show. Promises:

1. A healthy run is silent. Bounds lie well outside of what healthy runs do, those of the tiny policy in float32 and of
   SmolLM2-135M in bfloat16, with a server, alike; and nothing is concluded from a handful of episodes, however few of
   them a step has.
2. Every finding has its figures, the likely cause and what helps, as flags. docs/training.md has the same words.
3. What a run does not log (`kl` without `--beta`) is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import fmean, linear_regression, median

Rows = Sequence[Mapping[str, float | None]]
"""Logged training steps, the newest last; TRL logs None for a mean over nothing but NaN."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """Something that is wrong with a run: what one sees, the likely cause, and what helps."""

    sign: str
    cause: str
    cure: str


@dataclass(frozen=True, slots=True)
class Finding:
    """A symptom, with the figures that show it."""

    symptom: Symptom
    seen: str


@dataclass(frozen=True, slots=True)
class Watched:
    """What has to be known of a run to read its metrics."""

    episodes: int
    """In a row."""
    float16: bool = False
    """Gradients are scaled, and steps left out where they overflow."""
    comparable: bool = True
    """Rewards of early and late steps are: neither the questions nor the weights follow what the policy has learnt."""


NOT_FINITE = Symptom(
    "NaN or infinity in the loss or the gradient",
    "float16 overflows, or the rate is far too large",
    "bfloat16 or float32 instead of `--fp16`; a tenth of `--learning_rate`",
)
NO_SPREAD = Symptom(
    "rewards differ, but their weighted sum does not",
    "those that differ have no weight",
    "`--reward_weights 1 0.2 0.2 0.1`",
)
ALL_FAIL = Symptom(
    "nearly every episode fails",
    "the policy cannot do it even now and then",
    "warm up, or more of it; easier data; `--num_generations 16`",
)
ALL_SUCCEED = Symptom(
    "nearly every episode succeeds",
    "it has learnt what these questions teach",
    "harder data; stop",
)
ALL_ALIKE = Symptom(
    "the episodes of a group are all alike",
    "the policy explores too little, so a question is always solved or never",
    "`--temperature 1`; `--num_generations 16`; `--refill 3`",
)
FLAT = Symptom(
    "the reward has not risen for long",
    "the rate is too small, the batch too noisy, or there is no more to learn here",
    "`--learning_rate` times 3; more episodes a step, by `--gradient_accumulation_steps`; other data, or stop",
)
NO_FORMAT = Symptom(
    "most turns are no actions",
    "the policy does not know the action format",
    "warm up; `--few_shot 2`",
)
FORMAT_LOST = Symptom(
    "the action format is being lost",
    "the rate is too large, or other rewards outweigh the format's",
    "a third of `--learning_rate`; a larger last number of `--reward_weights`; `--beta 0.02`",
)
NO_ENTROPY = Symptom(
    "entropy is gone",
    "the rate is too large or the temperature too low, and exploration has ended before success",
    "a third of `--learning_rate`; `--entropy_coef 0.001`; `--temperature 1`",
)
KL_RUNS_AWAY = Symptom(
    "KL runs away",
    "it leaves the language it knew",
    "twice the `--beta`; a third of `--learning_rate`",
)
MISMATCH = Symptom(
    "importance ratios run away from 1",
    "engine and trainer compute differently, or tokens are too old",
    "the same dtype on both sides, `--disable_dropout true`; `--staleness 0`; "
    "`--vllm_importance_sampling_mode token_truncate`",
)
LARGE_UPDATES = Symptom(
    "many tokens leave the clipping range",
    "updates on the same batch go too far",
    "a third of `--learning_rate`; `--num_iterations 1`",
)
SPIKES = Symptom(
    "the gradient spikes",
    "few episodes decide a step, or the rate is too large",
    "a third of `--learning_rate`; more episodes a step, by `--gradient_accumulation_steps`; `--max_grad_norm 0.5`",
)
LONGER = Symptom(
    "episodes grow longer, and success does not",
    "turns ramble or repeat themselves, and nothing in the rewards speaks against it",
    "a third of `--learning_rate`; a smaller `--step_budget` or `--max_turn_length`; `--beta 0.02`",
)
TURNS_CUT = Symptom(
    "turns are cut off",
    "a turn needs more tokens than it has, or the policy has forgotten how to end one",
    "`--max_turn_length` times 2; warm up",
)
OUT_OF_TOKENS = Symptom(
    "episodes run out of tokens",
    "an episode needs more tokens than it has",
    "`--max_completion_length` times 2; a smaller `--max_turn_length`",
)
TOKENS_UNTRAINED = Symptom(
    "much of what the policy generates is not trained",
    "a row or the context has no room for every turn, often because of thoughts, and the oldest turns are dropped",
    "`--max_completion_length` times 2; a larger `sqlenv inference --max_model_len`; "
    "a smaller `--step_budget` or `--max_thinking_length`; `--chat_template_kwargs '{\"enable_thinking\": false}'`",
)

SYMPTOMS = (
    *(NOT_FINITE, NO_SPREAD, ALL_FAIL, ALL_SUCCEED, ALL_ALIKE, FLAT, NO_FORMAT, FORMAT_LOST, NO_ENTROPY),
    *(KL_RUNS_AWAY, MISMATCH, LARGE_UPDATES, SPIKES, LONGER, TURNS_CUT, OUT_OF_TOKENS, TOKENS_UNTRAINED),
)
"""All, in the order of the documents."""

SEVERAL = 5
"""Rows that a mean or a median is taken of, at least: one row's outlier is no trend."""
FEW, MANY = 64, 256
"""Episodes that a share is taken of. SmolLM2-135M begins GRPO with 4.7% right: of 256 then, one at most is right with a
chance of 1 in 16,000. By the rule of three, none of 256 means fewer than 1.2%."""
NEARLY = 0.005
"""At 0.5% success, or 99.5%, a group of 8 holds both kinds with a chance of 1 in 25, and correctness teaches in no
other (DAPO, Yu et al. 2025, arXiv:2503.14476, draws questions until all its groups do)."""
ALIKE = 0.9
"""Share of groups without signal from which on a batch teaches next to nothing; at 4.7% success it is 0.68."""
NO_DIFFERENCE = 1e-4
"""What TRL adds to the spread before it divides by it: a smaller one drowns in it."""
DIFFERENCE = 100 * NO_DIFFERENCE
"""A spread of one reward that any sensible weight leaves visible."""
LONG = 100
"""Rows over which the reward must have risen measurably: half of what a run takes by default. The demo's steps, of 64
episodes, scatter by 0.11, which tells a rise over 100 rows to within 0.04; it rises by 0.77 in 60."""
ENOUGH = 0.9
"""Success from which on neither a flat reward nor a low entropy is a fault; a share of actions by which a step shows
that the policy knows the format."""
HALF = 0.5
FORMAT_FALL = 0.3
"""Over SmolLM2's episodes the share spreads by up to 0.36, so of 64 it is known to within 0.045; a run has many means
to find its best and its worst among."""
COIN = math.log(2)
"""Nats in a whole episode, one toss of a coin: eight episodes then are two different ones at most. The demo ends with
twice that at 94% success, SmolLM2 has a hundred times as much."""
ENTROPY_LEFT = 0.1
"""Share of its first entropy. Healthy runs spend most of theirs on success (Cui et al. 2025, arXiv:2505.22617: down by
73% for 76% of the gain); the demo has 11% left at 94% success. Spent before half of the questions are right, it is
wasted."""
KL_NATS = 1.0
"""A token, on average: the reference finds it e times less likely. The tiny policy's stays below 0.2 as it learns from
16% to 87%. The estimator has heavy tails, hence the median."""
GAP_NATS = 0.1
RATIO_OFF = 0.1
"""Between engine and trainer, SmolLM2 in bfloat16 with a float32 server: gap 0.03, mean ratio 0.9986 to 1.0014 while
single ratios are 0.67 to 1.84; in float32, 1e-5. Masking of whole sequences, TRL's default, shows in the mean too."""
CLIPPED = 0.25
"""Of all tokens, that get no gradient any more. With one update a batch there are none."""
SPIKE, SPIKES_SEEN, SPIKE_ROWS, USUAL_ROWS = 10.0, 2, 10, 50
"""Times the median. The demo's stay within 3.5 times. One alone is clipped, and does no harm."""
LONGER_BY = 3.0
"""The demo's episodes become twice as long as they learn to look before they answer."""
CUT = 0.2
"""Of episodes: in a group of eight, one or two are judged by where they were cut, and not by what they did."""
TRAINED = 0.8
"""Of the generated tokens. What is missing are the first turns, in which the policy explores: a fifth of an episode of
15 is its first three. Without thoughts all are trained; with Qwen3's, 512 tokens in each of 9 turns, less than half."""
FLOAT16_PATIENCE = 5
"""Rows. The scale of float16's loss begins far too large and is halved at each overflow."""


def diagnose(rows: Rows, run: Watched) -> list[Finding]:
    """What the newest rows show; nothing in a healthy run."""
    history = _History(rows, run)
    looks = (
        *(history.not_finite, history.no_spread, history.no_signal, history.flat, history.format, history.no_entropy),
        *(history.kl, history.mismatch, history.large_updates, history.spikes, history.longer, history.turns_cut),
        history.tokens_untrained,
    )
    return [found for look in looks if (found := look()) is not None]


@dataclass(frozen=True, slots=True)
class _History:
    rows: Rows
    run: Watched

    def not_finite(self) -> Finding | None:
        # A loss that is NaN is hidden by transformers (`logging_nan_inf_filter`); the gradient's norm is not.
        patience = FLOAT16_PATIENCE if self.run.float16 else 1
        broken = [_broken(row) for row in self.rows[-patience:]]
        if len(broken) < patience or not all(broken):
            return None
        return Finding(NOT_FINITE, ", ".join(broken[-1]))

    def no_spread(self) -> Finding | None:
        newest = self.rows[-1:]
        spread = _numbers(newest, "reward_std")
        if not spread or spread[0] >= NO_DIFFERENCE:
            return None
        names = [name for name in newest[0] if fnmatchcase(name, "rewards/*/std")]
        spreads = {name.split("/")[1]: value for name in names for value in _numbers(newest, name)}
        differ = [f"{name} {value:.2f}" for name, value in spreads.items() if value > DIFFERENCE]
        return Finding(NO_SPREAD, f"spread {spread[0]:.2g}, of {', '.join(differ)}") if differ else None

    def no_signal(self) -> Finding | None:
        """Nearly all fail, nearly all succeed, or each question goes one way: three causes, three cures."""
        count = self._rows_of(MANY)
        success = self._last("rollout/success_rate", count)
        silent = self._last("rollout/no_signal", count)
        if not success or not silent or self.no_spread() is not None:
            return None
        rate, share = fmean(success), fmean(silent)
        seen = f"success {rate:.1%}, no signal {share:.0%} in {count * self.run.episodes} episodes"
        if rate <= NEARLY or (share >= ALIKE and rate <= 1 - ENOUGH):
            return Finding(ALL_FAIL, seen)
        if rate >= 1 - NEARLY or (share >= ALIKE and rate >= ENOUGH):
            return Finding(ALL_SUCCEED, seen)
        return Finding(ALL_ALIKE, seen) if share >= ALIKE else None

    def flat(self) -> Finding | None:
        rewards = self._last("reward", LONG)
        if not rewards or not self.run.comparable or self._success() >= ENOUGH:
            return None
        rise, error = trend(rewards)
        return Finding(FLAT, f"{rise:+.3f} ± {error:.3f} over {LONG} logged steps") if rise <= error else None

    def format(self) -> Finding | None:
        parsed = self._values("rewards/reward_format/mean")
        late = self._last("rewards/reward_format/mean", self._rows_of(FEW))
        if not late:
            return None
        count = self._fewest_rows()
        best = max(fmean(parsed[end - count : end]) for end in range(count, len(parsed) + 1))
        now = fmean(late)
        if now < best - FORMAT_FALL or (now < HALF and max(parsed) >= ENOUGH):
            return Finding(FORMAT_LOST, f"{now:.0%} of the turns are actions, and were up to {max(parsed):.0%}")
        return Finding(NO_FORMAT, f"{now:.0%} of the turns are actions") if now < HALF else None

    def no_entropy(self) -> Finding | None:
        entropy, lengths = self._last("entropy", SEVERAL), self._last("completions/mean_length", SEVERAL)
        success = self._success()
        if not entropy or not lengths or success >= ENOUGH:
            return None
        now, at_first = median(entropy), median(self._values("entropy")[:SEVERAL])
        seen = f"{now:.3f} nats a token, {median(lengths):.0f} tokens an episode, success {success:.1%}"
        if now * median(lengths) < COIN:
            return Finding(NO_ENTROPY, seen)
        spent = now < ENTROPY_LEFT * at_first and success < HALF
        return Finding(NO_ENTROPY, f"{seen}; {at_first:.3f} at first") if spent else None

    def kl(self) -> Finding | None:
        kl = self._last("kl", SEVERAL)
        return Finding(KL_RUNS_AWAY, f"{median(kl):.2f} nats a token") if kl and median(kl) > KL_NATS else None

    def mismatch(self) -> Finding | None:
        gaps = self._last("sampling/sampling_logp_difference/mean", SEVERAL)
        ratios = self._last("sampling/importance_sampling_ratio/mean", SEVERAL)
        if not gaps or not ratios:
            return None
        gap, ratio = median(gaps), median(ratios)
        seen = f"mean ratio {ratio:.3f}, mean gap of logprobs {gap:.3f}"
        return Finding(MISMATCH, seen) if gap > GAP_NATS or abs(ratio - 1) > RATIO_OFF else None

    def large_updates(self) -> Finding | None:
        clipped = self._last("clip_ratio/region_mean", SEVERAL)
        if not clipped or median(clipped) <= CLIPPED:
            return None
        return Finding(LARGE_UPDATES, f"{median(clipped):.0%} of the tokens")

    def spikes(self) -> Finding | None:
        # Groups without signal have no gradient; where there are no others, nothing is usual.
        norms = [norm for norm in self._values("grad_norm") if norm > 0][-USUAL_ROWS - SPIKE_ROWS :]
        before, now = norms[:-SPIKE_ROWS], norms[-SPIKE_ROWS:]
        if len(before) < SPIKE_ROWS:
            return None
        spikes = [norm for norm in now if norm > SPIKE * median(before)]
        if len(spikes) < SPIKES_SEEN:
            return None
        return Finding(
            SPIKES, f"{len(spikes)} of {SPIKE_ROWS} steps, up to {max(spikes):.2g}; usual is {median(before):.2g}"
        )

    def longer(self) -> Finding | None:
        count = self._rows_of(MANY)
        lengths, success = self._values("completions/mean_length"), self._values("rollout/success_rate")
        if min(len(lengths), len(success)) < 2 * count:
            return None
        at_first, now = fmean(lengths[: self._fewest_rows()]), fmean(lengths[-count:])
        before, after = fmean(success[:count]), fmean(success[-count:])
        if now < LONGER_BY * at_first or after > before:
            return None
        return Finding(LONGER, f"{at_first:.0f} tokens at first, {now:.0f} now; success {before:.1%} and {after:.1%}")

    def turns_cut(self) -> Finding | None:
        count = self._rows_of(FEW)
        if share := _above(self._last("rollout/out_of_tokens", count), CUT):
            return Finding(OUT_OF_TOKENS, f"{share:.0%} of the episodes")
        share = _above(self._last("completions/clipped_ratio", count), CUT)
        return Finding(TURNS_CUT, f"the last one of {share:.0%} of the episodes") if share else None

    def tokens_untrained(self) -> Finding | None:
        shares = self._last("rollout/trained_token_share", self._rows_of(FEW))
        if not shares or (share := fmean(shares)) >= TRAINED:
            return None
        return Finding(TOKENS_UNTRAINED, f"{share:.0%} of the generated tokens are trained")

    def _values(self, name: str) -> list[float]:
        return _numbers(self.rows, name)

    def _last(self, name: str, count: int) -> list[float]:
        """The last so many values, or none while there are fewer."""
        values = self._values(name)
        return values[-count:] if len(values) >= count else []

    def _rows_of(self, episodes: int) -> int:
        return max(SEVERAL, math.ceil(episodes / self.run.episodes))

    def _fewest_rows(self) -> int:
        """For what a run was like before a fast fall, which a mean of several rows sees too late."""
        return math.ceil(FEW / self.run.episodes)

    def _success(self) -> float:
        """Of late; 0 while that is not known."""
        return fmean(self._last("rollout/success_rate", self._rows_of(FEW)) or [0.0])


def trend(values: Sequence[float]) -> tuple[float, float]:
    """The rise of a straight line through the values, from the first to the last, and its standard error."""
    places = range(len(values))
    slope, start = linear_regression(places, values)
    squares = sum((value - start - slope * place) ** 2 for place, value in enumerate(values))
    middle, span = fmean(places), len(values) - 1
    spread = sum((place - middle) ** 2 for place in places)
    return slope * span, math.sqrt(squares / (len(values) - 2) / spread) * span


def _broken(row: Mapping[str, float | None]) -> list[str]:
    """The numbers of a row that are none; `reward` is none too when every episode failed."""
    names = [name for name in ("grad_norm", "loss", "entropy", "kl") if name in row]
    return [name for name in names if (value := row[name]) is None or not math.isfinite(value)]


def _numbers(rows: Rows, name: str) -> list[float]:
    """A metric, where it was logged and is a number: a batch of several updates logs what it was like once."""
    return [value for row in rows if (value := row.get(name)) is not None and math.isfinite(value)]


def _above(values: Sequence[float], bound: float) -> float:
    """The mean where it reaches the bound, else 0."""
    mean = fmean(values) if values else 0.0
    return mean if mean >= bound else 0.0
