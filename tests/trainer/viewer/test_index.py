"""The index follows its files, whatever becomes of them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from env_server.cache import CACHE_VARIABLE
from tests.trainer.viewer.runs import evaluate, make_run, played, train
from trainer.eval.run_files import RunFolder
from trainer.viewer.index import UNUSED_DAYS, VERSION, Index, IndexFileError, index_path, parse_episode


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = make_run(tmp_path / "first")
    train(run, 1, [played("a"), played("b", "wrong")])
    return run


def open_index(tmp_path: Path, *paths: Path) -> Index:
    index = Index(tmp_path / "cache" / "index.sqlite")
    assert list(index.update(paths))
    return index


def steps(index: Index) -> list[tuple[int, str]]:
    return index.rows("SELECT step, question_id FROM episodes ORDER BY id")


def searched(index: Index, word: str) -> int:
    return int(index.rows("SELECT COUNT(*) FROM words WHERE words MATCH ?", (word,))[0][0])


def test_an_episode_is_read_back_from_its_file(tmp_path: Path, run: RunFolder) -> None:
    index = open_index(tmp_path, run.episodes_path)
    first, second = run.episodes()
    assert index.record(1) == (1, 1, first.record)
    assert index.record(2) == (1, 1, second.record)
    assert index.record(3) is None
    row = "SELECT question_id, db_id, hardness, outcome, kind, steps, tokens FROM episodes WHERE id = 2"
    assert index.rows(row) == [("b", "shop", "easy", "wrong", "right_rows", 3, 10)]
    index.close()


def test_a_run_that_grows_is_read_on(tmp_path: Path, run: RunFolder) -> None:
    index = open_index(tmp_path, run.episodes_path)
    assert list(index.update([run.episodes_path])) == []
    train(run, 2, [played("c", question="something new")])
    assert searched(index, "something") == 0
    assert list(index.update([run.episodes_path])) == [run.episodes_path]
    assert steps(index) == [(1, "a"), (1, "b"), (2, "c")]
    assert searched(index, "something") == 1
    index.close()
    again = Index(index.path)
    assert list(again.update([run.episodes_path])) == []
    assert len(steps(again)) == 3
    again.close()


def test_a_run_that_resumes_loses_what_it_cut_off(tmp_path: Path, run: RunFolder) -> None:
    train(run, 2, [played("c", question="cut off")])
    index = open_index(tmp_path, run.episodes_path)
    run.resume_from(1)
    train(run, 2, [played("d"), played("e"), played("f")])
    list(index.update([run.episodes_path]))
    assert steps(index) == [(1, "a"), (1, "b"), (2, "d"), (2, "e"), (2, "f")]
    assert searched(index, '"cut off"') == 0
    index.close()


def test_an_evaluation_that_is_played_again_replaces_the_first(tmp_path: Path, run: RunFolder) -> None:
    evaluate(run, "after", [played("a", "wrong")])
    path = run.evaluations_path / "after.episodes.jsonl"
    index = open_index(tmp_path, run.episodes_path, path)
    evaluate(run, "after", [played("a")])
    list(index.update([run.episodes_path, path]))
    statement = "SELECT outcome FROM episodes WHERE file = ?"
    assert index.rows(statement, (index.files()[path],)) == [("correct",)]
    run.drop_evaluation("after")
    list(index.update([run.episodes_path]))
    assert set(index.files()) == {run.episodes_path}
    assert len(steps(index)) == 2
    index.close()


def test_two_viewers_count_an_episode_once(tmp_path: Path, run: RunFolder) -> None:
    first = open_index(tmp_path, run.episodes_path)
    second = Index(first.path)
    train(run, 2, [played("c")])
    for index in (first, second):
        list(index.update([run.episodes_path]))
    assert len(steps(first)) == len(steps(second)) == 3
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[]", "a line is a JSON object"),
        ("{", "EOF"),
        ('{"step": 3}', "this is no episode"),
        ('{"step": 3, "color": 1}', "an episode has no color"),
    ],
)
def test_a_broken_line_is_named_and_hurts_nobody_else(tmp_path: Path, run: RunFolder, line: str, why: str) -> None:
    other = make_run(tmp_path / "second")
    train(other, 1, [played("z")])
    with run.episodes_path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    train(run, 2, [played("after the broken line")])
    paths = [run.episodes_path, other.episodes_path]
    index = open_index(tmp_path, *paths)
    assert [question for _, question in steps(index)] == ["a", "b", "z"]
    assert why in index.errors[run.episodes_path]
    train(run, 3, [played("later")])
    assert list(index.update(paths)) == []
    index.close()


def test_a_file_that_cannot_be_read_is_named_and_hurts_nobody_else(tmp_path: Path, run: RunFolder) -> None:
    unreadable = tmp_path / "other.episodes.jsonl"
    unreadable.mkdir()
    paths = [unreadable, run.episodes_path]
    index = open_index(tmp_path, *paths)
    assert [question for _, question in steps(index)] == ["a", "b"]
    assert index.errors == {unreadable: "Is a directory"}
    unreadable.rmdir()
    unreadable.touch()
    list(index.update(paths))
    assert index.errors == {}
    index.close()


def test_a_turn_that_is_none_is_named(tmp_path: Path, run: RunFolder) -> None:
    train(run, 2, [played("c", "wrong", turns=[{"text": "?"}])])
    index = open_index(tmp_path, run.episodes_path)
    assert "a turn of episode episode-c cannot be read" in index.errors[run.episodes_path]
    index.close()


def test_an_index_of_another_version_is_made_anew(tmp_path: Path, run: RunFolder) -> None:
    index = open_index(tmp_path, run.episodes_path)
    list(index._writer.execute(f"PRAGMA user_version = {VERSION + 1}"))
    index.close()
    again = open_index(tmp_path, run.episodes_path)
    assert len(steps(again)) == 2
    again.close()


def test_an_index_that_nobody_opens_is_deleted(tmp_path: Path, run: RunFolder) -> None:
    old, young = (tmp_path / "cache" / name for name in ("old.sqlite", "young.sqlite"))
    for days, path in ((UNUSED_DAYS + 1, old), (1, young)):
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, (time.time() - days * 86_400,) * 2)
    open_index(tmp_path, run.episodes_path).close()
    assert not old.exists()
    assert young.exists()


def test_where_the_index_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    one, other = index_path([tmp_path / "a", tmp_path / "b"]), index_path([tmp_path / "b", tmp_path / "a"])
    assert one == other
    assert one.parent == tmp_path / "viewer"
    assert index_path([tmp_path / "a"]) != one


def test_a_cache_that_cannot_be_written_names_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(IndexFileError, match=CACHE_VARIABLE):
        Index(tmp_path / "file" / "index.sqlite")


def test_records_are_read_as_they_were_written(run: RunFolder) -> None:
    lines = run.episodes_path.read_bytes().splitlines(keepends=True)
    assert [parse_episode(line) for line in lines] == [(e.step, e.record) for e in run.episodes()]
