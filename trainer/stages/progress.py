"""What a run of stages has done so far: `stages.json` in its folder, and what an interrupted stage goes on from.

Promises:

1. The file is replaced atomically, and a stage is in it when all that it writes is written.
2. A stage that is finished stays what it was: a plan that would have it otherwise is refused. Where servers are, how
   much runs at once, and what is kept on the way may change: the next machine may be another one.
3. The folder may be moved: the file names no place outside of it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter, ValidationError

from inference.adapters import STAGES_FILE
from trainer.eval.output_folder import final_state, last_checkpoint
from trainer.eval.run_files import PLACES, replace_json
from trainer.stages.plan import Plan, Stage, StageError

MACHINES = re.compile(r"env_server|max_concurrency|vllm_server_.*|weight_sync_dir")
"""Flags that say where servers are, and how much runs at once; they change nothing about what is learned."""


@dataclass(frozen=True, slots=True)
class FinishedStage:
    """A stage that came to its end, and what was asked of it."""

    name: str
    kind: str
    settings: dict[str, str]


_FINISHED = TypeAdapter(list[FinishedStage])


def read_finished(plan: Plan) -> list[FinishedStage]:
    """Return the stages that are finished, in their order. Raises StageError when the plan cannot go on from them."""
    path = plan.output_dir / STAGES_FILE
    if not path.is_file():
        foreign = [folder for folder in map(plan.folder, plan.stages) if folder.exists()]
        if foreign:
            raise StageError(f"{foreign[0]} is there, and no {path}; choose another --output_dir")
        return []
    try:
        finished = _FINISHED.validate_python(json.loads(path.read_bytes())["finished"])
    except (ValidationError, ValueError, KeyError, TypeError) as error:
        raise StageError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    check_unchanged(plan, finished)
    for stage in plan.stages[len(finished) :]:
        if final_state(plan.folder(stage)) is None:
            break
        # The run was killed between the end of the stage and the line that says so.
        finished.append(FinishedStage(stage.name, stage.kind.value, stage.settings))
    return finished


def check_unchanged(plan: Plan, finished: Sequence[FinishedStage]) -> None:
    """Refuse a plan whose finished stages are not those that were run. Raises StageError."""
    if len(finished) > len(plan.stages):
        raise StageError(f"{len(finished)} stages are finished, and the plan has {len(plan.stages)}")
    for stage, done in zip(plan.stages, finished, strict=False):
        before = {"name": done.name, "kind": done.kind, **done.settings}
        after = {"name": stage.name, "kind": stage.kind.value, **stage.settings}
        for key in sorted({*before, *after}):
            if before.get(key) != after.get(key) and not (PLACES.fullmatch(key) or MACHINES.fullmatch(key)):
                raise StageError(
                    f"{plan.title(stage)} is finished, with {key} {before.get(key, 'left out')}, and is now to have "
                    f"{after.get(key, 'left out')}; put it back, or begin anew in another --output_dir"
                )


def write_finished(plan: Plan, finished: Sequence[FinishedStage]) -> None:
    """Write down which stages there are, and which of them are finished."""
    plan.output_dir.mkdir(parents=True, exist_ok=True)
    stages = [stage.folder for stage in plan.stages]
    replace_json(plan.output_dir / STAGES_FILE, {"stages": stages, "finished": [asdict(stage) for stage in finished]})


def clear(plan: Plan, stage: Stage) -> None:
    """Remove what a stage has left that was broken off before its first checkpoint."""
    if last_checkpoint(plan.folder(stage)) is None:
        shutil.rmtree(plan.folder(stage), ignore_errors=True)
