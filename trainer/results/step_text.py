"""What the terminal says about a training step: two lines, of what experts watch. Pure: no I/O, no clock.

The first line is about the episodes, the second about the update. Lines break between two numbers where the terminal is
narrow. What was not measured is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH = 110
"""Columns that both lines fit into, whatever is measured."""
GAP = "  "
INDENT = "    "
RATIO = "sampling/importance_sampling_ratio"

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things take, in seconds: what is left of training, and one step."""

    left: float
    step: float
    """What TRL measures as one step, rollouts included; NaN where it was not."""
    rollout: float


def step_text(step: int, steps: int, metrics: Metrics, pace: Pace, width: int = WIDTH) -> str:
    """Describe a step in lines of at most `width` columns."""
    head = f"step {step:>4}/{steps}"
    rollout = [*_episodes(metrics), f"{clock(pace.left)} left"]
    update = [*_update(metrics), *_seconds(pace)]
    return "\n".join(_lines(head, rollout, width) + _lines(INDENT, update, width))


def clock(seconds: float) -> str:
    """Minutes and seconds, or hours and minutes."""
    minutes = int(seconds) // 60
    return f"{minutes}:{int(seconds) % 60:02d}" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}"


def _episodes(metrics: Metrics) -> list[str]:
    spread = _some(metrics, "±{:.2f}", "reward_std")
    clipped = _some(metrics, ", {:.0%} clipped", "completions/clipped_ratio")
    words = [
        _some(metrics, "success {:5.1%}", "rollout/success_rate"),
        _some(metrics, "reward {:+.3f}", "reward") + spread,
        _some(metrics, "no signal {:.0%}", "frac_reward_zero_std"),
        _some(metrics, "steps {:4.1f}", "rollout/steps"),
        _some(metrics, "tokens {:.0f}", "completions/mean_length") + clipped,
        _some(metrics, "failed {:.0f}", "rollout/failed") if metrics.get("rollout/failed") else "",
    ]
    return [word for word in words if word]


def _update(metrics: Metrics) -> list[str]:
    words = [
        _some(metrics, "kl {:.4f}", "kl"),
        _some(metrics, "entropy {:.2f}", "entropy"),
        _some(metrics, "ratio {:.2f}-{:.2f}", f"{RATIO}/min", f"{RATIO}/max"),
        _some(metrics, "gap {:.0e}", "sampling/sampling_logp_difference/mean"),
        _some(metrics, "grad {:.2g}", "grad_norm"),
        _some(metrics, "lr {:.1e}", "learning_rate"),
    ]
    return [word for word in words if word]


def _some(metrics: Metrics, text: str, *names: str) -> str:
    """The text with the numbers, or nothing where one was not measured; TRL logs None for a mean over nothing."""
    values = [metrics.get(name) for name in names]
    return "" if None in values else text.format(*values)


def _seconds(pace: Pace) -> list[str]:
    if math.isnan(pace.step):
        return []
    texts = [f"{s:.1f} s" if s < 10 else f"{s:.0f} s" for s in (pace.rollout, pace.step - pace.rollout)]
    return [f"rollout {texts[0]}, train {texts[1]}"]


def _lines(start: str, words: Sequence[str], width: int) -> list[str]:
    """Put words one after the other, the first line beginning with `start`, the others indented."""
    lines = [start]
    for word in words:
        gap = GAP if lines[-1].strip() else ""
        if gap and len(lines[-1] + gap + word) > width:
            lines.append(INDENT)
            gap = ""
        lines[-1] += gap + word
    return [line for line in lines if line.strip()]
