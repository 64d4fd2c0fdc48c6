"""The pool: reuse, bounds, threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import apsw
import pytest

from env_server.cache import Cache
from env_server.errors import DataError
from env_server.settings import SandboxSettings
from env_server.sql.pool import DatabasePool
from env_server.sql.sandbox import Sandbox


def build(path: Path, value: int) -> Path:
    connection = apsw.Connection(str(path))
    connection.execute(f"CREATE TABLE t (a INTEGER); INSERT INTO t VALUES ({value})").fetchall()
    connection.close()
    return path


@pytest.fixture
def databases(tmp_path: Path) -> dict[str, Path]:
    return {f"db{i}": build(tmp_path / f"{i}.db", i) for i in range(4)}


def test_a_lease_serves_its_own_database_and_is_reused(databases: dict[str, Path]) -> None:
    pool = DatabasePool(databases, SandboxSettings())
    with pool.lease("db2") as first:
        assert first.query("SELECT a FROM t", 5).rows == ((2,),)
    with pool.lease("db2") as second, pool.lease("db2") as third:
        assert second is first
        assert third is not first
    pool.close()


def test_idle_sandboxes_are_bounded_and_the_oldest_goes_first(databases: dict[str, Path]) -> None:
    pool = DatabasePool(databases, SandboxSettings(), max_idle=2)
    used: dict[str, Sandbox] = {}
    for db_id in ("db0", "db1", "db0", "db2"):
        with pool.lease(db_id) as sandbox:
            used.setdefault(db_id, sandbox)
    with pool.lease("db0") as kept, pool.lease("db1") as reopened:
        assert kept is used["db0"]
        assert reopened is not used["db1"]
    pool.close()


def test_a_sandbox_comes_back_after_an_exception(databases: dict[str, Path]) -> None:
    pool = DatabasePool(databases, SandboxSettings())

    def fail() -> None:
        with pool.lease("db0") as sandbox:
            leased.append(sandbox)
            raise RuntimeError("in the block")

    leased: list[object] = []
    with pytest.raises(RuntimeError):
        fail()
    with pool.lease("db0") as again:
        assert again is leased[0]
    pool.close()


def test_an_unknown_database_is_a_data_error(databases: dict[str, Path]) -> None:
    pool = DatabasePool(databases, SandboxSettings())
    with pytest.raises(DataError, match="no database 'nope'"), pool.lease("nope"):
        pass
    pool.close()


def test_a_closed_pool_lends_nothing_and_takes_back_what_is_out(databases: dict[str, Path]) -> None:
    pool = DatabasePool(databases, SandboxSettings())
    with pool.lease("db0") as sandbox:
        pool.close()
        assert sandbox.query("SELECT a FROM t", 5).rows == ((0,),)
    with pytest.raises(DataError, match="closed"), pool.lease("db0"):
        pass


def test_the_schema_is_read_once_and_shared(databases: dict[str, Path]) -> None:
    pool = DatabasePool(databases, SandboxSettings())
    assert pool.schema("db1").table_names == ("t",)
    assert pool.schema("db1") is pool.schema("db1")
    pool.close()


def test_a_schema_that_the_cache_has_is_not_read(databases: dict[str, Path], tmp_path: Path) -> None:
    settings = SandboxSettings()
    with closing(DatabasePool(databases, settings, cache=Cache(tmp_path / "cache"))) as first:
        first.read_schemas()
        learned = {db_id: first.schema(db_id) for db_id in databases}
    with closing(DatabasePool(databases, settings, cache=Cache(tmp_path / "cache"))) as second:
        second.close()  # it lends no sandbox any more
        second.read_schemas()
        assert {db_id: second.schema(db_id) for db_id in databases} == learned
    other = DatabasePool(databases, SandboxSettings(vm_steps=99), cache=Cache(tmp_path / "cache"))
    other.close()
    with pytest.raises(DataError, match="closed"):
        other.schema("db1")


def test_many_threads_never_share_a_sandbox_and_get_the_right_rows(databases: dict[str, Path]) -> None:
    pool = DatabasePool(databases, SandboxSettings(), max_idle=3)
    held: set[int] = set()
    lock = threading.Lock()

    def work(turn: int) -> bool:
        index = turn % 4
        with pool.lease(f"db{index}") as sandbox:
            with lock:
                alone = id(sandbox) not in held
                held.add(id(sandbox))
            rows = sandbox.query("SELECT a FROM t", 5).rows
            names = pool.schema(f"db{index}").table_names
            with lock:
                held.discard(id(sandbox))
        return alone and rows == ((index,),) and names == ("t",)

    with ThreadPoolExecutor(8) as executor:
        assert all(executor.map(work, range(200)))
    pool.close()
