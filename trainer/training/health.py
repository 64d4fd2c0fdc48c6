"""Run health checks: what is wrong with a training run, computed from its metrics.

Guarantees:

1. A healthy run raises no alert. Thresholds lie well outside what healthy runs do (the tiny policy in float32,
   SmolLM2-135M in bfloat16 with a server), and nothing is concluded from a handful of episodes, however few a step has.
2. An alert has its figures, the likely cause, and the fix as flags. docs/tuning.md lists the same words.
3. A metric that a run does not log (`kl` without `--beta`) is not judged.
4. Each check alerts once per run, resumed or not: on the terminal, and in health.jsonl, which the report shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression, median
from typing import Any, TypeGuard

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainer.eval.run_files import Alert, RunFolder
from trainer.flags.configs import SQLEnvConfig
from trainer.training.questions import BatchShape

Rows = Sequence[Mapping[str, float | None]]
"""Logged training steps, the newest last; TRL logs None for a mean over nothing but NaN."""


@dataclass(frozen=True, slots=True)
class Check:
    """A health check: what is wrong when it alerts, the likely cause, and the fix."""

    message: str
    cause: str
    fix: str


NOT_FINITE = Check(
    "non-finite loss or gradient",
    "float16 overflows, or the learning rate is far too large",
    "bfloat16 or float32 instead of `--fp16`; a tenth of `--learning_rate`",
)
NO_SPREAD = Check(
    "rewards differ, but their weighted sum does not",
    "the rewards that differ have weight 0",
    "`--reward_weights 1 0.2 0.2 0.1`",
)
ALL_FAIL = Check(
    "nearly every episode fails",
    "the policy almost never solves these questions",
    "warm up, or more of it; easier data; `--num_generations 16`",
)
ALL_SUCCEED = Check("nearly every episode succeeds", "these questions have become too easy", "harder data; stop")
ZERO_VARIANCE = Check(
    "nearly every group has zero variance",
    "the policy explores too little, so a question is always solved or never",
    "`--temperature 1`; `--num_generations 16`; `--dynamic_sampling 3`",
)
FLAT = Check(
    "the reward has stopped rising",
    "the learning rate is too small, the batch too noisy, or there is no more to learn here",
    "`--learning_rate` times 3; more episodes a step, by `--gradient_accumulation_steps`; other data, or stop",
)
NO_FORMAT = Check(
    "most turns are not valid actions", "the policy does not know the action format", "warm up; `--few_shot 2`"
)
FORMAT_LOST = Check(
    "the action format is being lost",
    "the learning rate is too large, or other rewards outweigh the format's",
    "a third of `--learning_rate`; a larger last number of `--reward_weights`; `--beta 0.02`",
)
NO_ENTROPY = Check(
    "entropy has collapsed",
    "the learning rate is too large or the temperature too low, and exploration has ended before success",
    "a third of `--learning_rate`; `--entropy_coef 0.001`; `--temperature 1`",
)
HIGH_KL = Check(
    "KL divergence is too high",
    "the policy drifts far from the reference",
    "twice the `--beta`; a third of `--learning_rate`",
)
MISMATCH = Check(
    "importance ratios are far from 1",
    "engine and trainer compute differently, or tokens are too old",
    "the same dtype on both sides, `--disable_dropout true`; `--staleness 0`; "
    "`--vllm_importance_sampling_mode token_truncate`",
)
CLIPPED = Check(
    "many tokens are clipped",
    "updates on the same batch go too far",
    "a third of `--learning_rate`; `--num_iterations 1`",
)
SPIKES = Check(
    "the gradient norm spikes",
    "few episodes decide a step, or the learning rate is too large",
    "a third of `--learning_rate`; more episodes a step, by `--gradient_accumulation_steps`; `--max_grad_norm 0.5`",
)
LONGER = Check(
    "episodes grow longer without more success",
    "turns ramble or repeat themselves, and no reward counts against it",
    "a third of `--learning_rate`; a smaller `--step_budget` or `--max_turn_length`; `--beta 0.02`",
)
TURNS_CUT = Check(
    "turns are cut off",
    "a turn needs more tokens than it has, or the policy has forgotten how to end one",
    "`--max_turn_length` times 2; warm up",
)
OUT_OF_TOKENS = Check(
    "episodes run out of tokens",
    "an episode needs more tokens than it has",
    "`--max_completion_length` times 2; a smaller `--max_turn_length`",
)
MASKED = Check(
    "many generated tokens are masked",
    "a row or the context has no room for every turn, often because of reasoning, and the oldest turns are dropped",
    "`--max_completion_length` times 2; a larger `sqlenv inference --max_model_len`; "
    "a smaller `--step_budget` or `--max_thinking_length`; `--chat_template_kwargs '{\"enable_thinking\": false}'`",
)
CHECKS = [value for value in list(globals().values()) if isinstance(value, Check)]
"""All, in the order of the documents."""

SEVERAL = 5
"""Rows in a mean or a median, at least: one outlier is no trend."""
FEW, MANY = 64, 256
"""Episodes in a rate. SmolLM2-135M begins GRPO with 4.7% right: at most one of 256 is right with a chance of 1 in
16,000. By the rule of three, none of 256 means fewer than 1.2%."""
NEARLY = 0.005
"""At 0.5% success, or 99.5%, one group of 8 in 25 is mixed, and correctness has a gradient in no other (DAPO, Yu et al.
2025, arXiv:2503.14476, draws questions until all groups have)."""
HIGH = 0.9
"""Success from which neither a flat reward nor low entropy is a fault; a share of valid actions that shows that the
policy knows the format; a share of zero-variance groups that leaves next to no gradient (0.68 at 4.7% success)."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What the checks have to know of a run to read its metrics."""

    episodes: int
    """In a row."""
    float16: bool = False
    """Gradients are scaled, and steps skipped where they overflow."""
    comparable: bool = True
    """Rewards of early and late steps are: neither the questions nor the weights follow what the policy can do."""

    @classmethod
    def of(cls, config: SQLEnvConfig, ranks: int) -> RunInfo:
        """What the flags say."""
        shape = BatchShape.of(config)
        comparable = config.reward_weighting == "fixed"
        return cls(shape.rows * shape.batches_per_step * ranks, config.fp16, comparable)


def run_checks(rows: Rows, run: RunInfo) -> list[tuple[Check, str]]:
    """Return the checks that alert on the newest rows, with their figures. Pure."""
    history = _History(rows, run)
    return [*history.numbers(), *history.rewards(), *history.policy(), *history.episodes()]


@dataclass(frozen=True, slots=True)
class _History:
    """The rows so far; each method runs the checks of one theme."""

    rows: Rows
    run: RunInfo

    def numbers(self) -> Iterator[tuple[Check, str]]:
        # transformers hides a NaN loss (`logging_nan_inf_filter`), but not the gradient's norm. float16's loss scale
        # begins far too large and is halved at each overflow, so a few such rows are normal there.
        patience = SEVERAL if self.run.float16 else 1
        names = ("grad_norm", "loss", "entropy", "kl")
        broken = [[n for n in names if n in row and not _finite(row[n])] for row in self.rows[-patience:]]
        if len(broken) == patience and all(broken):
            yield NOT_FINITE, ", ".join(broken[-1])
        # SmolLM2 in bfloat16 with a float32 server: gap 0.03, mean ratio 0.9986 to 1.0014; in float32, 1e-5. Masking
        # of whole sequences, TRL's default, shows in the mean too.
        gap = self.middle("sampling/sampling_logp_difference/mean")
        ratio = self.middle("sampling/importance_sampling_ratio/mean")
        if gap is not None and ratio is not None and (gap > 0.1 or abs(ratio - 1) > 0.1):
            yield MISMATCH, f"mean ratio {ratio:.3f}, mean gap of logprobs {gap:.3f}"
        # Clipped tokens have no gradient any more. With one update per batch there are none.
        clipped = self.middle("clip_ratio/region_mean")
        if clipped is not None and clipped > 0.25:
            yield CLIPPED, f"{clipped:.0%} of the tokens"
        # The demo's norms stay within 3.5 medians; one spike alone is clipped and does no harm. Zero-variance groups
        # have no gradient, and where there are no others, there is no usual norm.
        norms = [norm for norm in self.values("grad_norm") if norm > 0][-60:]
        if len(norms) >= 20:
            usual = median(norms[:-10])
            spikes = [norm for norm in norms[-10:] if norm > 10 * usual]
            if len(spikes) >= 2:
                yield SPIKES, f"{len(spikes)} of 10 steps, up to {max(spikes):.2g}; the median before is {usual:.2g}"

    def rewards(self) -> Iterator[tuple[Check, str]]:
        newest = self.rows[-1] if self.rows else {}
        spread = newest.get("reward_std")
        stds = {n.split("/")[1]: v for n, v in newest.items() if n.startswith("rewards/") and n.endswith("/std")}
        differ = [f"{name} {value:.2f}" for name, value in stds.items() if _finite(value) and value > 0.01]
        # TRL adds 1e-4 to the spread before it divides by it; a spread of 0.01 survives any sensible weight.
        unweighted = _finite(spread) and spread < 1e-4 and bool(differ)
        if unweighted:
            yield NO_SPREAD, f"spread {spread:.2g}, of {', '.join(differ)}"
        success, silent = self.rate("rollout/success_rate", MANY), self.rate("rollout/no_signal", MANY)
        if success is not None and silent is not None and not unweighted:
            episodes = self.rows_of(MANY) * self.run.episodes
            figures = f"success {success:.1%}, zero-variance groups {silent:.0%}, in {episodes} episodes"
            if success <= NEARLY or (silent >= HIGH and success <= 1 - HIGH):
                yield ALL_FAIL, figures
            elif success >= 1 - NEARLY or (silent >= HIGH and success >= HIGH):
                yield ALL_SUCCEED, figures
            elif silent >= HIGH:
                yield ZERO_VARIANCE, figures
        # 100 rows are half of what a run takes by default. The demo's steps of 64 episodes scatter by 0.11, which gives
        # a rise over 100 rows to within 0.04; it rises by 0.77 in 60.
        rewards = self.last("reward", 100)
        if rewards and self.run.comparable and self.success < HIGH:
            rise, error = trend(rewards)
            if rise <= error:
                yield FLAT, f"{rise:+.3f} ± {error:.3f} over 100 logged steps"

    def policy(self) -> Iterator[tuple[Check, str]]:
        shares, now = self.values("rewards/reward_format/mean"), self.rate("rewards/reward_format/mean", FEW)
        if now is not None:
            # The best of means over fewer rows than a trend has, which sees a fast fall in time. SmolLM2's share
            # spreads by up to 0.36 over episodes, so of 64 it is known to within 0.045, and 0.3 is a fall.
            count = self.fewest_rows
            best = max(fmean(shares[end - count : end]) for end in range(count, len(shares) + 1))
            if now < best - 0.3 or (now < 0.5 and max(shares) >= HIGH):
                yield FORMAT_LOST, f"{now:.0%} of the turns are actions, and were up to {max(shares):.0%}"
            elif now < 0.5:
                yield NO_FORMAT, f"{now:.0%} of the turns are actions"
        entropy, length = self.middle("entropy"), self.middle("completions/mean_length")
        if entropy is not None and length is not None and self.success < HIGH:
            first = median(self.values("entropy")[:SEVERAL])
            figures = f"{entropy:.3f} nats per token, {length:.0f} tokens per episode, success {self.success:.1%}"
            # Less than one toss of a coin per episode: eight episodes are two different ones at most. The demo ends
            # with twice that at 94% success, SmolLM2 has a hundred times as much.
            if entropy * length < math.log(2):
                yield NO_ENTROPY, figures
            # Healthy runs spend most of their entropy on success (Cui et al. 2025, arXiv:2505.22617: 73% for 76% of
            # the gain); the demo has 11% left at 94%. Spent before half of the questions are right, it is wasted.
            elif entropy < 0.1 * first and self.success < 0.5:
                yield NO_ENTROPY, f"{figures}; {first:.3f} at first"
        # At 1 nat per token the reference finds it e times less likely; the tiny policy's stays below 0.2 as it learns.
        # The estimator has heavy tails, hence the median.
        kl = self.middle("kl")
        if kl is not None and kl > 1.0:
            yield HIGH_KL, f"{kl:.2f} nats per token"

    def episodes(self) -> Iterator[tuple[Check, str]]:
        # Three times as long. The demo's episodes become twice as long as they learn to look before they answer.
        count = self.rows_of(MANY)
        lengths, success = self.values("completions/mean_length"), self.values("rollout/success_rate")
        if min(len(lengths), len(success)) >= 2 * count:
            first, now = fmean(lengths[: self.fewest_rows]), fmean(lengths[-count:])
            before, after = fmean(success[:count]), fmean(success[-count:])
            if now >= 3 * first and after <= before:
                yield LONGER, f"{first:.0f} tokens at first, {now:.0f} now; success {before:.1%} and {after:.1%}"
        # In a group of eight, one or two are judged by where they were cut, and not by what they did.
        out = self.rate("rollout/out_of_tokens", FEW) or 0.0
        cut = self.rate("completions/clipped_ratio", FEW) or 0.0
        if out >= 0.2:
            yield OUT_OF_TOKENS, f"{out:.0%} of the episodes"
        elif cut >= 0.2:
            yield TURNS_CUT, f"the last turn of {cut:.0%} of the episodes"
        # What is missing are the first turns, in which the policy explores: a fifth of an episode of 15 is its first
        # three. Without reasoning all tokens are trained; with Qwen3's, 512 tokens in each of 9 turns, less than half.
        trained = self.rate("rollout/trained_token_share", FEW)
        if trained is not None and trained < 0.8:
            yield MASKED, f"{trained:.0%} of the generated tokens are trained"

    def values(self, name: str) -> list[float]:
        """A metric where it was logged and is finite: a batch of several updates logs its rollout metrics once."""
        return [value for row in self.rows if _finite(value := row.get(name))]

    def last(self, name: str, count: int) -> list[float]:
        """The last `count` values; empty while there are fewer."""
        values = self.values(name)
        return values[-count:] if len(values) >= count else []

    def middle(self, name: str) -> float | None:
        """The median of the last rows."""
        return median(values) if (values := self.last(name, SEVERAL)) else None

    def rate(self, name: str, episodes: int) -> float | None:
        """The mean over the last so many episodes."""
        return fmean(values) if (values := self.last(name, self.rows_of(episodes))) else None

    def rows_of(self, episodes: int) -> int:
        return max(SEVERAL, math.ceil(episodes / self.run.episodes))

    @property
    def fewest_rows(self) -> int:
        return math.ceil(FEW / self.run.episodes)

    @property
    def success(self) -> float:
        """Recent success; 0 while it is unknown."""
        return self.rate("rollout/success_rate", FEW) or 0.0


def trend(values: Sequence[float]) -> tuple[float, float]:
    """The rise of a straight line through the values, from the first to the last, and its standard error."""
    places = range(len(values))
    slope, start = linear_regression(places, values)
    squares = sum((value - start - slope * place) ** 2 for place, value in enumerate(values))
    middle, span = fmean(places), len(values) - 1
    spread = sum((place - middle) ** 2 for place in places)
    return slope * span, math.sqrt(squares / (len(values) - 2) / spread) * span


def _finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


class HealthMonitor(TrainerCallback):  # type: ignore[misc]  # transformers carries no types
    """Checks each logged step. It comes after the run's log, which cuts off the steps that are taken again."""

    def __init__(self, folder: RunFolder, run: RunInfo, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._run = run
        self._say = say
        self._rows: list[Mapping[str, float | None]] = []
        self._alerted: set[str] = set()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Load what the run has logged and alerted."""
        self._rows = [row for row in self._folder.metrics() if "loss" in row]
        self._alerted = {alert.message for alert in self._folder.alerts()}

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check the steps so far; evaluations and the closing summary are no steps."""
        if "loss" not in (logs := kwargs.get("logs") or {}):
            return
        self._rows.append(dict(logs))
        for check, figures in run_checks(self._rows, self._run):
            if check.message not in self._alerted:
                self._alerted.add(check.message)
                alert = Alert(state.global_step, check.message, figures, check.cause, check.fix)
                self._folder.add_alert(alert)
                self._say(
                    f"warning at step {alert.step}: {alert.message} ({figures})\n"
                    f"    likely cause: {alert.cause}\n    fix: {alert.fix.replace('`', '')}"
                )
