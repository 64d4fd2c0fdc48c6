"""README, docs/ and experiments/: what they name exists, what they link to is there, what they show happens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from env_server.cache import CACHE_VARIABLE
from env_server.data.loading import load_dataset
from env_server.dataset import Dataset
from env_server.environment import EnvironmentFactory, SQLEnvironment
from env_server.tools.commands import run as run_data
from sqlenv import cli
from trainer.chat.actions import parse_action
from trainer.chat.prompts import first_message, observation_message

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (
        *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "experiments").glob("*.md")),
    )
}
README = PAGES["README.md"]
SHOWN = "synthetic-farm_1-0024"
"""The question of the README's episode."""

TOP = (
    "env_server",
    "inference",
    "trainer",
    "tests",
    "benchmarks",
    "configs",
    "docker",
    "docs",
    "experiments",
    "notebooks",
    "policies",
)
NAMED_FILE = re.compile(
    rf"(?<![\w./:-])((?:{'|'.join(TOP)})/[\w./-]*|[a-z][\w-]*(?:/[\w-]+)*\.(?:py|ya?ml|toml))(?![\w*])"
)
"""A path from the root of this project."""
ELSEWHERE = {"docker-compose.four-gpus.yml", "exec_eval.py", "my.py", "keys.toml", "kustomization.yaml"}
"""Files that a page tells its reader to write, or that are another project's."""
COMMAND = re.compile(r"(?<![\w.-])sqlenv ([a-z]+)(?: ([a-z]+))?")
FLAG = re.compile(r"(?<=\s)--[a-z][a-z0-9_]+")
SOURCES = ("env_server", "inference", "sqlenv", "sqlenv_verifiers", "trainer", "benchmarks")
FROM_AN_INDEX = re.compile(r"pip install (?:-\S+ )*['\"]?sqlenv\b")
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)")


@pytest.fixture(scope="module")
def dataset(generated_cache: Path) -> Iterator[Dataset]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(generated_cache))
        yield load_dataset("synthetic")


@pytest.fixture
def environment(dataset: Dataset) -> Iterator[SQLEnvironment]:
    with EnvironmentFactory(dataset) as factory:
        yield factory.make()


def code(text: str) -> list[str]:
    """What stands in fences and backticks."""
    return re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL)


def block(text: str, language: str, part: str) -> str:
    """The one fenced block of a language that has a part."""
    (found,) = (body for body in re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S) if part in body)
    return str(found)


def is_there(name: str) -> bool:
    path = ROOT / name
    return path.exists() or (path.suffix == "" and path.with_suffix(".py").exists())


@pytest.mark.parametrize("page", PAGES)
def test_the_files_that_a_page_names_exist(page: str) -> None:
    text = re.sub(r"--(?:output_dir|out|data|png)[ =]\S+", "", "\n".join(code(PAGES[page])))
    named = {name.rstrip(".") for name in NAMED_FILE.findall(text)} - ELSEWHERE
    assert not {name for name in named if not is_there(name) and "NAME" not in name}


def test_nobody_is_told_to_install_us_from_an_index() -> None:
    """There is no such package: it is installed from its folder."""
    sources = {str(path): path.read_text("utf-8") for name in SOURCES for path in (ROOT / name).rglob("*.py")}
    assert not [name for name, text in {**PAGES, **sources}.items() if FROM_AN_INDEX.search(text)]


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_that_a_page_names_exist(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_data(["--help"])
    listed = capsys.readouterr().out
    of_data = set(re.findall(r"^    (\w+) ", listed, re.M))
    assert of_data == {"build", "doctor", "suggest", "export", "fetch"}
    for command, subcommand in COMMAND.findall("\n".join(code(PAGES[page]))):
        assert command in cli._COMMANDS, command
        if command == "data" and subcommand:
            assert subcommand in of_data, subcommand


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives a page's headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_links_to_is_there(page: str) -> None:
    place = ROOT / page
    for file, anchor in LINK.findall(PAGES[page]):
        target = place.parent / file if file else place
        assert target.is_file(), file
        assert not anchor or anchor in anchors(target), f"{file}#{anchor}"


def flags_of(command: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit):
        cli.main([*command.split(), "--help-all" if command in ("train", "warmup") else "--help"])
    return set(re.findall(r"--[a-z][a-z0-9_]+", capsys.readouterr().out))


@pytest.mark.parametrize(
    "command",
    [
        *("chat", "compare", "evaluate", "export", "inference", "mcp", "play", "report", "serve", "train", "view"),
        *("warmup", "data build", "data doctor", "data export", "data fetch", "data suggest"),
    ],
)
def test_the_flags_that_pages_give_a_command_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    known = flags_of(command, capsys)
    for page, text in PAGES.items():
        for line in re.sub(r" *\\\n *", " ", "\n".join(code(text))).splitlines():
            for given in re.findall(rf"sqlenv {command}\b([^`#&|)]*)", line):
                own = given.partition(" -- ")[0]
                assert set(FLAG.findall(own)) <= known, f"{page}: {line}"


def test_every_page_can_be_found_from_the_readme() -> None:
    found, to_read = set(), ["README.md"]
    while to_read:
        page = to_read.pop()
        if page not in found and page in PAGES:
            found.add(page)
            links = (file for file, _ in LINK.findall(PAGES[page]) if file.endswith(".md"))
            to_read += [str(((ROOT / page).parent / file).resolve().relative_to(ROOT)) for file in links]
    assert found == {page for page in PAGES if not page.startswith("experiments/")}


def test_the_pages_are_few_and_short() -> None:
    pages = [text for name, text in PAGES.items() if name.startswith("docs/")]
    assert len(pages) <= 18
    assert sum(len(text.splitlines()) for text in pages) <= 2600


def test_tutorials_and_how_to_name_no_modules() -> None:
    """They are for users; the page on extending apart, which changes the code."""
    (_, tutorials), (_, how_to) = (
        next(iter(part.items()))
        for part in yaml.safe_load((ROOT / "docs/site/mkdocs.yml").read_text("utf-8"))["nav"][1:3]
    )
    pages = {f"docs/{page}" for entry in (*tutorials, *how_to) for page in entry.values()} - {"docs/extending.md"}
    assert len(pages) == 10
    assert not {
        page: found
        for page in pages
        if (found := re.findall(r"`(?:env_server|inference|trainer|tests)/\S+\.py`", PAGES[page]))
    }


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_as_narrow_as_the_code(page: str) -> None:
    """Tables apart, which cannot be folded, and what a command printed."""
    text = re.sub(r"^```.*?^```", lambda fenced: "\n" * fenced[0].count("\n"), PAGES[page], flags=re.M | re.S)
    lines = enumerate(text.splitlines(), 1)
    assert not [number for number, line in lines if len(line) > 120 and not line.lstrip().startswith("|")]


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_the_module_map_has_every_room() -> None:
    rooms = {path.parent.relative_to(ROOT) for name in TOP[:3] for path in (ROOT / name).rglob("__init__.py")}
    assert not {f"{room}/" for room in rooms if f"`{room}/`" not in PAGES["docs/architecture.md"]}


def test_the_episode_of_the_readme_is_what_happens(environment: SQLEnvironment) -> None:
    shown = block(README, "text", "> DESCRIBE")
    opening, *turns = re.split(r"^> ", shown, flags=re.M)
    observation = environment.reset(question_id=SHOWN)
    assert opening.strip() == first_message(observation)
    assert len(turns) > 3
    for turn in turns:
        said, _, reply = turn.strip().partition("\n")
        written = re.fullmatch(r"(.*) \(([+-]\d\.\d\d)\)", said)
        assert written is not None
        observation = environment.step(parse_action(written[1]).action)
        assert reply == observation_message(observation)
        assert f"{observation.reward:+.2f}" == written[2]
    assert observation.done


def test_the_size_of_the_data_set_is_what_the_pages_say(dataset: Dataset) -> None:
    said = f"{len(dataset.databases)} databases over 16 domains, {len(dataset.questions):,} questions"
    assert said in PAGES["docs/data-format.md"]
    assert said in PAGES["docs/results.md"]
