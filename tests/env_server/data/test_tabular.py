"""Importing tables: what the database holds, and the cache that is complete or absent."""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw
import pytest

from env_server.cache import CACHE_VARIABLE, Cache
from env_server.data.tabular import KIND, import_tables
from env_server.dataset import Row
from env_server.errors import DataError

IMPORT = """
import sys
from pathlib import Path
from env_server.data.tabular import import_tables
print("ready", flush=True)
sys.stdin.readline()
print(import_tables("shop", [Path(sys.argv[1])], Path(sys.argv[2])))
"""


def rows(path: Path, sql: str) -> list[Row]:
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        return list(connection.execute(sql))
    finally:
        connection.close()


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """Let no file of this process grow past `limit` bytes: what a full disk looks like."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    return write(tmp_path, "orders.csv", "order_id,item,price\n2,lamp,24.5\n1,desk,\n")


def imported(cache: Path) -> Path:
    return Cache(cache).path(KIND, "x").parent


def test_files_become_tables(tmp_path: Path, cache: Path, orders: Path) -> None:
    items = write(tmp_path, 'it"ems of . 😀.tsv', "name\tcode\nlamp\t007\n")
    path = import_tables("my shop", [orders, items], cache)
    assert path.parent == imported(cache)
    assert path.name.startswith("my_shop-")
    assert rows(path, "SELECT name, sql FROM sqlite_master WHERE type = 'table' ORDER BY rowid") == [
        ("orders", 'CREATE TABLE "orders" ("order_id" INTEGER PRIMARY KEY, "item" TEXT, "price" REAL)'),
        ('it"ems of . 😀', 'CREATE TABLE "it""ems of . 😀" ("name" TEXT, "code" TEXT)'),
    ]
    assert rows(path, "SELECT * FROM orders") == [(1, "desk", None), (2, "lamp", 24.5)]
    assert rows(path, 'SELECT * FROM "it""ems of . 😀"') == [("lamp", "007")]


def test_a_column_that_repeats_a_value_is_no_key(tmp_path: Path, cache: Path, orders: Path) -> None:
    twice = write(tmp_path, "people.csv", "id,name\n" + "".join(f"{i},x\n" for i in (*range(500), 7)))
    path = import_tables("shop", [twice, orders], cache)
    assert rows(path, "SELECT sql FROM sqlite_master WHERE name = 'people'") == [
        ('CREATE TABLE "people" ("id" INTEGER, "name" TEXT)',)
    ]
    assert rows(path, "SELECT count(*), count(DISTINCT id), max(id) FROM people") == [(501, 500, 499)]
    assert rows(path, "SELECT count(*) FROM orders") == [(2,)]


def test_parquet_and_csv_make_one_database(tmp_path: Path, cache: Path, orders: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(
        pa.table({"id": [2, 1], "weight": [1.5, float("nan")]}), tmp_path / "items.parquet"
    )
    path = import_tables("shop", [orders, tmp_path / "items.parquet"], cache)
    assert rows(path, "SELECT * FROM items") == [(1, None), (2, 1.5)]
    assert rows(path, "SELECT count(*) FROM orders") == [(2,)]


def test_the_same_files_are_imported_once(tmp_path: Path, cache: Path, orders: Path) -> None:
    first = import_tables("shop", [orders], cache)
    stamp = first.stat().st_mtime_ns, first.stat().st_ino
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    assert import_tables("shop", [Path(shutil.copy2(orders, moved))], cache) == first
    assert (first.stat().st_mtime_ns, first.stat().st_ino) == stamp
    other = import_tables("shop", [orders], tmp_path / "another cache")
    assert (other.name, other.read_bytes()) == (first.name, first.read_bytes())


def test_other_contents_or_names_are_another_database(tmp_path: Path, cache: Path, orders: Path) -> None:
    first = import_tables("shop", [orders], cache)
    renamed = import_tables("shop", [orders.rename(tmp_path / "sales.csv")], cache)
    write(tmp_path, "sales.csv", "order_id,item,price\n3,chair,75\n")
    changed = import_tables("shop", [tmp_path / "sales.csv"], cache)
    assert len({first, renamed, changed}) == 3
    assert rows(first, "SELECT count(*) FROM orders") == [(2,)]
    assert rows(changed, "SELECT * FROM sales") == [(3, "chair", 75)]


def test_a_broken_table_leaves_nothing_behind(tmp_path: Path, cache: Path, orders: Path) -> None:
    ragged = write(tmp_path, "ragged.csv", "a,b\n1,2\n3\n")
    with pytest.raises(DataError, match=r"ragged\.csv, line 3: has 1 cells"):
        import_tables("shop", [orders, ragged], cache)
    assert list(imported(cache).iterdir()) == []


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, cache: Path) -> None:
    big = write(tmp_path, "big.csv", "a,b\n" + "".join(f"{i},{'x' * 50}\n" for i in range(4_000)))
    with file_size_limit(60_000), pytest.raises(DataError, match="cannot be written") as raised:
        import_tables("shop", [big], cache)
    assert CACHE_VARIABLE in str(raised.value)
    assert str(imported(cache)) in str(raised.value)
    assert list(imported(cache).iterdir()) == []
    assert rows(import_tables("shop", [big], cache), "SELECT count(*) FROM big") == [(4_000,)]


def test_a_file_that_changes_while_it_is_imported(
    tmp_path: Path, cache: Path, orders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(_: apsw.Connection) -> None:
        """Called when the new database is opened: the types are known, the rows are still to be read."""
        write(tmp_path, "orders.csv", "order_id,item,price\n9,sofa,1\n")

    monkeypatch.setattr(apsw, "connection_hooks", [change])
    with pytest.raises(DataError, match=r"changed while it was imported\. Try again"):
        import_tables("shop", [orders], cache)
    assert list(imported(cache).iterdir()) == []


def test_two_processes_at_once(tmp_path: Path, cache: Path) -> None:
    big = write(tmp_path, "big.csv", "id,b\n" + "".join(f"{i},{'x' * 50}\n" for i in range(20_000)))
    command = [sys.executable, "-c", IMPORT, str(big), str(cache)]
    pipe = subprocess.PIPE
    running = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    told = [process.communicate("go\n")[0].strip() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert told[0] == told[1]
    assert list(imported(cache).iterdir()) == [Path(told[0])]
    assert rows(Path(told[0]), "SELECT count(*) FROM big") == [(20_000,)]
    assert rows(Path(told[0]), "PRAGMA integrity_check") == [("ok",)]
