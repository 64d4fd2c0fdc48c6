"""The tiny policy: a Qwen3 of about a million parameters that plays SQLEnv on a CPU, and its base checkpoint."""

from __future__ import annotations

from pathlib import Path

BASE_CHECKPOINT = Path(__file__).parent / "base"
"""The shipped base policy; `make base` rebuilds it."""

BASE_NOTES = "base_notes.md"
"""A text beside a checkpoint that says how it was made; the report shows it."""
