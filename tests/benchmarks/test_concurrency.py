"""The benchmark of episodes in flight runs, and finds nothing left behind."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.concurrency import left, main


def test_it_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["concurrency", "--quick"])
    before = left()
    main()
    found = json.loads(capsys.readouterr().out)
    assert (found["benchmark"], found["episodes"], found["failed"]) == ("concurrency", 100, 0)
    assert found["left"][0]["tasks"] <= before["tasks"], "those of other tests apart"
