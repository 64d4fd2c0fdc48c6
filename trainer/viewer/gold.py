"""The gold query and the gold answer of a question, from the data set that it is of.

A data set is loaded when it is first asked for, which takes seconds, and kept. Where it is not here, or holds another
question under that id, it is said why there is no gold.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

from env_server.data.loading import load_dataset
from env_server.dataset import Dataset
from env_server.errors import SQLEnvError, UnknownQuestionError
from env_server.settings import DisplaySettings
from env_server.sql.display import format_cell
from env_server.types import AnswerMode
from trainer.rollout.episodes import EpisodeRecord

SHOWN_ROWS = 50


@dataclass(frozen=True, slots=True)
class GoldView:
    """`rows` are the first ones of `count`, each cell as the policy would see it; `why`: why there is none."""

    sql: str = ""
    rows: tuple[tuple[str, ...], ...] = ()
    count: int = 0
    ordered: bool = False
    why: str = ""


class Golds:
    """The data sets that were asked for."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._loaded: dict[tuple[str, str], Dataset | str] = {}

    def of(self, record: EpisodeRecord, data: str, answer_mode: str) -> GoldView:
        """Return the gold of an episode's question."""
        if not data:
            return GoldView(why="which data set the question is of is written when its evaluation is over")
        dataset = self._dataset(data, answer_mode)
        if isinstance(dataset, str):
            return GoldView(why=dataset)
        try:
            question = dataset.question(record.question_id)
        except UnknownQuestionError:
            return GoldView(why=f"{data} as it is here holds no question {record.question_id}")
        if (question.text, question.db_id) != (record.question, record.db_id):
            return GoldView(why=f"{data} as it is here has another question under this id")
        cell = DisplaySettings().max_cell_chars
        rows = tuple(tuple(format_cell(value, cell) for value in row) for row in question.gold.rows[:SHOWN_ROWS])
        return GoldView(question.gold_sql, rows, len(question.gold.rows), question.gold.ordered)

    def _dataset(self, data: str, answer_mode: str) -> Dataset | str:
        """The data set, or why it cannot be had; one thread loads, the others wait for it."""
        with self._lock:
            key = (data, answer_mode)
            if key not in self._loaded:
                try:
                    self._loaded[key] = load_dataset(data, answer_mode=AnswerMode(answer_mode))
                except (SQLEnvError, OSError, ValueError) as error:
                    self._loaded[key] = f"the data set {data} cannot be read here: {error}"
            return self._loaded[key]
