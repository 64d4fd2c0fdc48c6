"""The playground in a real browser, against the real server.

Clicks and keys are the browser's own input events; what is asserted is what a person sees. Skipped where there is no
Chromium.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.sync.client import connect

import sqlenv
from env_server.data.loading import load_dataset
from env_server.dataset import Dataset
from env_server.factory import EnvironmentFactory
from env_server.settings import DisplaySettings
from env_server.sql.display import describe_table, format_cell, format_result
from env_server.sql.sandbox import QueryResult
from env_server.sql.schema import Column, ForeignKey, Table
from env_server.types import SQLAction
from tests.integration.chromium import CHROMIUM, DEADLINE_S, SHIFT, Browser, Page, chromium, running

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")

TOKEN = "~~~???token/+="
MARKUP = "<img src=x onerror=window.pwned=1>"
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
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with browser.page() as page:
        page.resize(1280, 800, "light")
        yield page


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


@contextmanager
def _serving(folder: Path, *flags: str, token: str = "") -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `sqlenv serve` on a free port; gives its URL and its process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SQLENV_")}
    environment |= {"SQLENV_TOKEN": token} if token else {}
    command = [sys.executable, sqlenv.__file__, "serve", "--data", str(folder), "--port", "0", "--grace_s", "0", *flags]
    command += ["--log_level", "error", "--cache_dir", str(folder.parent / "cache")]
    with running(command, "stdout", "serving at ", env=environment) as served:
        yield served


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    with _serving(folder, "--step_budget", "7") as (url, _):
        yield url


@pytest.fixture(scope="module")
def market(folder: Path) -> Dataset:
    return load_dataset(str(folder))


def _start(page: Page, url: str, question: str = "How many items are there?") -> None:
    page.open(url)
    page.wait_for(".question", question)
    page.click(".question")
    page.wait_for("#question", question)


def _steps(page: Page, count: int) -> None:
    page.wait(f"document.querySelectorAll('#steps .reward').length === {count}")


def _query(page: Page, sql: str, count: int) -> None:
    page.click("#sql")
    page.type(sql)
    page.key("Enter")
    _steps(page, count)


def _signed(value: float) -> str:
    text = f"{abs(value):.4f}"
    text = text[:-2] if text.endswith("00") else text.removesuffix("0")
    return "0.00" if float(text) == 0 else ("\N{MINUS SIGN}" if value < 0 else "+") + text


# --- an episode ---


def test_an_episode_is_played_by_clicks_and_keys(page: Page, server: str, market: Dataset) -> None:
    _start(page, server)
    assert "market · 2 databases · 208 questions" in page.text("#dataset")
    assert page.text("#question-facts").split() == ["shop", "easy", "train", "items"]
    page.click("[aria-label='Describe items']")
    _steps(page, 1)
    assert page.rows(".step:nth-child(1)") == [
        ["column", "type", "key"],
        ["item_id", "INTEGER", "primary key"],
        ["name", "TEXT", ""],
        ["price", "REAL", ""],
    ]
    assert "4 rows" in page.text("#tables li:nth-child(1)")
    page.click("[aria-label='Sample items']")
    _steps(page, 2)
    assert page.evaluate("document.activeElement.ariaLabel") == "Sample items"
    assert page.rows(".step:nth-child(2)") == [
        ["item_id", "name", "price"],
        ["1", "lamp", "9.5"],
        ["2", MARKUP, "NULL"],
        ["3", "'a | b'", "1.0"],
    ]
    _query(page, "SELECT name || ' | ' || price AS both, price FROM items WHERE price > 100", 3)
    assert page.rows(".step:nth-child(3)") == [["both", "price"]]
    assert "no rows" in page.text(".step:nth-child(3)")
    _query(page, "SELEC 1", 4)
    assert "syntax error" in page.text(".step:nth-child(4) .error")
    _query(page, "SELECT COUNT(*) FROM items", 5)
    assert page.rows(".step:nth-child(5)") == [["COUNT(*)"], ["4"]]
    page.click("#answer")
    page.type("4")
    page.click("#submit")
    page.wait_for("#verdict", "Correct.")

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
    assert page.rows("#rewards") == expected
    assert page.text("#total") == _signed(total)
    assert page.text("#left-steps") == "1 of 7"
    assert f"Total reward {_signed(total)} in 6 steps." in page.text("#verdict")
    assert "terminal +1.00" in page.text(".step:nth-child(6) .reward")
    assert "Step 6, ANSWER: The answer is correct." in page.evaluate("document.querySelector('#status').textContent")
    assert not page.evaluate("document.querySelector('#composer').checkVisibility()")
    assert page.complaints() == []
    assert all(url.replace("ws:", "http:").startswith(server) for url in page.urls())


def test_an_episode_is_played_by_keys_alone(page: Page, server: str) -> None:
    page.open(server)
    page.wait_for(".question", "How many items")
    page.key("/")
    page.type("LAMPS how")
    page.wait("[...document.querySelectorAll('.question')].filter((e) => e.checkVisibility()).length === 1")
    page.key("ArrowDown")
    page.key("Enter")
    page.wait_for("#question", "How many lamps were ordered?")
    page.key("2")
    _steps(page, 1)
    assert page.text(".step:nth-child(1) .action").split() == ["1", "DESCRIBE", "orders"]
    assert page.rows(".step:nth-child(1)")[2] == ["item_id", "INTEGER", "references items(item_id)"]
    page.key("2", SHIFT)
    _steps(page, 2)
    assert page.text(".step:nth-child(2) .action").split() == ["2", "SAMPLE", "orders"]
    page.key("q")
    for count, sql in ((3, "SELECT 1"), (4, "SELECT 2")):
        page.type(sql)
        page.key("Enter")
        _steps(page, count)
    for key, recalled in (
        ("ArrowUp", "SELECT 2"),
        ("ArrowUp", "SELECT 1"),
        ("ArrowUp", "SELECT 1"),
        ("ArrowDown", "SELECT 2"),
    ):
        page.key(key)
        assert page.evaluate("document.querySelector('#sql').value") == recalled
    page.key("Enter", SHIFT)
    page.type("-- agai")
    page.key("n")
    page.key("Enter")
    _steps(page, 5)
    assert "repeat \N{MINUS SIGN}0.03" in page.text(".step:nth-child(5) .reward")
    page.key("Escape")
    page.key("a")
    page.type("7")
    page.key("Enter")
    page.wait_for("#verdict", "Correct.")
    page.key("r")
    page.wait("document.querySelectorAll('.step').length === 0")
    assert page.text("#left-steps") == "7 of 7"
    page.key("?")
    page.wait_for("#help", "DESCRIBE that table")
    page.key("1")
    page.key("Escape")
    page.wait("!document.querySelector('#help').open")
    assert page.evaluate("document.querySelectorAll('.step').length") == 0


def test_the_budget_ends_an_episode_and_another_question_begins(page: Page, server: str) -> None:
    _start(page, server)
    for count in range(1, 7):
        _query(page, f"SELECT {count}", count)
    page.click("#sql")
    page.type("SELECT 7")
    page.key("Enter")
    page.wait_for("#verdict", "Out of steps.")
    assert page.text("#left-steps") == "0 of 7"
    page.key("n")
    page.wait("document.querySelectorAll('.step').length === 0")
    assert page.text("#left-steps") == "7 of 7"


def test_a_database_is_picked_and_the_address_names_the_question(page: Page, server: str) -> None:
    page.open(server)
    page.wait_for(".question", "How many items")
    page.click("#database")
    page.key("ArrowDown")
    page.key("Enter")
    page.wait_for("#more", "5 more")
    assert page.evaluate("document.querySelectorAll('.question').length") == 200
    page.click("#filter")
    page.type("203 what")
    page.wait("[...document.querySelectorAll('.question')].filter((e) => e.checkVisibility()).length === 1")
    page.key("Enter")
    page.wait_for("#question", "What is 203 + 1?")
    address = page.evaluate("location.href")
    assert address == f"{server}/#sky/sky-203"
    page.open("about:blank")
    page.open(address)
    page.wait_for("#question", "What is 203 + 1?")
    assert "What is 203" in page.text(".question[aria-current]")


def test_starting_again_drops_the_query_that_runs(page: Page, server: str) -> None:
    _start(page, server)
    page.click("#sql")
    page.type(ENDLESS)
    page.key("Enter")
    page.wait_for(".step", "running …")
    page.key("Escape")
    page.key("r")
    page.wait("document.querySelectorAll('.step').length === 0")
    assert not page.evaluate("document.querySelector('#notice').checkVisibility()")
    page.evaluate("document.querySelector('#sql').value = ''")
    _query(page, "SELECT 5", 1)
    assert page.rows(".step:nth-child(1)") == [["5"], ["5"]]
    assert len(page.rows("#rewards")) == 1


# --- what comes from a database is text ---


def test_markup_from_the_data_is_shown_and_never_parsed(page: Page, server: str) -> None:
    page.open(server)
    page.wait_for(".question", f"What costs the rug? {MARKUP}")
    page.click("li:nth-child(2) .question")
    page.wait_for("#question", f"What costs the rug? {MARKUP}")
    odd = "<b onclick=window.pwned=2>odd</b>"
    assert page.text("#tables li:nth-child(3) .name") == odd
    page.click("#tables li:nth-child(3) button")
    _steps(page, 1)
    assert "<i>column</i>" in page.text("#tables li:nth-child(3) .columns")
    assert page.rows(".step:nth-child(1)")[1][0] == '"<i>column</i>"'
    _query(page, f"SELECT name, '{MARKUP}' AS \"<u>\" FROM items WHERE item_id = 2", 2)
    assert page.rows(".step:nth-child(2)") == [["name", "<u>"], [MARKUP, MARKUP]]
    _query(page, f'SELECT "{MARKUP}"."x"', 3)
    assert MARKUP in page.text(".step:nth-child(3) .error")
    page.click("#answer")
    page.type(MARKUP)
    page.key("Enter")
    page.wait_for("#verdict", "Wrong.")
    assert page.evaluate("document.querySelectorAll('main img, main u, main i, main b[onclick]').length") == 0
    assert page.evaluate("window.pwned") is None
    assert page.complaints() == []


def test_the_browser_refuses_to_parse_text_as_html(page: Page, server: str) -> None:
    page.open(server)
    refused = page.evaluate("(() => { try { document.body.innerHTML = '<p>x'; } catch (e) { return e.name; } })()")
    assert refused == "TypeError"


# --- the token, a full server, a server that goes away ---


def test_the_token_is_asked_for_once_and_never_part_of_an_address(page: Page, folder: Path) -> None:
    with _serving(folder, token=TOKEN) as (url, _):
        page.open(url)
        page.wait_for("#gate", "ASKS FOR A TOKEN")
        page.type("wrong")
        page.key("Enter")
        page.wait_for("#gate-message", "refused that token")
        page.type(TOKEN)
        page.key("Enter")
        page.wait_for(".question", "How many items")
        page.click(".question")
        page.wait_for("#question", "How many items")
        _query(page, "SELECT 1", 1)
        page.poll()
        page.wait_for("#load-sessions", "1 of ")
        page.open(f"{url}/?again")
        page.wait_for(".question", "How many items")
        assert not page.evaluate("document.querySelector('#gate').open")
        assert page.evaluate("sessionStorage.length") == 1
        assert page.evaluate("localStorage.length") == 0
        assert not any("token" in address.removeprefix(url) for address in page.urls())


def test_a_full_server_says_so(page: Page, folder: Path) -> None:
    with _serving(folder, "--max_sessions", "1", "--queue_timeout_s", "0") as (url, _):
        page.open(url)
        page.wait_for(".question", "How many items")
        with connect(url.replace("http", "ws") + "/ws") as other:
            other.send('{"type": "reset"}')
            other.recv(timeout=DEADLINE_S)
            page.click(".question")
            page.wait_for("#notice", "The episode did not start: all 1 sessions of this server are in use")
            page.poll()
            page.wait_for("#server-state", "full")
            page.wait_for("#load-refusals", "1")
        page.wait_for("#load-sessions", "0 of 1")
        page.click(".question")
        page.wait_for("#question", "How many items are there?")
        assert not page.evaluate("document.querySelector('#notice').checkVisibility()")


@pytest.mark.parametrize("sql", ["SELECT 1", ENDLESS], ids=["between steps", "during one"])
def test_a_server_that_goes_away_ends_the_episode_in_words(page: Page, folder: Path, sql: str) -> None:
    with _serving(folder) as (url, process):
        _start(page, url)
        page.click("#sql")
        page.type(sql)
        page.key("Enter")
        page.wait_for(".step", "running …" if sql == ENDLESS else "reward")
        process.send_signal(signal.SIGTERM)
        page.wait_for("#verdict", "The episode broke off.")
        page.wait_for("#notice", "shutting down")
        process.wait(DEADLINE_S)
    page.key("Escape")
    page.key("r")
    page.wait_for("#notice", "the server cannot be reached")
    page.poll()
    page.wait_for("#server-state", "the server cannot be reached")


# --- how it looks ---


def test_the_load_is_live(page: Page, server: str) -> None:
    _start(page, server)
    page.wait_for("#server-state", "ready")
    _query(page, "SELECT 1", 1)
    page.poll()
    page.wait_for("#load-sessions", "1 of 1,024")
    for selector in ("#load-p50", "#load-p99"):
        page.wait_for(selector, "ms")
    page.wait("Number(document.querySelector('#load-steps').innerText) > 0")
    page.wait("document.querySelector('#load-spark polyline').points.length > 0")


@pytest.mark.parametrize(("width", "theme"), [(360, "dark"), (390, "light"), (800, "dark"), (1280, "light")])
def test_nothing_is_wider_than_the_screen(page: Page, server: str, width: int, theme: str) -> None:
    page.resize(width, 780, theme)
    _start(page, server)
    page.click("[aria-label='Sample items']")
    _steps(page, 1)
    assert page.evaluate("document.activeElement.ariaLabel") == "Sample items"
    _query(page, f"SELECT '{'wide ' * 40}' AS {'w' * 60}, * FROM items, orders", 2)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.click("#answer")
    page.type("4")
    page.key("Enter")
    page.wait_for("#verdict", "Correct.")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 21, 27)"
    assert dark is (theme == "dark")


def test_the_theme_is_chosen_and_kept(page: Page, server: str) -> None:
    page.open(server)
    for theme, ground in (("light", "rgb(246, 248, 250)"), ("dark", "rgb(16, 21, 27)")):
        page.click("#theme")
        assert page.text("#theme") == f"Theme: {theme}"
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
    page.open(f"{server}/?again")
    page.wait_for("#theme", "Theme: dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 21, 27)"


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
        page.key("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.ariaLabel || 'other'"))
    order = [name for name in ("scroller", "sql", "run", "answer", "submit") if name in seen]
    assert [seen.index(name) for name in order] == sorted(seen.index(name) for name in order)
    assert len(order) == 5
    assert {"theme", "database", "filter", "random", "Describe items", "Sample orders"} <= set(seen)


# --- reading the environment's text ---


@pytest.fixture(scope="module")
def bench(browser: Browser, server: str) -> Iterator[Page]:
    """A page on which the modules are tried by themselves."""
    with browser.page() as page:
        page.open(server)
        yield page


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
