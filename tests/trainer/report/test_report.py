"""The report: self-contained, escaped, honest about what is there, complete for partial runs."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from env_server.types import RewardComponents
from trainer.report.report import (
    Played,
    group_table,
    headline,
    metrics_table,
    mismatch,
    redacted,
    run,
    write_report,
)
from trainer.results.run_files import Evaluation, RunFolder, RunFolderError
from trainer.results.statistics import summarize
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


def make_record(index: int, won: bool, text: str = "") -> EpisodeRecord:
    turns = [make_turn(f"DESCRIBE {text or 'patients'}"), make_turn(f"ANSWER {text or 17}", float(won))]
    if not won:
        turns.insert(1, make_turn("SELECT nme FROM t", error=text or "no such column: nme"))
    return EpisodeRecord(
        episode_id=f"e{index}",
        question_id=f"q{index}",
        db_id=f"{text}db{index % 6}",
        question=f"{text}How many, number {index}?",
        hardness=HARDNESS[index % 4],
        family=FAMILIES[index % 3],
        outcome="correct" if won else "wrong",
        reward=1.0 if won else -0.06,
        steps=len(turns),
        parse_rate=1.0,
        tokens=20,
        failure="",
        turns=turns,
    )


def make_records(successes: int, n: int = 48, text: str = "") -> list[EpisodeRecord]:
    order = random.Random(3).sample(range(n), n)
    return [make_record(i, order[i] < successes, text) for i in range(n)]


def make_played(label: str, records: list[EpisodeRecord], order: int = 0, data: str = "synthetic") -> Played:
    summary = summarize(records, {"gold_empty": 2})
    return Played(Evaluation(label, label, data, "eval", "value", order, summary), records)


def add_evaluation(folder: RunFolder, label: str, records: list[EpisodeRecord], order: int = 0) -> None:
    played = make_played(label, records, order)
    folder.write_evaluation(played.evaluation, played.records)


def add_training(folder: RunFolder, steps: int = 12, name: str = "reward_correctness") -> None:
    with folder.metrics_writer() as metrics, folder.episodes_writer() as episodes:
        for step in range(1, steps + 1):
            ratio = {
                f"sampling/importance_sampling_ratio/{k}": 1.0 + v
                for k, v in (("min", -1e-5), ("mean", 0), ("max", 1e-5))
            }
            metrics.write({"step": step, "reward": step / steps, f"rewards/{name}/mean": step / steps, **ratio})
            for index, record in enumerate(make_records(step, 16)):
                failed = replace(record, outcome="failed", failure="Unreachable: gone")
                episodes.write_episode(step, failed if index == 0 else record)


def make_run(path: Path, text: str = "") -> RunFolder:
    notes = f"Warmed up on mixed play. {text}\n\nThe control is clean play."
    folder = RunFolder.create(path, {"base_notes": notes, "learning_rate": 1e-4, "hub_token": "s3cret", "x": text})
    add_training(folder, name=f"reward_correctness{text}".replace("/", ""))
    scores = {"random": 0, "before": 12, "control": 38, "after": 40, "oracle": 48}
    for order, (label, successes) in enumerate(scores.items()):
        add_evaluation(folder, label, make_records(successes, text=text), order)
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

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

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
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Page]:
    return read(make_run(tmp_path_factory.mktemp("runs") / "tiny"))


def test_where_the_schema_was_seen_in_training_it_does_not_say_unseen_databases(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for played in (make_played("before", make_records(12), 1), make_played("after", make_records(40), 3)):
        folder.write_evaluation(replace(played.evaluation, unseen_databases=False), played.records)
    _, page = read(folder)
    assert "On unseen questions about databases seen in training, success rose" in page.text


def test_a_whole_run_has_every_part(whole: tuple[str, Page]) -> None:
    _, page = whole
    for part in (
        "On unseen databases, success rose from 25.0% (",
        "+58.3 points (",
        "Paired over 48 questions of 6 databases",
        "Warmed up on mixed play.",
        "The control is clean play.",
        "Success by hardness",
        "Success by family",
        "How the episodes ended",
        "gold_empty",
        "Importance ratio over 12 steps: mean 1.000000, smallest 0.999990, largest 1.000010",
        "12 of 192 training episodes failed and were masked: Unreachable (12).",
        "Wrong before, right after",
        "Wrong before and after",
        "step cost -0.02, terminal +1.00",
        "not in the action format: taken as a raw query",
        "learning_rate",
    ):
        assert part in page.text
    assert "not complete" not in page.text
    assert page.tags.count("svg") == 6


def test_the_page_is_self_contained_and_bounded(whole: tuple[str, Page]) -> None:
    html, page = whole
    assert not {"script", "link", "img", "iframe", "image", "object", "form"} & set(page.tags)
    assert not {"src", "srcset", "action", "xlink:href"} & {name for name, _ in page.attributes}
    assert all(value is not None and value.startswith("#") for name, value in page.attributes if name == "href")
    assert "//" not in re.sub(r"</?pre.*?</pre>", "", html, flags=re.DOTALL)
    assert "@import" not in html
    assert "default-src 'none'" in html
    assert "prefers-color-scheme: dark" in html
    assert len(html) < 1_500_000


def test_the_page_is_well_structured(whole: tuple[str, Page]) -> None:
    html, page = whole
    assert page.headings[0] == 1
    assert page.headings.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(page.headings, page.headings[1:], strict=False))
    assert ("lang", "en") in page.attributes
    assert 'name="viewport"' in html
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_the_same_run_gives_the_same_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "tiny")
    assert read(folder)[0] == read(folder)[0]


def test_secrets_of_the_config_stay_out(whole: tuple[str, Page]) -> None:
    assert "s3cret" not in whole[0]
    assert redacted({"a": [{"api_key": "k", "max_tokens": 5}], "token": "", "Password": "p"}) == {
        "a": [{"api_key": "(hidden)", "max_tokens": 5}],
        "token": "",
        "Password": "(hidden)",
    }


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    html, page = read(make_run(tmp_path / "<b>run", HOSTILE))
    assert not {"script", "img"} & set(page.tags)
    assert "<b>run" not in html
    assert "onerror" not in {name for name, _ in page.attributes}
    assert "<script" not in html
    assert "{{ 7*7 }}" in page.text
    assert "alert('x')" in page.text
    assert "<b>run" in page.text


@pytest.mark.parametrize(
    ("fill", "missing"),
    [
        (
            RunFolder.config,
            "an evaluation before training, an evaluation after training, training metrics, training episodes",
        ),
        (
            lambda folder: add_evaluation(folder, "before", make_records(10)),
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


def test_broken_numbers_are_named(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    with folder.metrics_writer() as writer:
        writer.write({"step": 1, "reward": 0.5, "grad_norm": math.nan})
    _, page = read(folder)
    assert "grad_norm (1)" in page.text


def test_headlines() -> None:
    low, high = make_played("before", make_records(12)), make_played("after", make_records(40))
    assert "did not change measurably: 25.0%" in headline(low, replace(low))[0]
    assert "success fell from 83.3%" in headline(high, low)[0]
    assert headline(None, None)[0] == "No evaluation before or after training yet."
    assert headline(low, None)[0].startswith("Success before training: 25.0% (")
    assert headline(None, high)[0].startswith("Success after training: 83.3% (")
    other = make_played("after", make_records(40), data="spider")
    assert "Not comparable: the data differs (synthetic and spider)" in headline(low, other)[1]


def test_failed_episodes_are_left_out_of_the_pairing_and_named() -> None:
    records = make_records(40)
    records[0] = replace(records[0], outcome="failed", turns=[], steps=0)
    _, detail = headline(make_played("before", make_records(12)), make_played("after", records))
    assert "Paired over 47 questions" in detail
    assert "left out: 1 question." in detail


def test_evaluations_during_training_are_a_curve_and_in_no_table(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    _, without = read(folder)
    for step, successes in ((4, 20), (8, 30)):
        played = make_played(f"step-{step:06d}", make_records(successes))
        folder.write_evaluation(replace(played.evaluation, step=step, during=True), played.records)
    _, page = read(folder)
    assert "evaluations during training" in page.text
    assert page.tags.count("tr") == without.tags.count("tr")
    assert "step-000004" not in page.text


def test_a_policy_that_was_chosen_by_its_evaluation_says_so(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    played = make_played("after", make_records(40), 3)
    folder.write_evaluation(replace(played.evaluation, step=8, best_of=3), played.records)
    _, page = read(folder)
    assert "that of step 8, was chosen as the best of 3 by these very questions" in page.text


def test_every_metric_is_explained(whole: tuple[str, Page]) -> None:
    _, page = whole
    assert "reward 0.08333 1 Mean total reward of an episode" in page.text
    assert "rewards/reward_correctness/mean 0.08333 1 Mean of one reward function before its weight." in page.text
    assert metrics_table([]) is None


def test_evaluations_without_a_common_question_are_not_compared() -> None:
    left, right = make_records(12)[:20], make_records(12)[20:]
    assert (
        mismatch(make_played("before", left), make_played("after", right)) == "they have no judged question in common"
    )


def test_hardness_is_ordered_as_spider_orders_it() -> None:
    table = group_table("hardness", make_played("before", make_records(12)), make_played("after", make_records(40)))
    assert table is not None
    assert [row[0] for row in table.rows] == list(HARDNESS)
    assert {len(row) for row in table.rows} == {len(table.header)}
    one_side = group_table("hardness", None, make_played("after", make_records(40)))
    assert one_side is not None
    assert one_side.header == ["hardness", "after", "95% interval", "n"]
    assert group_table("family", None, None) is None


def test_long_texts_are_cut(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {"x": "&" * 500_000})

    def long(records: Sequence[EpisodeRecord]) -> list[EpisodeRecord]:
        return [replace(r, turns=[make_turn("QUERY " + "<" * 5_000, error="&" * 5_000)] * 15) for r in records]

    add_evaluation(folder, "before", long(make_records(12)))
    add_evaluation(folder, "after", long(make_records(40)), 1)
    assert len(read(folder)[0]) < 1_500_000


def test_a_broken_turn_is_named(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    add_evaluation(folder, "before", [replace(make_record(0, False), turns=[{"text": 1}])])
    add_evaluation(folder, "after", [make_record(0, True)])
    with pytest.raises(RunFolderError, match="episode e0: a turn cannot be read"):
        write_report(folder.path)


def test_the_command_prints_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "tiny")
    picture = tmp_path / "curve.png"
    assert run([str(folder.path), "--png", str(picture)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(folder.report_path), str(picture)]
    assert picture.stat().st_size > 1_000
    with pytest.raises(RunFolderError, match="there is no folder"):
        run([str(tmp_path / "nowhere")])
