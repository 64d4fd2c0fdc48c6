"""Run health checks: what each alerts on, and that neither ordinary noise nor a recorded healthy run does."""

from __future__ import annotations

import json
import math
import random
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TrainerControl, TrainerState, TrainingArguments

from trainer.eval.metrics import meaning
from trainer.eval.run_files import RunFolder
from trainer.training import health
from trainer.training.arguments import parse_train
from trainer.training.health import CHECKS, Check, HealthMonitor, RunInfo, run_checks, trend

Row = dict[str, float | None]
RUN = RunInfo(episodes=64)
SMALL = RunInfo(episodes=8)
HEALTHY: Row = {
    "loss": 0.1,
    "grad_norm": 0.3,
    "reward": 0.4,
    "reward_std": 0.4,
    "rollout/no_signal": 0.1,
    "rewards/reward_correctness/std": 0.4,
    "rewards/reward_format/mean": 0.95,
    "rewards/reward_format/std": 0.1,
    "rollout/success_rate": 0.3,
    "rollout/out_of_tokens": 0.0,
    "rollout/truncated": 0.0,
    "rollout/trained_token_share": 1.0,
    "completions/mean_length": 25.0,
    "completions/clipped_ratio": 0.0,
    "sampling/sampling_logp_difference/mean": 0.02,
    "sampling/importance_sampling_ratio/mean": 1.001,
    "clip_ratio/region_mean": 0.0,
    "entropy": 0.5,
    "kl": 0.1,
}


def rows(count: int, **changes: float | Sequence[float] | None) -> list[Row]:
    """Rows of a healthy run, but for some metrics; `__` stands for a slash, a sequence has one value for each row."""
    made = [dict(HEALTHY) for _ in range(count)]
    for name, value in changes.items():
        for place, row in enumerate(made):
            row[name.replace("__", "/")] = value[place] if isinstance(value, Sequence) else value
    return made


def alerts(made: Sequence[Mapping[str, float | None]], run: RunInfo = RUN) -> list[Check]:
    return [check for check, _ in run_checks(made, run)]


def test_nothing_is_concluded_from_nothing() -> None:
    assert alerts([]) == []
    assert alerts([{"loss": 0.1}] * 200) == [], "what is not logged is not judged"


ALERTS: list[tuple[Check, list[Row]]] = [
    (health.NOT_FINITE, rows(1, grad_norm=math.nan)),
    (health.NOT_FINITE, rows(1, loss=math.inf)),
    (health.NOT_FINITE, rows(1, entropy=None)),
    (health.NO_SPREAD, rows(1, reward_std=0.0)),
    (health.ALL_FAIL, rows(5, rollout__success_rate=0.0)),
    (health.ALL_FAIL, rows(5, rollout__success_rate=0.05, rollout__no_signal=0.95)),
    (health.ALL_SUCCEED, rows(5, rollout__success_rate=1.0)),
    (health.ALL_SUCCEED, rows(5, rollout__success_rate=0.95, rollout__no_signal=0.95)),
    (health.ZERO_VARIANCE, rows(5, rollout__no_signal=0.95)),
    (health.FLAT, rows(100, reward=[0.4 + 0.1 * (-1) ** step for step in range(100)])),
    (health.NO_FORMAT, rows(5, rewards__reward_format__mean=0.07)),
    (health.FORMAT_LOST, rows(20, rewards__reward_format__mean=[0.95] * 10 + [0.62] * 10)),
    (health.FORMAT_LOST, rows(20, rewards__reward_format__mean=[0.95] * 10 + [0.1] * 10)),
    (health.FORMAT_LOST, rows(5, rewards__reward_format__mean=[0.95] + [0.1] * 4)),
    (health.NO_ENTROPY, rows(5, entropy=0.02)),
    (health.NO_ENTROPY, rows(20, entropy=[1.0] * 10 + [0.05] * 10)),
    (health.HIGH_KL, rows(5, kl=1.5)),
    (health.MISMATCH, rows(5, sampling__sampling_logp_difference__mean=0.2)),
    (health.MISMATCH, rows(5, sampling__importance_sampling_ratio__mean=0.6)),
    (health.CLIPPED, rows(6, clip_ratio__region_mean=[0.0, 0.4, 0.5, 0.0, 0.4, 0.5])),
    (health.SPIKES, rows(20, grad_norm=[0.3] * 15 + [4.0, 0.3, 0.3, 0.3, 9.0])),
    (health.LONGER, rows(20, completions__mean_length=[25.0] * 5 + [50.0] * 10 + [90.0] * 5)),
    (health.TURNS_CUT, rows(5, completions__clipped_ratio=0.25)),
    (health.OUT_OF_TOKENS, rows(5, rollout__out_of_tokens=0.25, completions__clipped_ratio=0.25)),
    (health.MASKED, rows(5, rollout__trained_token_share=0.7)),
]


@pytest.mark.parametrize(("check", "made"), ALERTS)
def test_each_check_alerts_alone(check: Check, made: list[Row]) -> None:
    assert check in alerts(made)
    assert set(alerts(made)) <= {check, health.FLAT}


def test_every_check_has_a_case() -> None:
    assert {check for check, _ in ALERTS} == set(CHECKS)


NEARLY: list[list[Row]] = [
    rows(4, rollout__success_rate=0.0),
    rows(5, rollout__success_rate=0.047, rollout__no_signal=0.68),
    rows(5, rollout__success_rate=0.97),
    rows(5, rollout__no_signal=0.8),
    rows(5, reward_std=0.0076),
    rows(5, rewards__reward_format__mean=[0.95, 0.3, 0.95, 0.9, 0.9]),
    rows(5, entropy=0.06, rollout__success_rate=0.94),
    rows(20, entropy=[1.0] * 10 + [0.05] * 10, rollout__success_rate=0.6),
    rows(5, kl=[0.1, 0.1, 40.0, 0.1, 0.1]),
    rows(6, clip_ratio__region_mean=[0.0, 0.4, 0.0, 0.0, 0.4, 0.0]),
    rows(20, grad_norm=[0.3] * 19 + [50.0]),
    rows(20, grad_norm=[0.3] * 10 + [1.0] * 10),
    rows(20, completions__mean_length=[15.0] * 10 + [31.0] * 10),
    rows(20, completions__mean_length=[25.0] * 10 + [90.0] * 10, rollout__success_rate=[0.1] * 10 + [0.3] * 10),
    rows(
        5,
        completions__clipped_ratio=0.1,
        rollout__out_of_tokens=0.1,
        rollout__truncated=6.0,
        rollout__trained_token_share=0.9,
    ),
]


@pytest.mark.parametrize("made", NEARLY)
def test_near_misses_raise_no_alert(made: list[Row]) -> None:
    assert alerts(made) == []


def test_float16_may_overflow_while_it_finds_its_scale() -> None:
    float16 = RunInfo(episodes=64, float16=True)
    broken = rows(9, grad_norm=[math.inf] * 4 + [0.3] + [math.nan] * 4)
    assert alerts(broken, float16) == []
    assert alerts([*broken, *rows(1, grad_norm=math.inf)], float16) == [health.NOT_FINITE]
    assert alerts(broken) == [health.NOT_FINITE]


def test_a_reward_that_all_episodes_got_alike_is_no_matter_of_weights() -> None:
    alike = rows(5, reward_std=0.0, rewards__reward_correctness__std=0.0, rewards__reward_format__std=0.0)
    assert alerts(alike) == []
    unweighted = rows(5, reward_std=0.0, rollout__no_signal=1.0, rollout__success_rate=0.05)
    assert alerts(unweighted) == [health.NO_SPREAD], "it does not look like a policy that fails"


def test_a_reward_is_flat_only_where_it_could_rise() -> None:
    assert alerts(rows(99, reward=0.4)) == []
    assert alerts(rows(100, reward=0.4, rollout__success_rate=0.95)) == []
    assert alerts(rows(100, reward=0.4), RunInfo(episodes=64, comparable=False)) == []
    assert alerts(rows(100, reward=[0.4 - 0.002 * step for step in range(100)])) == [health.FLAT]


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=40), st.floats(-1, 1), st.floats(-1, 1))
def test_a_trend_is_that_of_the_line(noise: list[float], start: float, slope: float) -> None:
    line = [start + slope * place for place in range(len(noise))]
    rise, error = trend(line)
    assert rise == pytest.approx(slope * (len(noise) - 1), abs=1e-9)
    assert error == pytest.approx(0, abs=1e-6)
    rise, error = trend([value + other for value, other in zip(line, noise, strict=True)])
    mirrored, same = trend([-value - other for value, other in zip(line, noise, strict=True)])
    assert (mirrored, same) == pytest.approx((-rise, error), abs=1e-9)


def learning(seed: int, episodes: int, steps: int) -> list[Row]:
    """A made-up healthy run: success rises from 5% to 70%, and all else scatters as it does in real ones."""
    draw = random.Random(seed)
    made = []
    for step in range(steps):
        right = 0.05 + 0.65 * step / steps
        rate = sum(draw.random() < right for _ in range(episodes)) / episodes
        scatter = 1 / math.sqrt(episodes)
        made.append(
            HEALTHY
            | {
                "grad_norm": draw.lognormvariate(math.log(0.3), 0.4),
                "reward": rate + draw.gauss(0.15, 0.3 * scatter),
                "rollout/success_rate": rate,
                "rollout/no_signal": sum(draw.random() < 0.4 for _ in range(8)) / 8,
                "rewards/reward_format/mean": min(1.0, draw.gauss(0.9, 0.36 * scatter)),
                "completions/mean_length": (25 + 25 * step / steps) * draw.lognormvariate(0, scatter),
                "completions/clipped_ratio": sum(draw.random() < 0.02 for _ in range(episodes)) / episodes,
                "sampling/sampling_logp_difference/mean": draw.uniform(0.02, 0.04),
                "sampling/importance_sampling_ratio/mean": draw.gauss(1, 0.002),
                "entropy": (1.2 - step / steps) * draw.uniform(0.8, 1.2),
                "kl": draw.lognormvariate(math.log(0.1), 0.7),
            }
        )
    return made


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000), st.sampled_from([8, 16, 64]))
def test_a_run_that_learns_is_silent_at_every_step(seed: int, episodes: int) -> None:
    made = learning(seed, episodes, 120)
    assert [(end, found) for end in range(1, 121) if (found := run_checks(made[:end], RunInfo(episodes)))] == []


def test_a_recorded_healthy_run_is_silent() -> None:
    """All 60 steps of `sqlenv train --config configs/tiny.yaml`, what is judged of them."""
    recorded = json.loads((Path(__file__).parent / "healthy_run.json").read_text(encoding="utf-8"))
    made = [dict(zip(recorded["metrics"], row, strict=True)) for row in recorded["rows"]]
    assert [(end, found) for end in range(1, len(made) + 1) if (found := run_checks(made[:end], RUN))] == []


def test_what_is_read_is_logged() -> None:
    assert [name for name in HEALTHY if not meaning(name)] == []


def test_the_documents_have_the_same_words() -> None:
    page = Path(__file__).parents[3] / "docs" / "tuning.md"
    table = [f"| {check.message} | {check.cause} | {check.fix} |" for check in CHECKS]
    assert "\n".join(["| alert | likely cause | fix |", "|---|---|---|", *table]) in page.read_text("utf-8")


def test_fixes_are_flags(tmp_path: Path) -> None:
    """Each one that comes with a value is taken as it is; the others at least exist."""
    quoted = [part for check in CHECKS for part in re.findall(r"`(--[^`]*)`", check.fix)]
    assert len(quoted) > len(CHECKS)
    cpu = ["--model_name_or_path", "x", "--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false"]
    for flag, *values in map(shlex.split, quoted):
        arguments = parse_train([*cpu, flag, *values] if values else cpu)
        assert any(hasattr(kind, flag.removeprefix("--")) for kind in arguments), flag


FAILING = {"loss": 0.1, "rollout/success_rate": 0.0, "rollout/no_signal": 0.875}


class Run:
    """A run that logs, is monitored, and resumes from its folder."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder.create(path, {})
        self.said: list[str] = []
        self._arguments = TrainingArguments(output_dir=str(path), use_cpu=True, bf16=False)
        self.begin()

    def begin(self) -> None:
        self._monitor = HealthMonitor(self.folder, RUN, self.said.append)
        self._monitor.on_train_begin(self._arguments, TrainerState(), TrainerControl())

    def log(self, step: int, logs: dict[str, float | None]) -> None:
        with self.folder.metrics_writer() as writer:
            writer.write({"step": step, **logs})
        self._monitor.on_log(self._arguments, TrainerState(global_step=step), TrainerControl(), logs=logs)


def test_an_alert_is_shown_once_and_kept_also_when_the_run_is_resumed(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    for step in range(1, 4):
        run.log(step, {"eval_success_rate": 0.0, "rollout/success_rate": 0.0, "rollout/no_signal": 1.0})  # no step
        run.log(step, {**FAILING})
    run.begin()
    run.log(4, {**FAILING})
    assert run.said == []
    for step in (5, 6):
        run.log(step, {**FAILING})
    run.begin()
    run.log(7, {**FAILING})
    run.log(8, {**FAILING, "grad_norm": float("nan")})
    run.log(9, {"train_loss": float("nan"), "grad_norm": float("nan")})
    kept = run.folder.alerts()
    assert [(alert.step, alert.message) for alert in kept] == [
        (5, health.ALL_FAIL.message), (8, health.NOT_FINITE.message)
    ]  # fmt: skip
    assert [alert.fix for alert in kept] == [health.ALL_FAIL.fix, health.NOT_FINITE.fix]
    for said, alert in zip(run.said, kept, strict=True):
        assert said.startswith(f"warning at step {alert.step}: {alert.message} ({alert.figures})\n")
