"""What `sqlenv simulate` says: tables, a plan in sentences, one JSON object."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from trainer.simulation.figures import ADVICE, USED_UP, Figures, Quantiles
from trainer.simulation.rehearsal import Deployment
from trainer.simulation.sizing import Plan

MILLISECONDS = 1e3


def tables(found: Figures, deployment: Deployment) -> list[RenderableType]:
    """The figures as two tables and a sentence."""
    times = Table(title="times in seconds", title_justify="left")
    for name in ("", "mean", "p50", "p95", "p99", "max"):
        times.add_column(name, justify="right" if name else "left")
    for label, quantiles in (
        ("episode", found.episode_s),
        ("turn", found.turn_s),
        ("generation", found.generation_s),
        ("environment", found.environment_s),
        ("client's lag", found.lag_s),
    ):
        times.add_row(label, *_cells(quantiles))
    use = Table(title="used, of what there is", title_justify="left")
    use.add_column("")
    use.add_column("share", justify="right")
    use.add_column("of")
    of = {
        "engine": f"{deployment.replicas} replicas, {deployment.server.max_sequences} sequences each",
        "front end": "what takes the replicas' requests in",
        "environments": f"{deployment.environments.servers} servers, {deployment.environments.workers} workers each",
        "client": f"one process; {MILLISECONDS * found.client_s_per_turn:.2f} ms of work for a turn",
        "concurrency": f"{deployment.max_concurrency} episodes in flight; {found.in_flight:.0f} on the average",
    }
    for name, share in sorted(found.used.items(), key=lambda item: -item[1]):
        style = "bold" if share >= USED_UP and name != "concurrency" else ""
        use.add_row(name, f"{share:.0%}", of[name], style=style)
    lines = (
        f"{found.episodes} episodes of {found.turns:.1f} turns in {found.seconds:.1f} s, {found.failed} failed\n"
        f"{found.episodes_per_second:.2f} episodes a second in all, {found.steady_episodes_per_second:.2f} in the "
        f"middle; {found.turns_per_second:.1f} turns, {found.tokens_per_second:.0f} tokens a second"
    )
    return [lines, times, use, f"first: {found.first} ({ADVICE[found.first]})"]


def plan_text(plan: Plan) -> str:
    """The plan in sentences."""
    deployment, found = plan.deployment, plan.figures
    clients = "one trainer rank" if plan.clients == 1 else f"{plan.clients} trainer ranks"
    return (
        f"for {plan.target:g} episodes a second: {deployment.replicas} inference replicas, "
        f"{deployment.environments.servers} environment servers of {deployment.environments.workers} workers, "
        f"{deployment.max_concurrency} episodes in flight (--max_concurrency, over all ranks), {clients}\n"
        f"rehearsed: {found.steady_episodes_per_second:.2f} a second; engine {found.used['engine']:.0%} used, "
        f"environments {found.used.get('environments', 0.0):.0%}; an episode takes {found.episode_s.mean:.1f} s, "
        f"99% of them at most {found.episode_s.p99:.1f} s"
    )


def summary(source: str, deployment: Deployment, found: Figures, plan: Plan | None) -> dict[str, Any]:
    """All of it as JSON."""
    said: dict[str, Any] = {"source": source, "deployment": _deployment(deployment), **found.as_json()}
    if plan is not None:
        said["plan"] = {
            "target": plan.target,
            "trainer_ranks": plan.clients,
            "deployment": _deployment(plan.deployment),
            **plan.figures.as_json(),
        }
    return said


def _deployment(deployment: Deployment) -> dict[str, Any]:
    """A deployment without infinities, which JSON has none of."""
    faults = {name: value for name, value in asdict(deployment.faults).items() if value != float("inf")}
    return {**asdict(deployment), "faults": faults}


def _cells(quantiles: Quantiles) -> list[str]:
    found = (quantiles.mean, quantiles.p50, quantiles.p95, quantiles.p99, quantiles.max)
    return [f"{value:.3f}" if value < 10 else f"{value:.1f}" for value in found]
