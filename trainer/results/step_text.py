"""What the terminal says about a training step: two lines, of what experts watch. Pure: no I/O, no clock.

The first line is about the episodes, the second about the update and the time. Lines break between two numbers where
the terminal is narrow. What was not measured is left out. "reward" is the environment's, as in evaluations and in
`sqlenv play`; TRL calls so what it trains on, which is the weighted reward here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WIDTH = 132
"""Columns that both lines fit into, unless there is a KL term or a slow push beside all else."""
GAP = "  "
INDENT = "    "
RATIO = "sampling/importance_sampling_ratio"
ROLLOUT_PARTS = ("queue", "generation", "environment", "judging", "client")
SLOW_PUSH = 0.02
"""Share of a step's time from which on a push is worth a word."""

Metrics = Mapping[str, float]


def step_text(step: int, steps: int, metrics: Metrics, left: float, width: int = WIDTH) -> str:
    """Describe a step in lines of at most `width` columns; `left` is what training has left, in seconds."""
    head = f"step {step:>4}/{steps}"
    rollout = [*_episodes(metrics), f"{clock(left)} left"]
    update = [*_update(metrics), *_times(metrics)]
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
        _some(metrics, "reward {:+.2f}", "rollout/reward"),
        _some(metrics, "weighted {:+.3f}", "reward") + spread,
        _some(metrics, "no signal {:.0%}", "rollout/no_signal"),
        _some(metrics, "{:4.1f} steps", "rollout/steps"),
        _some(metrics, "{:.0f} tokens", "completions/mean_length") + clipped,
        _some(metrics, "failed {:.0f}", "rollout/failed") if metrics.get("rollout/failed") else "",
        _some(metrics, "replaced {:.0f}", "rollout/replaced") if metrics.get("rollout/replaced") else "",
    ]
    return [word for word in words if word]


def _update(metrics: Metrics) -> list[str]:
    words = [
        _some(metrics, "kl {:.4f}", "kl"),
        _some(metrics, "entropy {:.2f}", "entropy"),
        _some(metrics, "ratio {:.2f}-{:.2f}", f"{RATIO}/min", f"{RATIO}/max"),
        _some(metrics, "gap {:.0e}", "sampling/sampling_logp_difference/mean"),
        _some(metrics, "grad {:.2g}", "grad_norm")
        + _some(metrics, " ({:.0%} correctness)", "gradient_share/correctness"),
        _some(metrics, "lr {:.1e}", "learning_rate"),
    ]
    return [word for word in words if word]


def _some(metrics: Metrics, text: str, *names: str) -> str:
    """The text with the numbers, or nothing where one was not measured; TRL logs None for a mean over nothing."""
    values = [metrics.get(name) for name in names]
    return "" if None in values else text.format(*values)


def _times(metrics: Metrics) -> list[str]:
    """What the step waited for, and what episodes waited for most, or how long they waited for the step."""
    if "time/rollout" not in metrics:
        return []
    rollout, push, training = (metrics[f"time/{name}"] for name in ("rollout", "push", "training"))
    words = [f"rollout {_seconds(rollout)}"]
    if rollout > 0:
        seconds, longest = max((metrics[f"time/{part}"], part) for part in ROLLOUT_PARTS)
        words[0] += f" ({seconds / rollout:.0%} {longest})"
    if metrics.get("rollout/idle_seconds"):
        words.append(f"ready {_seconds(metrics['rollout/idle_seconds'])} early")
    if push > SLOW_PUSH * (rollout + push + training):
        words.append(f"push {_seconds(push)}")
    return [", ".join([*words, f"train {_seconds(training)}"])]


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


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
