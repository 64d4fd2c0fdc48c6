"""The playground in a real browser, against the real server.

Clicks and keys are the browser's own input events; what is asserted is what a person sees. Skipped where there is no
Chromium.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from playwright.sync_api import Browser, Locator, Page, expect

from env_server.data.loading import load_dataset
from env_server.dataset import Dataset
from env_server.environment import EnvironmentFactory
from env_server.settings import DisplaySettings
from env_server.sql.display import describe_table, format_cell, format_result
from env_server.sql.sandbox import QueryResult
from env_server.sql.schema import Column, ForeignKey, Table
from env_server.types import SQLAction
from tests.integration.chromium import chromium, complaints_of, needs_chromium
from tests.integration.service import ask, open_socket, reset, serving

pytestmark = needs_chromium

TOKEN = "~~~???token/+="
MARKUP = "<img src=x onerror=window.pwned=1>"
LIGHT, DARK = "rgb(246, 248, 250)", "rgb(16, 21, 27)"
ENDLESS = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT COUNT(*) FROM c"
SHOP = f"""
CREATE TABLE items (item_id INTEGER PRIMARY KEY, name TEXT, price REAL);
INSERT INTO items VALUES (1, 'lamp', 9.5), (2, '{MARKUP}', NULL), (3, 'a | b', 1.0), (4, 'rug', 20.0);
CREATE TABLE orders (order_id INTEGER PRIMARY KEY, item_id INTEGER REFERENCES items(item_id), amount INTEGER);
INSERT INTO orders VALUES (1, 1, 2), (2, 4, 1), (3, 1, 5);
CREATE TABLE "<b onclick=window.pwned=2>odd</b>" ("<i>column</i>" TEXT);
"""
QUESTIONS = [
    {"id": "items", "database": "shop", "question": "How many items are there?", "sql": "SELECT COUNT(*) FROM items"},
    {"id": "rug", "database": "shop", "question": f"What costs the rug? {MARKUP}", "sql": "SELECT 20.0"},
    {"id": "lamps", "database": "shop", "question": "How many lamps were ordered?", "sql": "SELECT 7"},
    *(
        {"id": f"sky-{number}", "database": "sky", "question": f"What is {number} + 1?", "sql": f"SELECT {number + 1}"}
        for number in range(205)
    ),
]


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
    """Errors on the page's console, violations of the policy among them."""
    return complaints_of(page)


@pytest.fixture
def urls(page: Page) -> list[str]:
    """Every address that the page asked for."""
    found: list[str] = []
    page.on("request", lambda request: found.append(request.url))
    page.on("websocket", lambda websocket: found.append(websocket.url))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "market"
    folder.mkdir()
    for name, script in (("shop", SHOP), ("sky", "CREATE TABLE planets (name TEXT)")):
        connection = sqlite3.connect(folder / f"{name}.sqlite")
        connection.executescript(script)
        connection.close()
    entries = [{**question, "split": "train"} for question in QUESTIONS]
    (folder / "questions.json").write_text(json.dumps(entries), encoding="utf-8")
    return folder


FLAGS = ("--grace_s", "0", "--log_level", "error")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    with serving(folder.parent, folder, *FLAGS, "--step_budget", "7") as running:
        yield running.url


@pytest.fixture(scope="module")
def market(folder: Path) -> Dataset:
    return load_dataset(str(folder))


def _seen(page: Page, selector: str, text: str) -> Locator:
    """The first of these elements that holds a text, which is waited for."""
    found = page.locator(selector, has_text=text).first
    expect(found).to_be_visible()
    return found


def _start(page: Page, url: str, question: str = "How many items are there?") -> None:
    page.goto(url)
    _seen(page, ".question", question).click()
    _seen(page, "#question", question)


def _steps(page: Page, count: int) -> None:
    expect(page.locator("#steps .reward")).to_have_count(count)


def _rows(page: Page, selector: str) -> list[list[str]]:
    return [row.locator("th, td").all_inner_texts() for row in page.locator(f"{selector} tr").all()]


def _enter(page: Page, field: str, text: str) -> None:
    page.click(field)
    page.keyboard.insert_text(text)
    page.keyboard.press("Enter")


def _query(page: Page, sql: str, count: int) -> None:
    _enter(page, "#sql", sql)
    _steps(page, count)


def _poll(page: Page) -> None:
    """Have the page look at the server's load now, as it does when one comes back to it."""
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def _signed(value: float) -> str:
    text = f"{abs(value):.4f}"
    text = text[:-2] if text.endswith("00") else text.removesuffix("0")
    return "0.00" if float(text) == 0 else ("\N{MINUS SIGN}" if value < 0 else "+") + text


# --- an episode ---


def test_an_episode_is_played_by_clicks_and_keys(
    page: Page, server: str, market: Dataset, complaints: list[str], urls: list[str]
) -> None:
    _start(page, server)
    assert "market · 2 databases · 208 questions" in page.inner_text("#dataset")
    for absent in ("#ask-panel", "#let-play", "#stop", "#play-myself"):
        expect(page.locator(absent)).to_be_hidden()  # there are no policies here
    assert page.inner_text("#question-facts").split() == ["shop", "easy", "train", "items"]
    page.click("[aria-label='Describe items']")
    _steps(page, 1)
    assert _rows(page, ".step:nth-child(1)") == [
        ["column", "type", "key"],
        ["item_id", "INTEGER", "primary key"],
        ["name", "TEXT", ""],
        ["price", "REAL", ""],
    ]
    assert "4 rows" in page.inner_text("#tables li:nth-child(1)")
    page.click("[aria-label='Sample items']")
    _steps(page, 2)
    expect(page.locator("[aria-label='Sample items']")).to_be_focused()
    assert _rows(page, ".step:nth-child(2)") == [
        ["item_id", "name", "price"],
        ["1", "lamp", "9.5"],
        ["2", MARKUP, "NULL"],
        ["3", "'a | b'", "1.0"],
    ]
    _query(page, "SELECT name || ' | ' || price AS both, price FROM items WHERE price > 100", 3)
    assert _rows(page, ".step:nth-child(3)") == [["both", "price"]]
    assert "no rows" in page.inner_text(".step:nth-child(3)")
    _query(page, "SELEC 1", 4)
    assert "syntax error" in page.inner_text(".step:nth-child(4) .error")
    _query(page, "SELECT COUNT(*) FROM items", 5)
    assert _rows(page, ".step:nth-child(5)") == [["COUNT(*)"], ["4"]]
    page.click("#answer")
    page.keyboard.insert_text("4")
    page.click("#submit")
    _seen(page, "#verdict", "Correct.")

    actions = [
        *(("DESCRIBE", "items"), ("SAMPLE", "items")),
        ("QUERY", "SELECT name || ' | ' || price AS both, price FROM items WHERE price > 100"),
        *(("QUERY", "SELEC 1"), ("QUERY", "SELECT COUNT(*) FROM items"), ("ANSWER", "4")),
    ]
    expected, total = [], 0.0
    with EnvironmentFactory(market) as factory:
        environment = factory.make()
        environment.reset(question_id="items")
        for number, (kind, argument) in enumerate(actions, 1):
            seen = environment.step(SQLAction(action_type=kind, argument=argument))
            total += seen.reward
            parts: dict[str, float] = dict(seen.metadata["reward_components"])
            values = (parts["operational"], parts["progress"], parts["terminal"], seen.reward, total)
            expected.append([f"{number} {kind[0]}", *map(_signed, values)])
    assert _rows(page, "#rewards") == expected
    assert page.inner_text("#total") == _signed(total)
    assert page.inner_text("#left-steps") == "1 of 7"
    assert f"Total reward {_signed(total)} in 6 steps." in page.inner_text("#verdict")
    assert "terminal +1.00" in page.inner_text(".step:nth-child(6) .reward")
    expect(page.locator("#status")).to_contain_text("Step 6, ANSWER: The answer is correct.")
    expect(page.locator("#composer")).to_be_hidden()
    assert complaints == []
    assert all(url.replace("ws:", "http:").startswith(server) for url in urls)


def test_an_episode_is_played_by_keys_alone(page: Page, server: str) -> None:
    page.goto(server)
    _seen(page, ".question", "How many items")
    page.keyboard.press("/")
    page.keyboard.insert_text("LAMPS how")
    expect(page.locator(".question:visible")).to_have_count(1)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    _seen(page, "#question", "How many lamps were ordered?")
    page.keyboard.press("2")
    _steps(page, 1)
    assert page.inner_text(".step:nth-child(1) .action").split() == ["1", "DESCRIBE", "orders"]
    assert _rows(page, ".step:nth-child(1)")[2] == ["item_id", "INTEGER", "references items(item_id)"]
    page.keyboard.press("Shift+Digit2")
    _steps(page, 2)
    assert page.inner_text(".step:nth-child(2) .action").split() == ["2", "SAMPLE", "orders"]
    page.keyboard.press("q")
    for count, sql in ((3, "SELECT 1"), (4, "SELECT 2")):
        page.keyboard.insert_text(sql)
        page.keyboard.press("Enter")
        _steps(page, count)
    for key, recalled in (
        ("ArrowUp", "SELECT 2"),
        ("ArrowUp", "SELECT 1"),
        ("ArrowUp", "SELECT 1"),
        ("ArrowDown", "SELECT 2"),
    ):
        page.keyboard.press(key)
        expect(page.locator("#sql")).to_have_value(recalled)
    page.keyboard.press("Shift+Enter")
    page.keyboard.insert_text("-- agai")
    page.keyboard.press("n")
    page.keyboard.press("Enter")
    _steps(page, 5)
    assert "repeat \N{MINUS SIGN}0.03" in page.inner_text(".step:nth-child(5) .reward")
    page.keyboard.press("Escape")
    page.keyboard.press("a")
    page.keyboard.insert_text("7")
    page.keyboard.press("Enter")
    _seen(page, "#verdict", "Correct.")
    page.keyboard.press("r")
    expect(page.locator(".step")).to_have_count(0)
    assert page.inner_text("#left-steps") == "7 of 7"
    page.keyboard.press("?")
    _seen(page, "#help", "DESCRIBE that table")
    page.keyboard.press("1")
    page.keyboard.press("Escape")
    expect(page.locator("#help")).to_be_hidden()
    expect(page.locator(".step")).to_have_count(0)


def test_the_budget_ends_an_episode_and_another_question_begins(page: Page, server: str) -> None:
    _start(page, server)
    for count in range(1, 7):
        _query(page, f"SELECT {count}", count)
    _enter(page, "#sql", "SELECT 7")
    _seen(page, "#verdict", "Out of steps.")
    assert page.inner_text("#left-steps") == "0 of 7"
    page.keyboard.press("n")
    expect(page.locator(".step")).to_have_count(0)
    assert page.inner_text("#left-steps") == "7 of 7"


def test_a_database_is_picked_and_the_address_names_the_question(page: Page, server: str) -> None:
    page.goto(server)
    _seen(page, ".question", "How many items")
    page.select_option("#database", "sky")
    _seen(page, "#more", "5 more")
    expect(page.locator(".question")).to_have_count(200)
    page.click("#filter")
    page.keyboard.insert_text("203 what")
    expect(page.locator(".question:visible")).to_have_count(1)
    page.keyboard.press("Enter")
    _seen(page, "#question", "What is 203 + 1?")
    address = page.evaluate("location.href")
    assert address == f"{server}/#sky/sky-203"
    page.goto("about:blank")
    page.goto(address)
    _seen(page, "#question", "What is 203 + 1?")
    assert "What is 203" in page.inner_text(".question[aria-current]")


def test_starting_again_drops_the_query_that_runs(page: Page, server: str) -> None:
    _start(page, server)
    _enter(page, "#sql", ENDLESS)
    _seen(page, ".step", "running …")
    page.keyboard.press("Escape")
    page.keyboard.press("r")
    expect(page.locator(".step")).to_have_count(0)
    expect(page.locator("#notice")).to_be_hidden()
    page.fill("#sql", "")
    _query(page, "SELECT 5", 1)
    assert _rows(page, ".step:nth-child(1)") == [["5"], ["5"]]
    assert len(_rows(page, "#rewards")) == 1


# --- what comes from a database is text ---


def test_markup_from_the_data_is_shown_and_never_parsed(page: Page, server: str, complaints: list[str]) -> None:
    page.goto(server)
    _seen(page, ".question", f"What costs the rug? {MARKUP}")
    page.click("li:nth-child(2) .question")
    _seen(page, "#question", f"What costs the rug? {MARKUP}")
    odd = "<b onclick=window.pwned=2>odd</b>"
    assert page.inner_text("#tables li:nth-child(3) .name") == odd
    page.click("#tables li:nth-child(3) button")
    _steps(page, 1)
    assert "<i>column</i>" in page.inner_text("#tables li:nth-child(3) .columns")
    assert _rows(page, ".step:nth-child(1)")[1][0] == '"<i>column</i>"'
    _query(page, f"SELECT name, '{MARKUP}' AS \"<u>\" FROM items WHERE item_id = 2", 2)
    assert _rows(page, ".step:nth-child(2)") == [["name", "<u>"], [MARKUP, MARKUP]]
    _query(page, f'SELECT "{MARKUP}"."x"', 3)
    assert MARKUP in page.inner_text(".step:nth-child(3) .error")
    _enter(page, "#answer", MARKUP)
    _seen(page, "#verdict", "Wrong.")
    expect(page.locator("main").locator("img, u, i, b[onclick]")).to_have_count(0)
    assert page.evaluate("window.pwned") is None
    assert complaints == []


def test_the_browser_refuses_to_parse_text_as_html(page: Page, server: str) -> None:
    page.goto(server)
    refused = page.evaluate("(() => { try { document.body.innerHTML = '<p>x'; } catch (e) { return e.name; } })()")
    assert refused == "TypeError"


# --- the token, a full server, a server that goes away ---


def test_the_token_is_asked_for_once_and_never_part_of_an_address(page: Page, folder: Path, urls: list[str]) -> None:
    with serving(folder.parent, folder, *FLAGS, "--token", TOKEN) as server:
        page.goto(server.url)
        _seen(page, "#gate", "ASKS FOR A TOKEN")
        page.keyboard.insert_text("wrong")
        page.keyboard.press("Enter")
        _seen(page, "#gate-message", "refused that token")
        page.keyboard.insert_text(TOKEN)
        page.keyboard.press("Enter")
        _seen(page, ".question", "How many items")
        page.click(".question")
        _seen(page, "#question", "How many items")
        _query(page, "SELECT 1", 1)
        _poll(page)
        _seen(page, "#load-sessions", "1 of ")
        page.goto(f"{server.url}/?again")
        _seen(page, ".question", "How many items")
        assert not page.evaluate("document.querySelector('#gate').open")
        assert page.evaluate("sessionStorage.length") == 1
        assert page.evaluate("localStorage.length") == 0
        assert not any("token" in url.removeprefix(server.url) for url in urls)


def test_a_full_server_says_so(page: Page, folder: Path) -> None:
    flags = (*FLAGS, "--max_sessions", "1", "--queue_timeout_s", "0")
    with serving(folder.parent, folder, *flags) as server:
        page.goto(server.url)
        question = _seen(page, ".question", "How many items")
        with open_socket(server) as other:
            ask(other, reset())
            question.click()
            _seen(page, "#notice", "The episode did not start: all 1 sessions of this server are in use")
            _poll(page)
            _seen(page, "#server-state", "full")
            _seen(page, "#load-refusals", "1")
        _seen(page, "#load-sessions", "0 of 1")
        question.click()
        _seen(page, "#question", "How many items are there?")
        expect(page.locator("#notice")).to_be_hidden()


@pytest.mark.parametrize("sql", ["SELECT 1", ENDLESS], ids=["between steps", "during one"])
def test_a_server_that_goes_away_ends_the_episode_in_words(page: Page, folder: Path, sql: str) -> None:
    with serving(folder.parent, folder, *FLAGS) as server:
        _start(page, server.url)
        _enter(page, "#sql", sql)
        _seen(page, ".step", "running …" if sql == ENDLESS else "reward")
        assert server.stop() == 0
        _seen(page, "#verdict", "The episode broke off.")
        _seen(page, "#notice", "shutting down")
        page.keyboard.press("Escape")
        page.keyboard.press("r")
        _seen(page, "#notice", "the server cannot be reached")
        _poll(page)
        _seen(page, "#server-state", "the server cannot be reached")


# --- how it looks ---


def test_the_load_is_live(page: Page, server: str) -> None:
    _start(page, server)
    _seen(page, "#server-state", "ready")
    _query(page, "SELECT 1", 1)
    _poll(page)
    _seen(page, "#load-sessions", "1 of 1,024")
    for selector in ("#load-p50", "#load-p99"):
        _seen(page, selector, "ms")
    expect(page.locator("#load-steps")).to_have_text(re.compile("[1-9]"))
    expect(page.locator("#load-spark polyline")).to_have_attribute("points", re.compile("."))


def test_nothing_is_wider_than_the_screen(page: Page, server: str) -> None:
    page.set_viewport_size({"width": 360, "height": 780})
    _start(page, server)
    page.click("[aria-label='Sample items']")
    _steps(page, 1)
    expect(page.locator("[aria-label='Sample items']")).to_be_focused()
    _query(page, f"SELECT '{'wide ' * 40}' AS {'w' * 60}, * FROM items, orders", 2)
    for done in (False, True):
        if done:
            _enter(page, "#answer", "4")
            _seen(page, "#verdict", "Correct.")
        for width in (360, 390, 800, 1280):
            page.set_viewport_size({"width": width, "height": 780})
            assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("theme", "ground"), [("light", LIGHT), ("dark", DARK)])
def test_the_theme_is_the_systems_until_one_is_chosen(page: Page, server: str, theme: str, ground: str) -> None:
    page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
    page.goto(server)
    expect(page.locator("body")).to_have_css("background-color", ground)


def test_the_theme_is_chosen_and_kept(page: Page, server: str) -> None:
    page.goto(server)
    for theme, ground in (("light", LIGHT), ("dark", DARK)):
        page.click("#theme")
        assert page.inner_text("#theme") == f"Theme: {theme}"
        expect(page.locator("body")).to_have_css("background-color", ground)
    page.goto(f"{server}/?again")
    _seen(page, "#theme", "Theme: dark")
    expect(page.locator("body")).to_have_css("background-color", DARK)


def test_every_control_has_a_name_and_can_be_reached(page: Page, server: str) -> None:
    _start(page, server)
    nameless = page.evaluate(
        """[...document.querySelectorAll("button, input, select, textarea")].filter((e) => e.checkVisibility()
          && !(e.labels?.length || e.getAttribute("aria-label") || e.innerText.trim())).map((e) => e.outerHTML)"""
    )
    assert nameless == []
    assert page.evaluate("document.activeElement.id") == "question"
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.ariaLabel || 'other'"))
    order = [name for name in ("scroller", "sql", "run", "answer", "submit") if name in seen]
    assert [seen.index(name) for name in order] == sorted(seen.index(name) for name in order)
    assert len(order) == 5
    assert {"theme", "database", "filter", "random", "Describe items", "Sample orders"} <= set(seen)


# --- reading the environment's text ---


@pytest.fixture(scope="module")
def bench(browser: Browser, server: str) -> Iterator[Page]:
    """A page on which the modules are tried by themselves."""
    page = browser.new_page()
    page.goto(server)
    yield page
    page.close()


def _call(page: Page, module: str, function: str, *arguments: object) -> Any:
    values = ", ".join(json.dumps(value) for value in arguments)
    return page.evaluate(f"import('/playground/{module}.js').then((module) => module.{function}({values}))")


DISPLAY = DisplaySettings()
PLAIN = st.text('ab<&"\n é', max_size=8)
VALUES = st.one_of(
    *(st.none(), st.integers(-(10**9), 10**9), st.floats(allow_nan=False), st.binary(max_size=4), PLAIN),
    st.builds("{} | {}".format, PLAIN, PLAIN),
)


@st.composite
def results(draw: st.DrawFn, values: st.SearchStrategy[Any], names: st.SearchStrategy[str]) -> QueryResult:
    columns = tuple(draw(st.lists(names, min_size=1, max_size=5)))
    rows = draw(st.lists(st.tuples(*(values for _ in columns)), max_size=5))
    count = draw(st.sampled_from([None, len(rows), len(rows) + 1, len(rows) + 7]))
    return QueryResult(columns, tuple(rows), count, 0)


@given(results(VALUES, st.text("abc<& ()*", min_size=1, max_size=8)))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_result_is_read_back_cell_by_cell(bench: Page, result: QueryResult) -> None:
    parsed = _call(bench, "results", "parseResult", format_result(result, DISPLAY))
    assert parsed["columns"] == list(result.columns)
    assert parsed["rows"] == [[format_cell(value, DISPLAY.max_cell_chars) for value in row] for row in result.rows]
    assert len(parsed["notes"]) == (1 if result.more or not result.rows else 0)


@given(results(st.text("a'| …\n", max_size=12), st.text("a'| …(", min_size=1, max_size=9)), st.integers(10, 200))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_result_that_can_be_read_in_two_ways_loses_nothing(bench: Page, result: QueryResult, room: int) -> None:
    text = format_result(result, DisplaySettings(max_chars=room))
    parsed = _call(bench, "results", "parseResult", text)
    if parsed is None:
        return
    header, rows, notes = parsed["columns"], parsed["rows"], parsed["notes"]
    assert {len(row) for row in rows} <= {len(header)}
    lines = text.split("\n")
    columns_note = notes[-1:] if notes and notes[-1].startswith("…") else []
    notice = notes[: len(notes) - len(columns_note)]
    assert [" | ".join(header + columns_note), *(" | ".join(row) for row in rows), *notice] == lines


def test_an_expression_with_a_separator_in_quotes_is_one_column(bench: Page) -> None:
    text = "first || ' | ' || last | n\n'Ada | Lee' | 3\n'tis | 4\n(2 more rows)"
    assert _call(bench, "results", "parseResult", text) == {
        "columns": ["first || ' | ' || last", "n"],
        "rows": [["'Ada | Lee'", "3"], ["'tis", "4"]],
        "notes": ["(2 more rows)"],
    }
    assert _call(bench, "results", "parseResult", "a | b\n1") is None


def test_a_wide_result_says_how_many_columns_are_left_out(bench: Page) -> None:
    result = QueryResult(tuple(f"c{i}" for i in range(50)), (tuple(range(50)),), 1, 0)
    parsed = _call(bench, "results", "parseResult", format_result(result, DISPLAY))
    assert parsed["notes"] == ["… and 10 more columns"]
    assert [len(parsed["columns"]), len(parsed["rows"][0])] == [40, 40]


def test_a_description_is_read_back(bench: Page) -> None:
    columns = (
        Column("id", "INTEGER", nullable=False, primary_key=True),
        Column('odd "name" here', "UNSIGNED BIG INT", nullable=True, primary_key=False),
        Column("untyped", "", nullable=True, primary_key=True),
        Column("owner", "VARCHAR(20)", nullable=True, primary_key=False),
    )
    table = Table("my table", columns, (ForeignKey(("owner",), "the owners", ("id",)),), None, is_view=True)
    assert _call(bench, "results", "parseDescription", describe_table(table)) == {
        "table": "my table",
        "kind": "view",
        "count": "unknown number of rows",
        "columns": [
            {"name": "id", "type": "INTEGER", "key": "primary key"},
            {"name": '"odd ""name"" here"', "type": "UNSIGNED BIG INT", "key": ""},
            {"name": "untyped", "type": "", "key": "primary key"},
            {"name": "owner", "type": "VARCHAR(20)", "key": 'references "the owners"(id)'},
        ],
        "note": "",
    }


def test_metrics_are_read_and_quantiles_estimated_from_what_came_between(bench: Page) -> None:
    text = (
        "# TYPE x_seconds histogram\n"
        'x_seconds_bucket{lane="a",le="0.1"} 10.0\nx_seconds_bucket{lane="a",le="0.2"} 30.0\n'
        'x_seconds_bucket{lane="a",le="+Inf"} 30.0\nx_seconds_bucket{lane="b",le="0.1"} 5\n'
        'x_seconds_bucket{lane="b",le="0.2"} 5\nx_seconds_bucket{lane="b",le="+Inf"} 6\n'
        'odd_total{reason="a \\"b\\", c\\\\d"} 2.0 1700000000\nodd_total{reason="e"} 0\n'
    )
    found = bench.evaluate(
        f"""import("/playground/metrics.js").then((m) => {{
          const samples = m.parseMetrics({json.dumps(text)});
          const now = m.buckets(samples, "x_seconds").map(([bound, count]) => [bound, count]);
          const before = [[0.1, 15], [0.2, 25], [Infinity, 26]];
          return {{
            counts: now.map(([, count]) => count), sum: m.sum(samples, "odd_total"), none: m.sum(samples, "no_total"),
            by: [...m.by(samples, "odd_total", "reason")],
            half: m.quantile(0.5, [], now), all: m.quantile(1, [], now), grown: m.quantile(0.5, before, now),
            idle: m.quantile(0.5, now, now),
          }};
        }})"""
    )
    assert found["counts"] == [15, 35, 36]
    assert (found["sum"], found["none"]) == (2, None)
    assert found["by"] == [['a "b", c\\d', 2]]
    assert found["half"] == pytest.approx(0.1 + 0.1 * 3 / 20)
    assert found["all"] == pytest.approx(0.2)
    assert found["grown"] == pytest.approx(0.15)
    assert found["idle"] is None
