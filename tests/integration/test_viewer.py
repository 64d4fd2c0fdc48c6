"""`sqlenv view` as a real process, in a real browser: runs that are finished, and one that grows.

Clicks and keys are the browser's own input events; what is asserted is what a person sees. Skipped where there is no
Chromium.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from benchmarks.server_process import ServerProcess
from env_server.cache import CACHE_VARIABLE
from env_server.data.loading import load_dataset
from env_server.dataset import Split
from tests.integration.chromium import chromium, complaints_of, needs_chromium
from tests.trainer.viewer.runs import evaluate, evaluate_alone, make_run, make_turn, played, train
from trainer.eval.run_files import Alert, RunFolder
from trainer.report.report import write_report
from trainer.viewer.library import LINES

pytestmark = needs_chromium

MARKUP = "<img src=x onerror=window.pwned=1>"
METRICS = {
    "kl": 0.01,
    "entropy": 0.6,
    "grad_norm": 0.4,
    "learning_rate": 1e-5,
    "reward_std": 0.3,
    "rewards/reward_x/mean": 0.2,
}
TIMES = {
    f"time/{part}": 0.5 for part in ("training", "push", "generation", "environment", "judging", "queue", "client")
}
NONE = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
    yield page
    page.close()


@pytest.fixture
def complaints(page: Page) -> list[str]:
    """Errors on the page's console, violations of the policy among them, and addresses elsewhere."""
    found = complaints_of(page)
    page.on(
        "request", lambda request: None if urlsplit(request.url).hostname == "127.0.0.1" else found.append(request.url)
    )
    return found


def fill(run: RunFolder, questions: list[tuple[str, str, str]]) -> None:
    """Twelve steps of training, and the questions before and after it."""
    evaluate(run, "before", [played(name, "wrong", db, question=text) for name, db, text in questions], step=0)
    for step in range(1, 13):
        records = [played(name, "correct" if step > 6 else "wrong", db, question=text) for name, db, text in questions]
        train(run, step, records, **METRICS, **TIMES | {"time/other": 0.1})
    after = [played(name, "correct", db, question=text) for name, db, text in questions[:-1]]
    gave_up = [make_turn("ANSWER", MARKUP, "The answer is wrong.")]
    lost = played(
        questions[-1][0], "wrong", questions[-1][1], question=questions[-1][2], turns=gave_up, steps=1, reward=-0.02
    )
    evaluate(run, "after", [*after, lost], step=12)
    run.add_alert(Alert(4, "the policy stopped exploring", "entropy 0.01", "a cause", "a cure"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, generated_cache: Path) -> Path:
    """Two runs and an evaluation by itself, of three questions of the synthetic data and one with markup."""
    folder = tmp_path_factory.mktemp("view") / "runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(generated_cache))
        chosen = load_dataset("synthetic").select(Split.EVAL)[:60:20]
    questions = [(question.question_id, question.db_id, question.text) for question in chosen]
    questions.append(("odd", "shop", f"What is {MARKUP}?"))
    fill(make_run(folder / "first"), questions)
    fill(make_run(folder / "second", learning_rate=3e-4), questions)
    evaluate_alone(folder / "base.jsonl", [played(name, "wrong", db, question=text) for name, db, text in questions])
    return folder


def viewing(folder: Path, cache: Path) -> ServerProcess:
    command = [sys.executable, "-m", "sqlenv", "view", str(folder), "--port", "{port}"]
    return ServerProcess(command, folder.parent / "view.log", {CACHE_VARIABLE: str(cache)})


@pytest.fixture(scope="module")
def server(folder: Path, generated_cache: Path) -> Iterator[str]:
    with viewing(folder, generated_cache) as running:
        yield running.url


def open_page(page: Page, server: str, place: str = "") -> None:
    page.goto("about:blank")
    page.goto(f"{server}/#/{place}")


def test_the_curves_of_all_runs_are_drawn(page: Page, server: str, complaints: list[str]) -> None:
    open_page(page, server)
    expect(page.locator(".source input")).to_have_count(2)
    expect(page.locator(".source", has_text=re.compile("evaluations", re.I))).to_contain_text("base")
    expect(page.locator(".chart canvas").first).to_be_visible()
    titles = page.locator(".chart figcaption b").all_inner_texts()
    assert {
        "success",
        "KL divergence from the reference",
        "entropy per token, in nats",
        "reward for x",
        "gradient norm",
        "learning rate",
    } <= set(titles)
    assert {
        "weighted reward",
        "std of the weighted reward",
        "seconds per step, first",
        "seconds per step, second",
    } <= set(titles)
    success = page.locator(".plot").first
    label = success.get_attribute("aria-label") or ""
    assert "first, evaluations 75.0%" in label
    assert "second, training" in label
    card = page.locator(".source", has_text="first")
    expect(card).to_contain_text("step 12 of 10")
    expect(card).to_contain_text("1 alert")
    drawn = page.evaluate(
        """() => { const canvas = document.querySelector("canvas");
          const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          return pixels.some((value, i) => i % 4 === 3 && value > 0); }"""
    )
    assert drawn
    success.hover()
    expect(page.locator(".readout").first).to_contain_text("step ")
    expect(page.locator(".readout").nth(1)).to_contain_text("step ")
    card.locator("input[type=checkbox]").uncheck()
    expect(page.locator(".chart", has_text="seconds per step, first")).to_have_count(0)
    expect(page.locator(".chart", has_text="seconds per step, second")).to_have_count(1)
    assert complaints == []


def test_episodes_are_found_and_one_is_read_beside_another(page: Page, server: str, complaints: list[str]) -> None:
    open_page(page, server, "episodes")
    expect(page.locator("#found")).to_contain_text("116 episodes")
    page.select_option("[name=source]", "first")
    expect(page.locator("#found")).to_contain_text("56 episodes")
    page.select_option("[name=kind]", "right_rows")
    expect(page.locator("#found")).to_contain_text("28 episodes")
    page.select_option("[name=label]", "after")
    expect(page.locator("#found")).to_contain_text("0 episodes")
    page.select_option("[name=kind]", "any")
    expect(page.locator("#found")).to_contain_text("1 episode ·")
    expect(page.locator(".episode-row .how")).to_have_text(re.compile("gave up"))
    page.click("text=Clear filters")
    expect(page.locator("#found")).to_contain_text("116 episodes")
    page.click("[name=text]")
    page.keyboard.type('"no such column" lamp')
    expect(page.locator("#found")).to_contain_text("114 episodes")
    page.fill("[name=min_step]", "12")
    expect(page.locator("#found")).to_contain_text("8 episodes · 100.0% right")
    address = page.evaluate("location.href")
    assert "min_step=12" in address
    page.locator(".episode-row", has_text="first").last.click()
    expect(page.locator(".step")).to_have_count(3)
    expect(page.locator(".step").nth(0).locator(".error")).to_have_text("not found: no such column: nme")
    expect(page.locator(".step").nth(1).locator(".reward")).to_contain_text(f"clipped {MINUS}0.01")
    expect(page.locator(".step").nth(1).locator(".reward")).to_contain_text("5 tokens")
    assert page.locator(".step").nth(1).locator("tr").all_inner_texts() == ["name", "lamp"]
    expect(page.locator(".step").nth(2).locator(".sum")).to_have_text("total +1.11")
    expect(page.locator("#gold-sql")).to_contain_text("SELECT")
    page.locator(".same a", has_text="second · before").click()
    expect(page.locator(".transcript")).to_have_count(2)
    expect(page.locator(".transcript").nth(1)).to_contain_text("Saw the right rows, answered wrongly.")
    page.click("text=Close")
    expect(page.locator(".transcript")).to_have_count(1)
    page.go_back()
    page.go_back()
    page.go_back()
    expect(page.locator("#found")).to_contain_text("8 episodes")
    expect(page.locator("[name=min_step]")).to_have_value("12")
    assert complaints == []


def test_failures_lead_to_their_episodes(page: Page, server: str, complaints: list[str]) -> None:
    open_page(page, server, "failures?run=first")
    expect(page.locator(".bar-of")).to_have_count(12)
    rows = {
        row.locator("th").inner_text(): row.locator("td").all_inner_texts() for row in page.locator("tbody tr").all()
    }
    assert rows["right"] == ["24 50.0%", NONE, "3 75.0%"]
    assert rows["saw the right rows, answered wrongly"] == ["24 50.0%", "4 100.0%", NONE]
    assert rows["gave up: an empty answer, or one on no evidence"] == [NONE, NONE, "1 25.0%"]
    page.locator(".bar-of").nth(2).locator("a").click()
    expect(page.locator("#found")).to_contain_text("4 episodes · 0.0% right")
    expect(page.locator(".episode-row").first).to_contain_text("step 3")
    assert complaints == []


def test_two_evaluations_are_compared(page: Page, server: str, complaints: list[str]) -> None:
    open_page(page, server, "compare")
    expect(page.locator(".verdict")).to_contain_text("A 0.0%")
    expect(page.locator(".verdict")).to_contain_text("paired over 4 questions")
    expect(page.locator(".flips .list-head").first).to_have_text(re.compile("right in b alone: 3 questions", re.I))
    page.locator(".flips .episode-row").first.click()
    expect(page.locator(".transcript")).to_have_count(2)
    expect(page.locator(".transcript h2").first).to_have_text(re.compile("before"))
    expect(page.locator(".transcript h2").last).to_have_text(re.compile("after"))
    open_page(page, server, "compare")
    page.locator("select").first.select_option(label="first: after")
    expect(page.locator(".panel", has_text=re.compile("started with other flags", re.I))).to_contain_text(
        "learning_rate"
    )
    page.locator("select").first.select_option(label="second: after")
    expect(page.locator(".verdict")).to_contain_text("A 75.0%")
    expect(page.locator(".verdict")).to_contain_text("B 0.0%")
    assert complaints == []


def test_markup_from_a_run_is_shown_and_never_parsed(page: Page, server: str, complaints: list[str]) -> None:
    open_page(page, server, "episodes?question_id=odd&label=after&source=first")
    page.locator(".episode-row").click()
    expect(page.locator("h1")).to_have_text(f"What is {MARKUP}?")
    expect(page.locator(".step code")).to_have_text(MARKUP)
    expect(page.locator(".gold")).to_contain_text("holds no question odd")
    expect(page.locator("main img")).to_have_count(0)
    assert page.evaluate("window.pwned") is None
    refused = page.evaluate("(() => { try { document.body.innerHTML = '<p>x'; } catch (e) { return e.name; } })()")
    assert refused == "TypeError"
    assert complaints[:-1] == [] or all("TrustedHTML" in text for text in complaints)


@pytest.mark.parametrize("width", [360, 390, 800, 1280])
def test_nothing_is_wider_than_the_screen(page: Page, server: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    for place, shown in (
        ("", ".chart"),
        ("episodes", ".episode-row"),
        (f"episode/{LINES}", ".step"),
        (f"episode/{LINES}/{LINES + 1}", ".transcript >> nth=1"),
        ("failures", ".bar-of"),
        ("compare", ".verdict"),
    ):
        open_page(page, server, place)
        expect(page.locator(shown).first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, place


def cells_out_of_sight(page: Page, cells: str) -> int:
    """How many of the cells that are laid out reach beyond the left or right edge of the screen."""
    found: int = page.evaluate(
        """(cells) => [...document.querySelectorAll(cells)].filter((cell) => cell.offsetParent !== null)
          .map((cell) => cell.getBoundingClientRect())
          .filter((box) => box.left < 0 || box.right > innerWidth).length""",
        cells,
    )
    return found


def test_no_number_is_out_of_sight_on_a_phone(page: Page, server: str) -> None:
    page.set_viewport_size({"width": 360, "height": 844})
    for place, shown in (("", ".source td"), ("failures", ".numbers-table td"), ("compare", ".numbers-table td")):
        open_page(page, server, place)
        expect(page.locator(shown).first).to_be_visible()
        assert cells_out_of_sight(page, shown) == 0, place


def test_the_last_digits_of_equal_numbers_are_no_curve(page: Page, server: str) -> None:
    open_page(page, server)
    expect(page.locator(".chart").first).to_be_visible()
    flat, real = page.evaluate(
        """async () => { const { spread } = await import("./chart.js");
          return [spread(0.2, 0.1 + 0.2 - 0.1, null), spread(0.2, 0.21, null)]; }"""
    )
    assert flat == pytest.approx([0.18, 0.22])
    assert real == pytest.approx([0.1994, 0.2106])


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of the report of a run with all four evaluations."""
    run = make_run(tmp_path_factory.mktemp("report") / "run")
    records = [played(f"q{number}", "correct", f"db{number % 4}") for number in range(24)]
    for label in ("random", "before", "after", "oracle"):
        evaluate(run, label, records)
    for step in range(1, 5):
        train(run, step, records, **METRICS, **{"rollout/no_signal": 0.5})
    return write_report(run.path).as_uri()


@pytest.mark.parametrize("width", [390, 768, 1200])
def test_the_report_of_a_run_fits_the_screen(page: Page, report: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    page.goto(report)
    expect(page.locator("tbody tr", has_text="after").locator("td").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert cells_out_of_sight(page, "td") == 0
    wider = "[...document.querySelectorAll('.scroll')].filter((box) => box.scrollWidth > box.clientWidth)"
    assert page.evaluate(f"{wider}.map((box) => box.ariaLabel)") == []


def test_the_filters_are_folded_on_a_phone(page: Page, server: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    open_page(page, server, "episodes")
    expect(page.locator("[name=db_id]")).to_be_hidden()
    page.click("text=Filters")
    expect(page.locator("[name=db_id]")).to_be_visible()


def test_a_run_is_watched_while_it_grows(page: Page, tmp_path: Path, complaints: list[str]) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    with viewing(folder, tmp_path / "cache") as server:
        open_page(page, server.url)
        expect(page.locator("main")).to_contain_text("Nothing to see yet")
        run = make_run(folder / "live")
        evaluate(run, "before", [played("a", "wrong")], step=0)
        expect(page.locator(".source")).to_contain_text("before")
        train(run, 1, [played("a", "wrong"), played("b")], **METRICS)
        expect(page.locator(".source")).to_contain_text("step 1 of 10")
        expect(page.locator("header")).to_contain_text("live at step 1 of 10")
        expect(page.locator(".chart", has_text="entropy")).to_be_visible()
        page.click("text=Episodes")
        expect(page.locator("#found")).to_contain_text("3 episodes")
        page.fill("[name=min_step]", "1")
        expect(page.locator("#found")).to_contain_text("2 episodes · 50.0% right")
        train(run, 2, [played("a"), played("b")], **METRICS)
        expect(page.locator("#found")).to_contain_text("4 episodes · 75.0% right")
        expect(page.locator(".episode-row").first).to_contain_text("step 2")
        run.resume_from(1)
        train(run, 2, [played("a", "wrong")], **METRICS)
        expect(page.locator("#found")).to_contain_text("3 episodes · 33.3% right")
        assert server.stop(2) == 0
    assert [text for text in complaints if "ERR_CONNECTION_REFUSED" not in text] == []
