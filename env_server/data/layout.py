"""Spider and BIRD as they unpack: question files and folders of databases under known names, read into a `RawDataset`.

Spider (Yu et al., EMNLP 2018), and the ways in which it has been rearranged:

    train_spider.json, train_others.json, dev.json     any of them; a list of {"db_id", "question", "query"}
    database/ID/ID.sqlite                              one file for each db_id; or .db, or directly in databases/

The release with the test set holds test.json and test_database/ as well; test.json is read where there is no dev.json.

BIRD (Li et al., NeurIPS 2023), as the archives of its train, dev and mini-dev parts unpack; any one part is enough:

    train.json                                    a list of {"db_id", "question", "SQL", "evidence"}
    dev.json, or mini_dev_sqlite.json             the same with "question_id" and "difficulty"
    train_databases/ID/ID.sqlite                  one file for each db_id; also dev_databases/, databases/, database/

The evidence, BIRD's outside knowledge, is shown to the agent with the question; the difficulty is the question's
family. mini_dev_sqlite.json, whose questions are a part of dev.json's, is read where there is no dev.json.

- The folder may be the one that an archive unpacks into a top folder of: question files are looked for in it, then
  in the folders inside, then in those inside them; all files of the first level that holds any are read.
- A question's id is its file and its number, as in `dev-0042`: the number that the file gives it (`id_key`), or,
  where the file does not give each question its own, its place in the file, counted from 0.
- Train and evaluation never share a database. With an evaluation file the official split is taken: every database
  that it names is for evaluation, all others for training. Without one, a hash of the db_id decides.
- A question whose database is missing or cannot be used is kept. Its db_id is then not in `databases`, and
  `refused` says why. Lists of tables (`tables.json`) are not read, because those of the real releases are wrong about
  some; the gold queries, which are all run, tell whether a database is the right one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from env_server.data.database_files import file_problem, find_databases, folder_levels
from env_server.data.json_files import QuestionFile, read_json_file
from env_server.data.raw import RawDataset, RawQuestion
from env_server.data.splits import split_databases
from env_server.dataset import Split
from env_server.errors import DataError


@dataclass(frozen=True)
class Layout:
    """The names that a benchmark uses. The first name of each kind is the one that errors suggest.

    Of the `eval_files` that lie there only the first is read. `family_key` names what the benchmark itself sorts
    its questions by.
    """

    name: str
    train_files: tuple[str, ...]
    eval_files: tuple[str, ...]
    database_folders: tuple[str, ...]
    sql_key: str
    id_key: str = ""
    evidence_key: str = ""
    family_key: str = ""

    @property
    def question_files(self) -> tuple[str, ...]:
        """Every name of a question file."""
        return (*self.train_files, *self.eval_files)


SPIDER = Layout(
    name="spider",
    train_files=("train_spider.json", "train_others.json"),
    eval_files=("dev.json", "test.json"),
    database_folders=("database", "databases", "test_database"),
    sql_key="query",
)
BIRD = Layout(
    name="bird",
    train_files=("train.json",),
    eval_files=("dev.json", "mini_dev_sqlite.json"),
    database_folders=("train_databases", "dev_databases", "databases", "database"),
    sql_key="SQL",
    id_key="question_id",
    evidence_key="evidence",
    family_key="difficulty",
)


def read_layout(layout: Layout, folder: Path) -> RawDataset:
    """Read a benchmark's folder. Questions keep the order of their files, train files first.

    Raises DataError, naming the file, the line and the fix, when the folder, its question files or all the
    databases are missing, and when a file is not UTF-8, not JSON or lacks a key.
    """
    if not folder.is_dir():
        wanted = f"{layout.question_files[0]} and {layout.database_folders[0]}/"
        raise DataError(f"{folder} is not a folder. Give the folder that holds {wanted}")
    files = _question_files(layout, folder)
    questions = [question for file in files for question in _questions(layout, file)]
    if not questions:
        raise DataError(f"no question in {', '.join(map(str, files))}. Unpack the release again")
    databases, refused = _databases(layout, folder, {question.db_id for question in questions})
    return RawDataset(layout.name, tuple(_split(questions)), databases, refused)


def _question_files(layout: Layout, folder: Path) -> list[Path]:
    """Return the question files, train files first. Raises DataError when there is none, or one of them twice."""
    for level in folder_levels(folder):
        found = {name: [above / name for above in level if (above / name).is_file()] for name in layout.question_files}
        evaluation = next((name for name in layout.eval_files if found[name]), None)
        names = [name for name in layout.train_files if found[name]] + ([evaluation] if evaluation else [])
        for name in names:
            if len(found[name]) > 1:
                places = ", ".join(str(file.parent) for file in found[name])
                raise DataError(f"{name} lies in more than one folder: {places}. Give one of them")
        if names:
            return [found[name][0] for name in names]
    raise DataError(f"{folder} holds no question file. Put at least one there: {', '.join(layout.question_files)}")


def _questions(layout: Layout, file: Path) -> Iterator[RawQuestion]:
    """Read one file; the split is TRAIN or EVAL by the file alone."""
    read = read_json_file(file)
    numbers = _numbers(layout, read)
    split = Split.EVAL if file.name in layout.eval_files else Split.TRAIN
    optional = [key for key in (layout.evidence_key, layout.family_key) if key]
    for index, number in enumerate(numbers):
        text = read.strings(index, ("db_id", "question", layout.sql_key), optional)
        yield RawQuestion(
            question_id=f"{file.stem}-{number:04d}",
            text=text["question"].strip(),
            db_id=text["db_id"],
            sql=text[layout.sql_key],
            split=split,
            family=text.get(layout.family_key, ""),
            evidence=text.get(layout.evidence_key, ""),
        )


def _numbers(layout: Layout, file: QuestionFile) -> Sequence[int]:
    """Return each question's number in the file's own count, or else in ours."""
    places = range(len(file.entries))
    given = [entry.get(layout.id_key) for entry in file.entries]
    numbers = [number for number in given if isinstance(number, int) and number >= 0]
    return numbers if len(set(numbers)) == len(places) else places


def _databases(layout: Layout, folder: Path, used: set[str]) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the databases that questions use, and why others cannot be. Raises DataError when there is none."""
    found = {db_id: path for db_id, path in find_databases(folder, layout.database_folders).items() if db_id in used}
    refused = {db_id: problem for db_id, path in found.items() if (problem := file_problem(path))}
    if found and len(refused) == len(found):
        raise DataError(f"none of the {len(found)} databases can be used. {next(iter(refused.values()))}")
    if not found:
        example = min(used)
        place = folder / layout.database_folders[0] / example / f"{example}.sqlite"
        raise DataError(f"{folder} holds none of the {len(used)} databases. Put them there as {place}")
    return {db_id: path for db_id, path in found.items() if db_id not in refused}, refused


def _split(questions: Sequence[RawQuestion]) -> Iterator[RawQuestion]:
    used = dict.fromkeys(question.db_id for question in questions)
    official = {question.db_id for question in questions if question.split is Split.EVAL}
    splits = {i: Split.EVAL if i in official else Split.TRAIN for i in used} if official else split_databases(used)
    return (replace(question, split=splits[question.db_id]) for question in questions)
