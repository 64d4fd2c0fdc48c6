"""The report: self-contained, escaped, honest about what is there, complete for partial runs."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from env_server.types import RewardComponents
from tests.trainer.records import make_record
from trainer.eval.run_files import Alert, Evaluation, RunFolder, RunFolderError, episode_line
from trainer.eval.statistics import summarize
from trainer.report.comparison import Side
from trainer.report.curves import TIMES
from trainer.report.report import comparable, headline, run, write_report
from trainer.rollout.episodes import EpisodeRecord, Turn

HOSTILE = "</pre><script>alert('x')</script><img src=http://evil.example/a.png onerror=x>\"&{{ 7*7 }}{% raw %}$\\frac$"
FAMILIES = ("count", "join", "top")
HARDNESS = ("easy", "medium", "hard", "extra")
VOID = {"meta", "br", "img", "link", "input", "hr"}


def make_turn(text: str, terminal: float = 0.0, error: str = "") -> dict[str, object]:
    reward = RewardComponents(step_cost=-0.02, operational=-0.02, terminal=terminal, total=-0.02 + terminal)
    kind, _, argument = text.partition(" ")
    turn = Turn(text, kind, argument, kind != "SELECT", "" if error else "17", error, reward)
    return asdict(turn) | {"reward": reward.model_dump()}


def make_episode(index: int, won: bool, text: str = "") -> EpisodeRecord:
    turns = [make_turn(f"DESCRIBE {text or 'patients'}"), make_turn(f"ANSWER {text or 17}", float(won))]
    if not won:
        turns.insert(1, make_turn("SELECT nme FROM t", error=text or "no such column: nme"))
    about: dict[str, Any] = {"hardness": HARDNESS[index % 4], "family": FAMILIES[index % 3], "turns": turns}
    outcome = "correct" if won else "wrong"
    return make_record(f"q{index}", outcome, f"{text}db{index % 6}", question=f"{text}How many, {index}?", **about)


def make_episodes(successes: int, n: int = 48, text: str = "") -> list[EpisodeRecord]:
    order = random.Random(3).sample(range(n), n)
    return [make_episode(i, order[i] < successes, text) for i in range(n)]


def make_played(label: str, records: list[EpisodeRecord], order: int = 0, **fields: Any) -> Side:
    usual = {"data": "synthetic", "split": "eval", "answer_mode": "value"}
    summary = summarize(records, {"gold_empty": 2})
    return Side(label, records, Evaluation(label, label, order=order, summary=summary, **usual | fields))


BEFORE, AFTER = make_played("before", make_episodes(12), 1), make_played("after", make_episodes(40), 3)


def add_evaluation(folder: RunFolder, label: str, records: list[EpisodeRecord], order: int = 0) -> None:
    played = make_played(label, records, order)
    assert played.evaluation is not None
    folder.write_evaluation(played.evaluation, played.records)


def add_training(folder: RunFolder, steps: int = 12, name: str = "reward_correctness") -> None:
    ends = {"min": 1 - 1e-5, "mean": 1.0, "max": 1 + 1e-5}
    ratio = {f"sampling/importance_sampling_ratio/{end}": value for end, value in ends.items()}
    times = {f"time/{part}": 10.0 - i for i, part in enumerate(TIMES)}
    with folder.metrics_writer() as metrics, folder.episodes_writer() as episodes:
        for step in range(1, steps + 1):
            rewards = {"reward": step / steps, f"rewards/{name}/mean": step / steps}
            signals = {"rollout/no_signal": 1 - step / 16, "entropy": 1 / step, "rollout/exploration_entropy": 0.5}
            metrics.write({"step": step, **rewards, "reward_weights/progress": 0.2 / step, **signals, **ratio, **times})
            for index, record in enumerate(make_episodes(step, 16)):
                failed = replace(record, outcome="failed", failure="Unreachable: gone")
                episodes.write_lines(episode_line(step, failed if index == 0 else record))
        metrics.write({"step": steps, "grad_norm": math.nan})


def make_run(path: Path, text: str = "") -> RunFolder:
    notes = f"Warmed up on mixed play. {text}\n\nThe control is clean play."
    config = {
        "base_notes": notes,
        "grpo": {"learning_rate": 1e-4, "hub_token": "s3cret", "beta": 0.0, "x": text},
        "departures": {"learning_rate": 1e-6, "hub_token": None, "x": "plain", "output_dir": "runs/train"},
        "versions": {"trl": "1.16.0"},
        "machine": {
            "commit": f"c0ffee{text}",
            "cores": 2,
            "memory_gib": 7.8,
            "processor": "a processor",
            "python": "3.11.9",
        },
    }
    folder = RunFolder.create(path, config)
    add_training(folder, name=f"reward_correctness{text}".replace("/", ""))
    folder.add_alert(Alert(7, f"entropy is gone{text}", "0.001 nats", "the rate is too large", "`--beta 0.02`"))
    scores = {"random": 0, "before": 12, "control": 38, "after": 40, "oracle": 48}
    for order, (label, successes) in enumerate(scores.items()):
        add_evaluation(folder, label, make_episodes(successes, text=text), order)
    return folder


class Page(HTMLParser):
    """A strict reader: tags must nest, and text, tags and attributes are collected."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.headings: list[int] = []
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if re.fullmatch(r"h\d", tag):
            self.headings.append(int(tag[1]))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def read(folder: RunFolder) -> tuple[str, Page]:
    html = write_report(folder.path).read_text(encoding="utf-8")
    return html, Page(html)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture(scope="module")
def whole(folder: RunFolder) -> tuple[str, Page]:
    return read(folder)


def test_a_whole_run_has_every_part(whole: tuple[str, Page]) -> None:
    _, page = whole
    for part in (
        "On unseen databases, success rose from 25.0% (",
        "+58.3 points (",
        "Paired over 48 questions of 6 databases",
        "Warmed up on mixed play.",
        "The control is clean play.",
        "Success by difficulty",
        "Success by family",
        "How the episodes ended",
        "gold_empty",
        "12 of 192 training episodes failed and were masked: Unreachable (12).",
        "Not finite at some steps, and left out of the curves: grad_norm (1).",
        "Step 7: entropy is gone (0.001 nats). Likely cause: the rate is too large. Fix: --beta 0.02.",
        "A step took 52 s on average: training 19%, push 17%, generation 15%,",
        "reward 0.08333 1 The weighted reward, which GRPO trains on",
        "rewards/reward_correctness/mean 0.08333 1 Mean of one reward function before its weight; all but",
        "reward_weights/progress 0.2 0.01667 The weight of one reward in this step",
        "Wrong before, right after",
        "Wrong before and after",
        "step cost -0.02, terminal +1.00",
        "not in the action format: taken as a raw query",
        "commit c0ffee",
        "hardware a processor, 2 cores, 7.8 GiB of memory",
        "versions trl 1.16.0, Python 3.11.9",
        "training took 10:24 (12 steps, with what lies between them)",
        "argument this run default learning_rate 0.0001 1e-06 x plain",
        "Drawn at random",
        "Why episodes failed",
        "gave up: an empty answer, or one on no evidence",
        "How it explored",
    ):
        assert part in page.text
    assert "not complete" not in page.text
    assert page.tags.count("img") == 6


def require_self_contained(html: str, page: Page) -> None:
    """Nothing runs, nothing is asked for, and the file is not too large."""
    assert not {"script", "link", "iframe", "image", "object", "form"} & set(page.tags)
    assert not {"srcset", "action", "onerror"} & {name for name, _ in page.attributes}
    for name, value in page.attributes:
        assert value is None or name not in ("href", "src") or value.startswith("data:image/svg+xml;base64,")
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in html
    assert "@import" not in html
    assert len(html) < 1_500_000


def test_the_page_is_self_contained_and_well_structured(whole: tuple[str, Page]) -> None:
    html, page = whole
    require_self_contained(html, page)
    assert "prefers-color-scheme: dark" in html
    assert page.headings[0] == 1
    assert page.headings.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(page.headings, page.headings[1:], strict=False))
    assert ("lang", "en") in page.attributes
    assert 'name="viewport"' in html


def test_the_same_run_gives_the_same_report(folder: RunFolder, whole: tuple[str, Page]) -> None:
    assert read(folder)[0] == whole[0]


def test_secrets_of_the_config_stay_out(whole: tuple[str, Page]) -> None:
    assert "s3cret" not in whole[0]


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    html, page = read(make_run(tmp_path / "<b>run", HOSTILE))
    require_self_contained(html, page)
    assert page.tags.count("img") == 6
    assert "<b>run" not in html
    for words in ("{{ 7*7 }}", "alert('x')", "<b>run"):
        assert words in page.text


@pytest.mark.parametrize(
    ("fill", "missing"),
    [
        (
            RunFolder.config,
            "an evaluation before training, an evaluation after training, training metrics, training episodes",
        ),
        (
            lambda folder: add_evaluation(folder, "before", make_episodes(10)),
            "an evaluation after training, training metrics",
        ),
        (add_training, "an evaluation before training, an evaluation after training."),
        (lambda folder: folder.metrics_path.write_text('{"step": 1, "lo'), "training metrics, training episodes"),
    ],
)
def test_partial_runs_say_what_is_missing(tmp_path: Path, fill: Callable[[RunFolder], object], missing: str) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    fill(folder)
    _, page = read(folder)
    assert missing in page.text


def told(before: Side | None, after: Side | None) -> tuple[str, str]:
    return headline(before, after, None if before is None or after is None else comparable(before, after))


def test_headlines() -> None:
    assert "did not change measurably: 25.0%" in told(BEFORE, replace(BEFORE))[0]
    assert "success fell from 83.3%" in told(AFTER, BEFORE)[0]
    assert told(None, None)[0] == "No evaluation before or after training yet."
    assert told(BEFORE, None)[0].startswith("Success before training: 25.0% (")
    assert told(None, AFTER)[0].startswith("Success after training: 83.3% (")
    other = make_played("after", AFTER.records, data="spider")
    assert "Not comparable: the data differs (synthetic and spider)" in told(BEFORE, other)[1]
    seen = make_played("before", BEFORE.records, unseen_databases=False)
    assert told(seen, AFTER)[0].startswith("On unseen questions about databases seen in training, success rose")
    best = make_played("after", AFTER.records, step=8, best_of=3)
    assert "that of step 8, was chosen as the best of 3 by these very questions" in told(BEFORE, best)[1]


def test_failed_episodes_are_left_out_of_the_pairing_and_named() -> None:
    failed = replace(AFTER.records[0], outcome="failed", turns=[], steps=0)
    _, detail = told(BEFORE, make_played("after", [failed, *AFTER.records[1:]]))
    assert "Paired over 47 questions" in detail
    assert "left out: 1 question." in detail


def test_evaluations_without_a_common_question_are_not_compared() -> None:
    left, right = (make_played("before", records) for records in (BEFORE.records[:20], BEFORE.records[20:]))
    assert comparable(left, right) == "they have no judged question in common"


def test_long_texts_are_cut(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {"x": "&" * 500_000})

    def long(records: Sequence[EpisodeRecord]) -> list[EpisodeRecord]:
        return [replace(r, turns=[make_turn("QUERY " + "<" * 5_000, error="&" * 5_000)] * 15) for r in records]

    add_evaluation(folder, "before", long(BEFORE.records))
    add_evaluation(folder, "after", long(AFTER.records), 1)
    require_self_contained(*read(folder))


def test_the_command_prints_what_it_wrote(
    folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "curve.png"
    assert run([str(folder.path), "--png", str(picture)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(folder.report_path), str(picture)]
    assert picture.stat().st_size > 1_000
    with pytest.raises(RunFolderError, match="there is no folder"):
        run([str(tmp_path / "nowhere")])
