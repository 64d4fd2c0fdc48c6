"""The `sqlenv` command: usage, exit statuses, and evaluation from the flags to the JSON line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from env_server.cache import CACHE_VARIABLE
from env_server.dataset import Dataset
from env_server.errors import SQLEnvError
from env_server.types import AnswerMode
from sqlenv import cli

COMMANDS = (
    "train",
    "evaluate",
    "compare",
    "export",
    "warmup",
    "view",
    "report",
    "chat",
    "play",
    "inference",
    "serve",
    "mcp",
    "data",
)
TINY = str(Path(__file__).parents[1] / "trainer" / "tiny" / "base")
ON_CPU = ("--use_cpu", "true", "--bf16", "false")

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module", autouse=True)
def cache(generated_cache: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(generated_cache))
        yield


@pytest.fixture
def small(pets: Dataset, tmp_path: Path) -> str:
    """A data set of four questions, all for evaluation."""
    folder = tmp_path / "pets"
    folder.mkdir()
    shutil.copy(pets.databases["pets"], folder)
    questions = [{"question": q.text, "sql": q.gold_sql, "split": "eval"} for q in pets.questions]
    (folder / "questions.json").write_text(json.dumps(questions), encoding="utf-8")
    return str(folder)


def evaluate(capsys: Captured, *flags: str) -> dict[str, Any]:
    """Run `sqlenv evaluate --json` and return what is on stdout: one object, on one line."""
    assert cli.main(["evaluate", "--json", *flags]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    assert "95% interval" in err, "the tables are for a person"
    summary = json.loads(out)
    assert isinstance(summary, dict)
    return summary


@pytest.mark.parametrize("mode", AnswerMode)
def test_several_samples_give_pass_at_k_and_voting(mode: AnswerMode, small: str, capsys: Captured) -> None:
    flags = ("--policy", "random", "--samples", "6", "--data", small, "--answer_mode", mode)
    summary = evaluate(capsys, *flags)
    sampled = summary["sampled"]
    assert (sampled["questions"], sampled["samples"]) == (4, 6)
    rates = [each["rate"] for each in sampled["pass_at"].values()]
    assert list(sampled["pass_at"]) == ["1", "2", "4", "6"]
    assert rates[0] == pytest.approx(summary["success_rate"])
    assert rates == sorted(rates)
    assert 0 <= sampled["voted"]["rate"] <= rates[-1]


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_usage(arguments: list[str], capsys: Captured) -> None:
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: sqlenv COMMAND")
    assert all(f"\n  {name} " in out for name in COMMANDS)
    assert set(cli._COMMANDS) == set(COMMANDS)
    assert err == ""


def test_the_version(capsys: Captured) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"sqlenv {version('sqlenv')}\n"


RUN_EACH = """
import contextlib, io, json, sys
from sqlenv import cli
for argv in json.loads(sys.argv[1]):
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            status = cli.main(argv)
        except SystemExit as stopped:
            status = stopped.code
    print(json.dumps([status, out.getvalue(), error.getvalue()]))
"""


def as_a_user(commands: list[list[str]], **environment: str) -> list[tuple[int, str, str]]:
    """Run commands in a process that files' permissions bind; the status, output and errors of each."""
    bound = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    if bound and shutil.which("setpriv") is None:
        pytest.skip("root may read and write everything, and there is no setpriv")
    command = [*bound, sys.executable, "-c", RUN_EACH, json.dumps(commands)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return [(status, out, error) for status, out, error in map(json.loads, done.stdout.splitlines())]


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    """A folder that may be neither read nor written."""
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o000)
    yield folder
    folder.chmod(0o700)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A folder of two tables and a question."""
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / "orders.csv").write_text("id,name\n1,a\n2,b\n", encoding="utf-8")
    (folder / "items.csv").write_text("id,name\n1,a\n2,b\n", encoding="utf-8")
    asked = {"question": "How many?", "sql": "SELECT COUNT(*) FROM orders", "split": "eval"}
    (folder / "questions.json").write_text(json.dumps([asked]), encoding="utf-8")
    return folder


def test_what_cannot_be_written_is_found_before_the_work(shop: Path, locked: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    outputs = {
        ("evaluate", "--policy", "oracle", "--data", str(shop), "--episodes_out"): "x.jsonl",
        ("data", "suggest", str(shop), "--yes", "--out"): "x.jsonl",
        ("data", "export", str(shop), "--out"): "x",
        ("data", "doctor", str(shop), "--fix", "--yes", "--out"): "x",
        ("data", "fetch", "spider", "--out"): "x",
        ("compare", "a", "b", "--png"): "x.png",
        ("report", "a", "--png"): "x.png",
        ("export", "a", "--out"): "x",
        ("inference", "--model", TINY, "--log_dir"): "x",
    }
    commands = [[*words, str(place / name)] for words, name in outputs.items() for place in (locked, file)]
    for words, (status, out, error) in zip(commands, as_a_user(commands), strict=True):
        assert (status, out, error.count("\n")) == (2, "", 1), words
        assert words[-1] in error
    assert sorted(tmp_path.iterdir()) == sorted([file, locked, shop]), "nothing is left behind"


def test_a_file_that_cannot_be_read_and_a_cache_that_cannot_be_used_are_one_line(shop: Path, locked: Path) -> None:
    commands = [["data", "doctor", str(shop)], ["evaluate", "--policy", "oracle", "--data", str(shop)]]
    for words, (status, out, error) in zip(commands, as_a_user(commands, **{CACHE_VARIABLE: str(locked)}), strict=True):
        assert (status, error.count("\n")) == ((1, 0) if "doctor" in words else (2, 1)), words
        assert CACHE_VARIABLE in out + error
    (shop / "items.csv").chmod(0o000)
    commands += [["data", "suggest", str(shop), "--yes"]]
    commands += [["report", str(locked)], ["view", str(locked)], ["compare", str(locked), str(locked)]]
    for words, (status, _, error) in zip(commands, as_a_user(commands), strict=True):
        assert (status, error.count("\n")) == (2, 1), words
        assert str(locked if str(locked) in words else shop / "items.csv") in error


@pytest.mark.parametrize(
    "command", [["data", "doctor", "--samples", "1"], ["data", "doctor", "--json"], ["play", "--data"]]
)
def test_an_ascii_terminal_shows_escapes(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "cafés.csv").write_text("id,naïve\n1,Zürich ✓\n2,Łódź\n", encoding="utf-8")
    asked = {"question": "Où est le café numéro 1 ?", "sql": "SELECT naïve FROM cafés WHERE id = 1", "split": "eval"}
    (tmp_path / "questions.json").write_text(json.dumps([asked]), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "sqlenv", *command, str(tmp_path)],
        input="DESCRIBE cafés\nQUERY SELECT naïve FROM cafés\nANSWER Zürich ✓\n".encode(),
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    assert done.returncode in (0, 1)
    out = done.stdout.decode("ascii")
    if "--json" in command:
        json.loads(out)
    else:
        assert "caf\\xe9" in out


def test_an_unknown_command() -> None:
    """And the module runs as a script."""
    done = subprocess.run([sys.executable, "-m", "sqlenv", "trian"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "sqlenv: there is no command trian; did you mean train? (sqlenv --help lists them)\n"


def test_a_misspelt_flag_of_the_command_itself(capsys: Captured) -> None:
    assert cli.main(["--versoin"]) == 2
    assert capsys.readouterr().err.startswith("sqlenv: there is no flag --versoin; did you mean --version?")


def test_without_the_training_packages_a_command_says_what_to_install() -> None:
    # None in sys.modules is how Python marks what cannot be imported.
    code = "import sys; sys.modules['torch'] = None; from sqlenv import cli; sys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "train", "--model_name_or_path", TINY]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert process.stderr == "sqlenv train: torch is not installed; in SQLEnv's folder: pip install -e '.[train]'\n"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["evaluate", "--polcy", "random"], "there is no flag --polcy; did you mean --policy?"),
        (["evaluate"], "the following arguments are required: --policy"),
        (["evaluate", "--policy", "random", "--split", "evl"], "--split must be one of train, eval, all, not "
         "'evl'; did you mean eval?"),
        (["play", "--answer_mode", "json"], "--answer_mode must be one of value, sql, not 'json'"),
        (["serve", "--prot=1"], "there is no flag --prot; did you mean --port?"),
        (["inference", "--modl", "x"], "there is no flag --modl; did you mean --model?"),
        (["compare", "a", "b", "--jsno"], "there is no flag --jsno; did you mean --json?"),
        (["data", "inspct"], "COMMAND must be one of doctor, "),
        (["data", "doctor", "synthetic", "--answer_moed", "sql"], "there is no flag --answer_moed; did you mean"),
        (["export", "x", "--ot", "y"], "there is no flag --ot; did you mean --out?"),
        (["report", "--pgn", "y"], "there is no flag --pgn; did you mean --png?"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_slip_of_the_pen_is_one_line_that_says_what_was_meant(
    command: list[str], said: str, capsys: Captured
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(command)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    prog = f"sqlenv {command[0]}" + (" doctor" if "doctor" in command else "")
    assert line.startswith(f"{prog}: {said}")
    assert line.endswith(f" ({prog} --help lists the flags)")


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (["train"], "--eval_episodes"),
        (["train"], "--num_generations"),
        (["evaluate"], "--policy"),
        (["compare"], "--png"),
        (["warmup"], "--rejection_sampling"),
        (["report"], "--png"),
        (["play"], "--question_id"),
        (["data"], "doctor"),
        (["data", "doctor"], "--db"),
        (["data", "export"], "--split"),
        (["data", "fetch"], "--revision"),
    ],
)
def test_the_help_of_a_command(command: list[str], flag: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command, "--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: sqlenv {' '.join(command)} ")
    assert flag in out


def test_an_expected_error_is_one_line_and_any_other_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def raises(error: BaseException) -> None:
        def command(argv: object) -> int:
            raise error

        monkeypatch.setitem(cli._COMMANDS, "data", command)

    raises(SQLEnvError("broken; do this"))
    assert cli.main(["data"]) == 2
    assert capsys.readouterr().err == "sqlenv data: broken; do this\n"
    raises(KeyboardInterrupt())
    assert cli.main(["data"]) == 130
    assert capsys.readouterr().err == "sqlenv data: interrupted\n"
    raises(KeyError("a bug"))
    with pytest.raises(KeyError):
        cli.main(["data"])


@pytest.mark.parametrize(
    "command",
    [
        ["evaluate", "--policy", "oracle", "--data", "{}"],
        ["play", "--data", "{}"],
        ["data", "doctor", "{}"],
        ["data", "export", "{}", "--out", "exported"],
        ["train", "--model_name_or_path", "x", "--data", "{}", *ON_CPU],
        ["warmup", "--model_name_or_path", TINY, "--data", "{}", *ON_CPU],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("data", ["nonsense", "synthetic:one", "spider:no/such/folder"])
def test_a_data_set_that_does_not_exist(
    command: list[str], data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([part.format(data) for part in command]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sqlenv {command[0]}: ")
    assert data.rpartition(":")[2] in line
    assert list(tmp_path.iterdir()) == [], "nothing was written"


@pytest.mark.parametrize(
    ("missing", "words"),
    [(True, "the policy '{}' is no folder here"), (False, "the policy '{}' is not a checkpoint: ")],
)
def test_what_is_no_policy(missing: bool, words: str, small: str, tmp_path: Path, capsys: Captured) -> None:
    policy = tmp_path / "no" / "policy" if missing else tmp_path
    assert cli.main(["evaluate", "--policy", str(policy), "--data", small]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("sqlenv evaluate: " + words.format(policy))


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: Captured) -> None:
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "is not a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--episodes", "0"],
        ["--episodes", "-2"],
        ["--step_budget", "0"],
        ["--max_concurrency", "0"],
        ["--max_turn_length", "-1"],
        ["--max_completion_length", "many"],
        ["--temperature", "-1"],
        ["--temperature", "nan"],
        ["--samples", "0"],
        ["--samples", "2"],
        ["--split", "test"],
        ["--answer_mode", "prose"],
        ["--episodes_out", "no/such/folder/file.jsonl"],
    ],
    ids=" ".join,
)
def test_values_that_make_no_sense_are_refused_before_the_work(flags: list[str], capsys: Captured) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["evaluate", "--policy", "oracle", *flags])
    assert stopped.value.code == 2
    assert flags[0] in capsys.readouterr().err.splitlines()[-1]


def test_the_oracle_is_right_on_unseen_databases_and_chance_is_not(capsys: Captured) -> None:
    oracle, chance = (evaluate(capsys, "--policy", policy, "--episodes", "300") for policy in ("oracle", "random"))
    assert oracle["success_rate"] >= 0.99
    assert oracle["interval"][0] > 0.95
    assert chance["success_rate"] <= 0.05
    assert oracle["episodes"] == chance["episodes"] == 300
    assert oracle["excluded"] == {}
    assert (oracle["policy"], oracle["split"], oracle["failed"]) == ("oracle", "eval", 0)
    assert oracle["failure_kinds"] == {}
    assert sum(chance["failure_kinds"].values()) == chance["episodes"] - chance["successes"]
    assert oracle["exploration"]["described_first"]["share"] == 1.0
    low, high = chance["exploration"]["described_first"]["interval"]
    assert 0.0 < low < chance["exploration"]["described_first"]["share"] < high < 1.0


def test_the_oracle_is_right_with_a_query_as_the_answer(small: str, tmp_path: Path, capsys: Captured) -> None:
    """And the episodes can be kept."""
    target = tmp_path / "episodes.jsonl"
    flags = ("--data", small, "--answer_mode", "sql", "--episodes_out", str(target))
    summary = evaluate(capsys, "--policy", "oracle", *flags)
    assert (summary["success_rate"], summary["answer_mode"], summary["episodes"]) == (1.0, "sql", 4)
    episodes = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert len(episodes) == 4
    assert all(e["outcome"] == "correct" and e["turns"][-1]["action_type"] == "ANSWER" for e in episodes)


def test_a_question_is_played_several_times_each_time_by_another_seed(
    small: str, tmp_path: Path, capsys: Captured
) -> None:
    target = tmp_path / "episodes.jsonl"
    flags = ("--data", small, "--samples", "3", "--episodes", "2", "--episodes_out", str(target))
    assert evaluate(capsys, "--policy", "random", *flags)["episodes"] == 6
    episodes = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    first, second = episodes[:3], episodes[3:]
    for same in (first, second):
        assert len({each["question_id"] for each in same}) == 1
        assert len({json.dumps(each["turns"]) for each in same}) == 3
    assert first[0]["question_id"] != second[0]["question_id"]


def test_without_json_there_is_a_table_alone(small: str, capsys: Captured) -> None:
    assert cli.main(["evaluate", "--policy", "oracle", "--data", small]) == 0
    out = capsys.readouterr().out
    assert "100.0%" in out
    assert "{" not in out


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--policy", "random"), "--protocol text_to_sql is for a model; random writes no SQL from a schema"),
        (("--policy", "x", "--action_format", "tools"), "--action_format: with --protocol text_to_sql there are no"),
        (("--policy", "x", "--step_budget", "1"), "--step_budget 1: text_to_sql takes two steps"),
    ],
)
def test_what_does_not_go_with_one_query_is_refused(flags: tuple[str, ...], complaint: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["evaluate", "--protocol", "text_to_sql", *flags])
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_policy_is_asked_for_one_query(capsys: Captured, tmp_path: Path) -> None:
    """The tiny policy, which has seen no schema in a prompt: it plays its own game, and that is told."""
    kept = tmp_path / "episodes.jsonl"
    flags = ("--policy", TINY, "--episodes", "3", "--few_shot", "1", "--episodes_out", str(kept))
    assert cli.main(["evaluate", "--protocol", "text_to_sql", "--json", *flags]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert [json.loads(line)["turns"][0]["action_type"] for line in kept.read_text().splitlines()] == ["QUERY"] * 3
    assert (summary["protocol"], summary["episodes"], summary["mean_steps"] <= 2) == ("text_to_sql", 3, True)
    assert sum(summary["failure_kinds"].values()) == 3 - summary["successes"]
    assert summary["exploration"]["prompt_tokens"] > 200


def test_false_positives_are_measured_in_value_mode(small: str, capsys: Captured) -> None:
    by_value = evaluate(capsys, "--policy", "oracle", "--data", small)
    assert (by_value["false_positives"]["share"]["n"], by_value["false_positives"]["share"]["count"]) == (4, 0)
    assert evaluate(capsys, "--policy", "oracle", "--data", small, "--answer_mode", "sql")["false_positives"] is None


def test_it_says_why_episodes_failed_and_how_they_explored(small: str, capsys: Captured) -> None:
    assert cli.main(["evaluate", "--policy", "random", "--data", small]) == 0
    out = capsys.readouterr().out
    for caption in ("Success by difficulty", "Why episodes failed", "How it explored"):
        assert caption in out


def test_the_oracle_is_right_on_spider(spider_dir: Path, capsys: Captured) -> None:
    data = f"spider:{spider_dir}"
    summary = evaluate(capsys, "--policy", "oracle", "--data", data, "--split", "all", "--episodes", "200")
    assert summary["success_rate"] >= 0.97
    assert sum(summary["excluded"].values()) > 0, "unusable questions are counted, not passed"


def test_a_generated_database_is_examined(capsys: Captured) -> None:
    assert cli.main(["data", "doctor", "synthetic", "--quick", "--db", "farm_1", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["databases"], summary["splits"], summary["excluded"]) == (1, {"eval": summary["usable"]}, {})
    assert summary["usable"] >= 50
    assert {finding["severity"] for finding in summary["findings"]} <= {"note"}


def test_a_run_that_is_stopped_while_it_is_imported_has_nothing_to_save() -> None:
    """The finder stands for a slow import: it says so, and waits for the signal."""
    program = (
        "import sys, signal, importlib.abc\n"
        "class Slow(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'trainer':\n"
        "            print('importing', flush=True)\n"
        "            signal.pause()\n"
        "sys.meta_path.insert(0, Slow())\n"
        "from sqlenv import cli\n"
        "sys.exit(cli.main(['train']))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=Path(cli.__file__).parents[1], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.terminate()
        assert process.wait(30) == 0
