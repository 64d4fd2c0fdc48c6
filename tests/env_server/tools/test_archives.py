"""Archives from elsewhere: nothing leaves the folder, nothing half-written counts."""

from __future__ import annotations

import io
import shutil
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from env_server.errors import DataError
from env_server.tools.archives import unpack


def zipped(files: Mapping[str, bytes], **flags: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = flags.get("mode", 0) << 16
            archive.writestr(info, content)
    return buffer.getvalue()


def unpacked(tmp_path: Path, data: bytes) -> dict[str, bytes]:
    """Unpack into an empty folder; return what lies there, and check that nothing lies beside it."""
    archive = tmp_path / "a.zip"
    archive.write_bytes(data)
    folder = tmp_path / "inner" / "out"
    folder.mkdir(parents=True)
    try:
        unpack(archive, folder)
    finally:
        outside = [file for file in tmp_path.rglob("*") if file.is_file() and not file.is_relative_to(folder)]
        assert outside == [archive]
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_files_and_folders(tmp_path: Path) -> None:
    files = {"top/a.json": b"[]", "top/database/x/x.sqlite": b"x" * 100_000, "top/empty": b""}
    assert unpacked(tmp_path, zipped({**files, "top/folder/": b""})) == files


def test_archives_inside_are_unpacked_where_they_lie(tmp_path: Path) -> None:
    innermost = zipped({"c": b"3"})
    inner = zipped({"dev_databases/b.sqlite": b"2", "c.zip": innermost})
    found = unpacked(tmp_path, zipped({"dev/a.json": b"1", "dev/dev_databases.zip": inner}))
    assert found == {"dev/a.json": b"1", "dev/dev_databases/b.sqlite": b"2", "dev/c.zip": innermost}


def test_what_other_systems_leave_is_passed_over(tmp_path: Path) -> None:
    files = {"a": b"1", "__MACOSX/._a": b"2", "b/.DS_Store": b"3"}
    assert unpacked(tmp_path, zipped(files)) == {"a": b"1"}


@pytest.mark.parametrize(
    "name",
    [".", "../out.txt", "a/../../out.txt", "/tmp/out.txt", "C:\\out.txt", "a\\..\\..\\out.txt", "\\out.txt", "C:/x"],
)
def test_a_name_that_leads_out_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not safe to unpack"):
        unpacked(tmp_path, zipped({"good": b"1", name: b"2"}))
    assert not (tmp_path / "inner" / "out" / "good").exists(), "nothing is written before all names are checked"


@pytest.mark.parametrize("mode", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR])
def test_links_and_devices_are_refused(mode: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not safe to unpack"):
        unpacked(tmp_path, zipped({"link": b"/etc/passwd"}, mode=mode | 0o777))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(names=st.lists(st.text("ab./\\:C ", min_size=1, max_size=9), max_size=4, unique=True))
def test_no_name_leads_out(names: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "case"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        unpacked(folder, zipped(dict.fromkeys(names, b"x")))
    except (DataError, OSError):
        return  # refused, or a name that is both a file and a folder


@pytest.mark.parametrize("damage", ["truncated", "changed", "text", "encrypted"])
def test_a_broken_archive_says_so(damage: str, tmp_path: Path) -> None:
    data = bytearray(zipped({"farm.sqlite": bytes(range(256)) * 50}))
    if damage == "truncated":
        data = data[:-30]
    elif damage == "changed":
        data[60] ^= 0xFF
    elif damage == "text":
        data = bytearray(b"<html>not found</html>")
    else:
        data[6] |= 1  # the flag of the member's own header
        data[data.index(b"PK\x01\x02") + 8] |= 1
    with pytest.raises(DataError, match=r"a\.zip cannot be unpacked: .*\. Remove it and fetch it again"):
        unpacked(tmp_path, bytes(data))
    assert not (tmp_path / "inner" / "out" / "farm.sqlite").exists(), "no half-written file has the real name"


def test_an_archive_that_does_not_fit_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DataError, match=r"out has 0.0 MB free, and 0.0 MB are needed"):
        unpacked(tmp_path, zipped({"good": b"1", "large": bytes(2_000)}))
    assert list((tmp_path / "inner" / "out").iterdir()) == []
