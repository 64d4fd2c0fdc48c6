"""A run's folder after a start that failed: as it was before."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.results.fresh_folder import taken_back


def begin(folder: Path, error: type[BaseException]) -> None:
    (folder / "evaluations").mkdir(parents=True)
    (folder / "evaluations" / "before.json").touch()
    (folder / "config.json").touch()
    raise error


def fail_in(folder: Path, *, nothing: bool = True, error: type[BaseException] = ValueError) -> None:
    with pytest.raises(error), taken_back(folder, lambda: nothing):
        begin(folder, error)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_new_folder_is_removed_with_those_above_it_that_were_made(tmp_path: Path, error: type[BaseException]) -> None:
    fail_in(tmp_path / "runs" / "first", error=error)
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_before_stays(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    (folder / "notes.md").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (folder / "weights").symlink_to(tmp_path / "elsewhere")
    fail_in(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["notes.md", "weights"]


def test_folders_above_that_were_there_stay(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    fail_in(tmp_path / "runs" / "deep" / "first")
    assert (tmp_path / "runs").is_dir()
    assert list((tmp_path / "runs").iterdir()) == []


def test_what_came_to_something_stays_and_so_does_what_succeeds(tmp_path: Path) -> None:
    fail_in(tmp_path / "failed", nothing=False)
    with taken_back(tmp_path / "done", lambda: True):
        (tmp_path / "done").mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["done", "failed"]
    assert (tmp_path / "failed" / "config.json").exists()
