"""Policies at play in the playground, in a real browser: `sqlenv chat --web` as a process, with the tiny policy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from benchmarks.server_process import SQLENV, ServerProcess
from tests.integration.chromium import chromium, complaints_of, needs_chromium
from trainer.tiny import BASE_CHECKPOINT

pytestmark = needs_chromium

QUESTION = {"question": "How many pets are there?", "sql": "SELECT COUNT(*) FROM pets"}
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def after(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second policy, which gives up after a step."""
    copy = tmp_path_factory.mktemp("policies") / "after"
    shutil.copytree(BASE_CHECKPOINT, copy)
    (copy / "sqlenv.json").write_text(json.dumps({"step_budget": 1}), encoding="utf-8")
    return copy


@pytest.fixture(scope="module")
def url(after: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("data") / "zoo"
    folder.mkdir()
    (folder / "pets.csv").write_text("pet_id,name\n1,Rex\n2,Tom\n3,<i>Kit</i>\n", encoding="utf-8")
    (folder / "questions.jsonl").write_text(json.dumps({**QUESTION, "id": "pets"}), encoding="utf-8")
    command = [*SQLENV, "chat", str(BASE_CHECKPOINT), str(after), "--data", str(folder), "--web", "--port", "{port}"]
    with ServerProcess(command, folder.parent / "chat.log", start_s=400.0) as server:  # it loads two models first
        yield server.url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(params=[WIDE, PHONE], ids=["desktop", "phone"])
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    page = browser.new_page(viewport=request.param)
    complaints = complaints_of(page)
    yield page
    assert not complaints
    page.close()


def ended(page: Page, after: Path) -> tuple[str, str]:
    """What the two columns show below their steps, once both are through."""
    lanes = page.locator(".lane")
    expect(lanes).to_have_count(2)
    assert lanes.locator("h3").all_inner_texts() == [str(BASE_CHECKPOINT), str(after)]
    expect(page.locator(".lane[aria-busy]")).to_have_count(0)
    first, second = lanes.locator(".ending").all_inner_texts()
    assert lanes.nth(1).locator(".step").count() == 1
    assert lanes.nth(0).locator(".step").count() >= 1
    assert "1 steps" not in second
    return first, second


def test_a_question_of_ones_own(page: Page, url: str, after: Path) -> None:
    page.goto(url)
    page.fill("#ask", "How many pets are there?")
    page.press("#ask", "Enter")
    expect(page.locator("#question")).to_have_text("How many pets are there?")
    for text in ended(page, after):
        assert "Correct." not in text
        assert "Wrong." not in text
        assert "Answered." in text or "No answer" in text
    expect(page.locator("#stop")).to_be_hidden()
    expect(page.locator("#composer")).to_be_hidden()


def test_a_question_of_the_data_set_and_then_oneself(page: Page, url: str, after: Path) -> None:
    page.goto(url)
    page.locator(".question").first.click()
    expect(page.locator("#composer")).to_be_visible()
    page.click("#let-play")
    expect(page.locator("#composer")).to_be_hidden()
    for text in ended(page, after):
        assert any(word in text for word in ("Correct.", "Wrong.", "No answer"))
        assert "total reward" in text
    page.click("#play-myself")
    expect(page.locator("#match")).to_be_hidden()
    page.fill("#answer", "3")
    page.press("#answer", "Enter")
    expect(page.locator("#verdict")).to_contain_text("Correct.")
