"""The file layer: the clock, the files that open, temporary space."""

from __future__ import annotations

import threading
from pathlib import Path

import apsw
import pytest

from env_server.sql.vfs import SANDBOX_VFS, VFS_NAME, SpillBudget, SpillFile


def test_the_vfs_is_registered_and_is_not_the_default() -> None:
    assert VFS_NAME in apsw.vfs_names()
    assert apsw.vfs_names()[0] != VFS_NAME


def test_nothing_but_a_read_only_database_opens(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with pytest.raises(apsw.CantOpenError):
        apsw.Connection(str(path), vfs=VFS_NAME).execute("CREATE TABLE t (a)")
    assert not path.exists()
    apsw.Connection(str(path)).execute("CREATE TABLE t (a)")
    readonly = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY, vfs=VFS_NAME)
    assert readonly.execute("SELECT count(*) FROM t").fetchall() == [(0,)]
    with pytest.raises(apsw.Error):
        readonly.execute("VACUUM INTO ?", (str(tmp_path / "b.db"),)).fetchall()
    assert not (tmp_path / "b.db").exists()
    readonly.close()


def test_the_clock_is_a_julian_day_and_its_milliseconds() -> None:
    assert SANDBOX_VFS.xCurrentTime() == 2_461_041.5
    assert SANDBOX_VFS.xCurrentTimeInt64() == 212_633_985_600_000


def test_a_spill_file_reads_back_what_was_written() -> None:
    spill_budget = SpillBudget()
    spill_budget.left = 100
    file = SpillFile(spill_budget)
    file.xWrite(b"abcdef", 0)
    file.xWrite(b"XY", 4)
    file.xWrite(b"z", 10)
    assert file.xFileSize() == 11
    assert file.xRead(11, 0) == b"abcdXY\0\0\0\0z"
    assert file.xRead(10, 9) == b"\0z"
    file.xTruncate(3)
    assert file.xRead(9, 0) == b"abc"
    file.xClose()
    assert file.xFileSize() == 0


def test_writes_are_charged_and_refused_past_the_allowance() -> None:
    spill_budget = SpillBudget()
    spill_budget.left = 10
    file = SpillFile(spill_budget)
    file.xWrite(b"12345", 0)
    file.xWrite(b"12345", 0)
    with pytest.raises(apsw.FullError):
        file.xWrite(b"1", 0)


def test_an_allowance_belongs_to_one_thread_and_ends_with_its_statement() -> None:
    seen: list[int] = []
    with SANDBOX_VFS.spill_allowance(50):
        thread = threading.Thread(target=lambda: seen.append(SANDBOX_VFS.spill_budget.left))
        thread.start()
        thread.join()
        assert SANDBOX_VFS.spill_budget.left == 50
    assert seen == [0]
    assert SANDBOX_VFS.spill_budget.left == 0
