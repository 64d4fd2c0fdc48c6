"""Deployments to begin with, by name: how fast a server is, and how long the turns of its policy are.

Each says where its numbers come from. One that was not measured says so: calibrate it (`--like`, `--measure`) before
money depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from inference.simulated.profile import ServerProfile
from trainer.simulation.scripts import Lengths


@dataclass(frozen=True, slots=True)
class Preset:
    """A server for a policy, and the episodes of that policy."""

    server: ServerProfile
    lengths: Lengths
    source: str


PRESETS = {
    "tiny-cpu": Preset(
        ServerProfile(
            max_sequences=256,
            step_s=0.0056,
            step_s_per_sequence=0.00061,
            prefill_tokens_per_s=20_000.0,
            network_s=0.004,
        ),
        Lengths(turns=3.5, turn_tokens=14, reply_tokens=40, question_tokens=30),
        "a tiny Qwen3 on vLLM's CPU engine, two cores: its steps are measured (179 tokens a second alone, 811 with 8 "
        "requests, 1,289 with 32); reading, the network and the lengths are guesses",
    ),
    "smollm2-cpu": Preset(
        ServerProfile(
            max_sequences=256,
            step_s=0.06,
            step_s_per_sequence=0.008,
            prefill_tokens_per_s=1_100.0,
            network_s=0.004,
        ),
        Lengths(turns=3.4, turn_tokens=22, reply_tokens=60, question_tokens=40),
        "a guess for SmolLM2-135M on vLLM's CPU engine, two cores, where 64 episodes took 53 s; not checked against it",
    ),
    "gpu-1.5b": Preset(
        ServerProfile(
            max_sequences=256,
            step_s=0.006,
            step_s_per_sequence=0.000025,
            prefill_tokens_per_s=100_000.0,
            request_s=0.0005,
            network_s=0.001,
        ),
        Lengths(turns=7, turn_tokens=90, reply_tokens=90, question_tokens=60),
        "a guess, not measured: 1.5 B parameters in bfloat16 on a GPU with 3.35 TB/s and 989 TFLOP/s, 40% of that "
        "used, and 4 ms of a step for scheduling",
    ),
}
