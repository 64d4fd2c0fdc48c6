"""The library over HTTP: what is there, what is asked for, and who may ask."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from env_server.cache import CACHE_VARIABLE
from env_server.data.loading import load_dataset
from sqlenv.cli import main
from tests.trainer.viewer.runs import evaluate, evaluate_alone, make_run, played, train
from trainer.eval.run_files import ABOUT, Alert, RunFolder
from trainer.viewer.library import BARS, LINES, Library, failures_over
from trainer.viewer.view import HOST, create_app

PAGE = Path(__file__).parents[3] / "trainer" / "viewer" / "page"
VENDORED = {
    # From npm: uplot 1.6.32 (MIT), htm 3.1.1 (Apache-2.0) with preact (MIT) in it.
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "htm-preact.module.js": "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7",
}
HOME = "127.0.0.1:8060"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = make_run(tmp_path / "runs" / "first")
    evaluate(run, "before", [played("a", "wrong"), played("b", "wrong", "zoo")], step=0)
    for step in (1, 2):
        train(run, step, [played("a", "wrong"), played("c")], kl=step / 10)
    return run


class Viewed:
    """The application of a folder, asked by a client."""

    def __init__(self, *paths: Path) -> None:
        self.library = Library(paths)
        self._app = create_app(self.library)
        self.library.state()

    def ask(self, path: str, method: str = "GET", host: str = HOME, **values: Any) -> httpx.Response:
        async def asked() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self._app), base_url="http://x") as client:
                return await client.request(method, path, params=values or None, headers={"host": host})

        return asyncio.run(asked())

    def get(self, path: str, **values: Any) -> Any:
        reply = self.ask(f"/api/{path}", **values)
        assert reply.status_code == 200, reply.text
        return reply.json()


@pytest.fixture
def viewed(run: RunFolder) -> Viewed:
    return Viewed(run.path.parent)


def test_the_state_names_what_there_is(viewed: Viewed, run: RunFolder) -> None:
    state = viewed.get("state")
    (source,) = state["sources"]
    assert (source["name"], source["step"], source["max_steps"], state["episodes"]) == ("first", 2, 10, 6)
    assert [(file["label"], file["episodes"]) for file in source["files"]] == [("training", 4), ("before", 2)]
    assert source["evaluations"][0]["rate"] == 0.0
    assert viewed.get("state")["version"] == state["version"]


def test_a_run_that_grows_is_seen_to(viewed: Viewed, run: RunFolder) -> None:
    version = viewed.get("state")["version"]
    before = viewed.get("curves", source="first")["success"]["rate"]
    train(run, 3, [played("d"), played("d", "wrong", given_steps=1)])
    run.add_alert(Alert(3, "reward spread near 0", "0.001", "a cause", "a cure"))
    evaluate(run, "after", [played("a"), played("b", "wrong", "zoo")], step=3)
    state = viewed.get("state")
    assert state["version"] != version
    (source,) = state["sources"]
    assert (source["step"], state["episodes"]) == (3, 10)
    assert source["alerts"][0]["message"] == "reward spread near 0"
    assert [one["label"] for one in source["evaluations"]] == ["before", "after"]
    assert viewed.get("curves", source="first")["series"]["kl"]["values"] == [0.1, 0.2]
    success = viewed.get("curves", source="first")["success"]
    assert (success["steps"], success["rate"]) == ([1, 2, 3], [*before, 1.0]), "but not by the guided episode"
    make_run(run.path.parent / "second")
    assert [one["name"] for one in viewed.get("state")["sources"]] == ["first", "second"]


def test_a_run_that_resumes_loses_what_it_cut_off_and_half_a_line_waits(viewed: Viewed, run: RunFolder) -> None:
    run.resume_from(1)
    with run.episodes_path.open("ab") as file:
        file.write(b'{"step": 2')
    state = viewed.get("state")
    assert state["episodes"] == 4
    assert state["sources"][0]["trouble"] == []
    assert viewed.get("curves", source="first")["success"]["steps"] == [1]


def test_episodes_are_filtered_counted_and_searched(viewed: Viewed) -> None:
    everything = viewed.get("episodes")
    assert (everything["total"], everything["right"]) == (6, 2)
    assert everything["facets"]["outcome"] == {"wrong": 4, "correct": 2}
    assert everything["facets"]["kind"] == {"right_rows": 4}
    before = viewed.get("episodes", source="first", label="before", db_id="zoo")
    assert [(one["question_id"], one["source"], one["label"], one["step"]) for one in before["episodes"]] == [
        ("b", "first", "before", None)
    ]
    assert viewed.get("episodes", text="no such column", min_step=2, limit=1)["total"] == 2
    assert viewed.get("episodes", source="other")["total"] == 0
    assert len(viewed.get("episodes", limit=2, offset=4)["episodes"]) == 2


def test_an_episode_turn_by_turn_and_where_else_it_was_played(viewed: Viewed) -> None:
    (listed,) = viewed.get("episodes", question_id="a", label="before")["episodes"]
    episode = viewed.get(f"episodes/{listed['id']}")
    assert [turn["action_type"] for turn in episode["turns"]] == ["QUERY", "QUERY", "ANSWER"]
    assert (episode["label"], episode["why"]) == ("before", "saw the right rows, answered wrongly")
    assert [(one["label"], one["step"]) for one in episode["same"]] == [
        ("before", None),
        ("training", 2),
        ("training", 1),
    ]


def test_failures_over_training_and_in_each_evaluation(viewed: Viewed) -> None:
    failures = viewed.get("failures", source="first")
    assert failures["over"] == [
        {"first": step, "last": step, "counts": {"right": 1, "right_rows": 1}} for step in (1, 2)
    ]
    assert failures["totals"] == [
        {"label": "training", "counts": {"correct": 2, "right_rows": 2}},
        {"label": "before", "counts": {"right_rows": 2}},
    ]


def test_two_evaluations_are_compared_and_the_flips_lead_to_their_episodes(viewed: Viewed, run: RunFolder) -> None:
    evaluate(run, "after", [played("a"), played("b", "wrong", "zoo")], step=2)
    files = {file["label"]: file["id"] for file in viewed.get("state")["sources"][0]["files"]}
    compared = viewed.get("compare", a=files["before"], b=files["after"])
    assert compared["rows"][0]["cells"][:3] == ["success (2)", "0.0%", "50.0%"]
    assert "paired over 2 questions" in compared["verdict"]
    (flip,) = compared["gained"]
    sides = [viewed.get(f"episodes/{number}") for number in flip["ids"]]
    assert [(side["label"], side["outcome"], side["question_id"]) for side in sides] == [
        ("before", "wrong", "a"),
        ("after", "correct", "a"),
    ]


def test_two_runs_differ_in_their_flags_and_no_secret_is_shown(viewed: Viewed, run: RunFolder) -> None:
    make_run(run.path.parent / "second", learning_rate=1e-4, hub_token="hf_secret", api_key="hf_secret")
    viewed.library.refresh()
    differences = viewed.get("differences", a="first", b="second")
    assert {one["name"]: (one["a"], one["b"]) for one in differences} == {
        "learning_rate": (1e-5, 1e-4),
        "api_key": (None, "(hidden)"),
    }


def test_an_evaluation_by_itself(tmp_path: Path) -> None:
    viewed = Viewed(evaluate_alone(tmp_path / "base.jsonl", [played("a"), played("b", "wrong")]))
    (source,) = viewed.get("state")["sources"]
    assert (source["name"], source["is_run"], source["files"][0]["label"]) == ("base", False, "base")
    assert viewed.get("curves", source="base")["series"] == {}
    assert viewed.get("failures", source="base")["totals"][0]["counts"] == {"correct": 1, "right_rows": 1}


def test_the_gold_is_shown_or_it_is_said_why_not(
    tmp_path: Path, generated_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(generated_cache))
    question = load_dataset("synthetic").questions[0]
    fields = {"question": question.text}
    records = [
        played(question.question_id, "wrong", question.db_id, **fields),
        played(question.question_id, "wrong", question.db_id, question="another text"),
        played("unknown", "wrong"),
    ]
    path = evaluate_alone(tmp_path / "base.jsonl", records)
    library = Library([path])
    library.state()
    gold = library.gold(LINES)
    assert gold["sql"] == question.gold_sql
    assert (gold["count"], gold["why"]) == (len(question.gold.rows), "")
    assert library.gold(LINES + 1)["why"] == "synthetic as it is here has another question under this id"
    assert library.gold(LINES + 2)["why"] == "synthetic as it is here holds no question unknown"
    path.with_suffix(ABOUT).unlink()
    assert library.gold(LINES)["why"].endswith("it is written when the evaluation ends")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/episodes/999", 404),
        ("/api/episodes/999/gold", 404),
        (f"/api/episodes/{2**64}", 422),
        (f"/api/episodes?offset={2**64}", 422),
        (f"/api/episodes?min_step={2**64}", 422),
        ("/api/curves?source=nobody", 404),
        ("/api/compare?a=1&b=77", 404),
        ("/api/compare?a=x&b=1", 422),
        ("/api/episodes?limit=100000", 422),
        ("/api/episodes?order=random", 422),
        ("/api/nothing", 404),
        ("/%2e%2e/app.py", 404),
        ("/vendor/..%2f..%2fapp.py", 404),
        ("/playground/..%2fpages.py", 404),
    ],
)
def test_what_there_is_not_is_refused(viewed: Viewed, path: str, status: int) -> None:
    assert viewed.ask(path).status_code == status


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "10.0.0.1:8060"])
def test_a_page_under_another_name_is_refused(viewed: Viewed, host: str) -> None:
    assert viewed.ask("/api/state", host=host).status_code == 400


def test_every_reply_is_under_the_policy(viewed: Viewed) -> None:
    for path in ("/", "/app.js", "/api/state", "/playground/results.js", "/api/episodes/999"):
        headers = viewed.ask(path).headers
        assert "script-src 'self'" in headers["content-security-policy"], path
        assert headers["x-content-type-options"] == "nosniff"
    assert viewed.ask("/api/state", "POST").status_code == 405


def test_numbers_that_are_none_are_null(viewed: Viewed, run: RunFolder) -> None:
    train(run, 3, [], kl=float("nan"))
    assert viewed.get("curves", source="first")["series"]["kl"]["steps"] == [1, 2]


def test_a_broken_log_is_reported_and_affects_no_other(viewed: Viewed, run: RunFolder) -> None:
    with run.metrics_path.open("a", encoding="utf-8") as file:
        file.write("{\n")
    assert viewed.ask("/api/curves", source="first").status_code == 422
    (about,) = viewed.get("state")["sources"]
    assert "metrics.jsonl, line 3" in about["trouble"][0]
    assert viewed.get("episodes")["total"] == 6


@pytest.mark.parametrize(("first", "last"), [(1, 1), (1, 40), (1, 41), (101, 1000), (5, 84)])
def test_failures_are_all_counted_in_a_bounded_number_of_columns(first: int, last: int) -> None:
    counts: list[tuple[int, str | None, str, int]] = []
    for step in range(first, last + 1):
        counts += [(step, None, "correct", 2), (step, "gave_up", "wrong", 1), (step, None, "failed", 5)]
    bars = failures_over(counts)
    assert len(bars) <= BARS
    assert (bars[0]["first"], bars[-1]["last"]) == (first, last)
    steps = last - first + 1
    assert sum(bar["counts"]["right"] for bar in bars) == 2 * steps
    assert sum(bar["counts"]["gave_up"] for bar in bars) == steps
    assert all(one["last"] + 1 == other["first"] for one, other in itertools.pairwise(bars))
    assert failures_over([(1, None, "failed", 3)]) == []


@pytest.mark.parametrize("name", VENDORED)
def test_what_is_vendored_is_what_was_published(name: str) -> None:
    assert hashlib.sha256((PAGE / "vendor" / name).read_bytes()).hexdigest() == VENDORED[name]


def test_nothing_comes_from_elsewhere_and_licences_are_kept() -> None:
    own = [path for path in PAGE.iterdir() if path.suffix in (".js", ".css", ".html")]
    assert len(own) > 5
    assert not [path.name for path in own if "http://" in (text := path.read_text("utf-8")) or "https://" in text]
    assert {path.name for path in (PAGE / "vendor").glob("*.LICENSE")} == {
        "uPlot.LICENSE",
        "htm.LICENSE",
        "preact.LICENSE",
    }


def test_a_port_that_is_taken_is_named_with_the_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "first")
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["view", str(tmp_path), "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"sqlenv view: port {port} is not available (")
    assert "--port 0" in error


def test_a_path_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith(f"sqlenv view: there is no {tmp_path / 'none'}; give the folder of a run")


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is this machine there")
def test_in_a_container_it_can_be_reached_from_outside_under_names_of_this_machine_alone(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    command = [sys.executable, "-m", "sqlenv", "view", str(tmp_path), "--host", "0.0.0.0", "--port", "0"]
    environment = {**os.environ, CACHE_VARIABLE: str(tmp_path / "cache")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as view:
        try:
            assert view.stdout is not None
            port = int(view.stdout.readline().split("http://127.0.0.1:")[1].split("/")[0])
            statuses = []
            for host in ("localhost", "evil.example"):
                connection = http.client.HTTPConnection("127.0.0.2", port, timeout=60)
                connection.request("GET", "/", headers={"Host": host})
                statuses.append(connection.getresponse().status)
                connection.close()
        finally:
            view.terminate()
    assert statuses == [200, 400]
