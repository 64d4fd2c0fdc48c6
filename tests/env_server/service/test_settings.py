"""The settings of `sqlenv serve`: where they come from, what is refused and how that is said; the manifest."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from env_server.service.settings import PREFIX, ServiceSettings, SettingsError, is_loopback, read_settings
from env_server.settings import EnvSettings, RewardSettings
from env_server.types import AnswerMode
from sqlenv import cli

ROOT = Path(__file__).parents[3]
TOKEN = "correct-horse-battery-staple"

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith(PREFIX):
            monkeypatch.delenv(name)


def read(*flags: str) -> ServiceSettings:
    return read_settings(flags)[0]


def refused(*flags: str) -> str:
    with pytest.raises(SettingsError) as error:
        read(*flags)
    return str(error.value)


def test_the_defaults_are_for_this_machine_alone() -> None:
    settings = read()
    assert (settings.host, settings.port, settings.token, settings.insecure) == ("127.0.0.1", 8000, None, False)
    assert settings.environment == EnvSettings()
    assert settings.answer_mode is AnswerMode.VALUE
    assert not settings.docs


def test_a_flag_wins_over_a_variable_and_a_variable_over_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQLENV_PORT", "1234")
    monkeypatch.setenv("SQLENV_STEP_BUDGET", "7")
    settings = read("--port", "4321")
    assert (settings.port, settings.step_budget, settings.workers) == (4321, 7, 1)
    assert settings.environment == EnvSettings(step_budget=7)


def test_an_empty_variable_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQLENV_TOKEN", "")
    monkeypatch.setenv("SQLENV_PORT", "")
    assert (read().token, read().port) == (None, 8000)
    assert "no token is set" in refused("--host", "0.0.0.0")


def test_lists_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQLENV_ALLOWED_ORIGINS", "https://Lab.example.org, http://localhost:3000,")
    monkeypatch.setenv("SQLENV_QUERY_WORKERS", "2, 3")
    settings = read()
    assert settings.allowed_origins == ("https://lab.example.org", "http://localhost:3000")
    assert settings.query_workers == (2, 3)
    assert read("--allowed_origins", "").allowed_origins == ()


def test_switches_and_folders() -> None:
    assert [read(*flags).docs for flags in (["--docs"], ["--docs", "false"], [])] == [True, False, False]
    assert read("--cache_dir", "~/somewhere").cache_dir == Path.home() / "somewhere"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--port", "70000"], "--port 70000: input should be less than or equal to 65535"),
        (["--port", "many"], "--port many: input should be a valid integer, unable to parse string as an integer"),
        (["--workers", "0"], "--workers 0: input should be greater than or equal to 1"),
        (["--step_budget", "0"], "--step_budget 0: input should be greater than 0"),
        (["--grace_s", "inf"], "--grace_s inf: input should be a finite number"),
        (["--answer_mode", "prose"], "--answer_mode prose: input should be 'value' or 'sql'"),
        (["--docs", "maybe"], "--docs maybe: input should be a valid boolean, unable to interpret input"),
        (["--query_workers", "1"], "--query_workers 1: there are two pools, FAST,SLOW. Write two numbers, as in 1,1"),
        (["--query_workers", "0,1"], "--query_workers 0,1: each pool needs a process, as in 1,1"),
        (["--host", ""], "--host : string should have at least 1 character"),
        (
            ["--allowed_origins", "https://a.org,https://b.org/"],
            "--allowed_origins https://a.org,https://b.org/: 'https://b.org/' is no origin. "
            "Write a scheme and a host, as in https://lab.example.org",
        ),
        (
            ["--allowed_origins", "*"],
            "--allowed_origins *: '*' is no origin. Write a scheme and a host, as in https://lab.example.org",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_value_is_one_line_and_status_2(flags: list[str], line: str, capsys: Captured) -> None:
    assert cli.main(["serve", *flags]) == 2
    assert capsys.readouterr() == ("", f"sqlenv serve: {line}\n")


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQLENV_MAX_SESSIONS", "lots")
    assert refused().startswith("SQLENV_MAX_SESSIONS=lots: input should be a valid integer")
    assert "--port -1: " in refused("--port", "-1")
    assert read("--max_sessions", "3").max_sessions == 3


@pytest.mark.parametrize("token", ["two words", "line\nbreak", "schlüssel"])
def test_a_token_that_fits_into_no_header_is_refused_and_not_shown(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for message in (refused("--token", token), _refused_variable(token, monkeypatch)):
        assert "visible ASCII characters only" in message
        assert token not in message


def _refused_variable(token: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SQLENV_TOKEN", token)
    return refused()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", "[::]"])
def test_others_need_a_token(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message = refused("--host", host)
    assert message == (
        f"{host.strip('[]')} can be reached from other machines, and no token is set. Set SQLENV_TOKEN to a secret "
        "that clients send, or --host 127.0.0.1, or, where the network is trusted, --insecure"
    )
    assert read("--host", host, "--insecure").token is None
    assert read("--host", host, "--token", TOKEN).host == host.strip("[]")
    monkeypatch.setenv("SQLENV_TOKEN", TOKEN)
    assert read("--host", host).token is not None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost", "LOCALHOST"])
def test_this_machine_needs_none(host: str) -> None:
    assert read("--host", host).token is None


@given(st.ip_addresses())
def test_only_loopback_addresses_are_loopback(address: object) -> None:
    text = str(address)
    assert is_loopback(text) == (text.startswith("127.") or text == "::1")


def test_the_resolved_settings_say_everything_but_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQLENV_TOKEN", TOKEN)
    settings, text = read_settings(["--port", "0", "--docs"])
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    assert list(lines) == list(ServiceSettings.model_fields)
    assert lines["port"] == ["0", "--port"]
    assert lines["docs"] == ["true", "--docs"]
    assert lines["token"] == ["set,", "not", "shown", "SQLENV_TOKEN"]
    assert lines["workers"] == ["1"]
    assert lines["query_workers"] == [",".join(map(str, settings.query_workers))]
    assert TOKEN not in text + str(settings) + repr(settings)


def test_the_help_teaches(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["serve", "--help"])
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("usage: sqlenv serve ")
    for name, field in ServiceSettings.model_fields.items():
        assert f"--{name} " in text
        assert f"SQLENV_{name.upper()})" in text
        assert field.description
        assert " ".join(field.description.split()) in text
    assert "examples: sqlenv serve " in text
    assert "(default: 15; SQLENV_STEP_BUDGET)" in text


WITHOUT_PACKAGES = """
import os, sys
from sqlenv import cli

for package in cli.SERVE_PACKAGES:
    pid = os.fork()
    if pid == 0:
        sys.modules[package] = None  # which is how Python marks what cannot be imported
        os._exit(cli.main(["serve", "--port", "0"]))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
"""


def test_without_the_serving_packages_it_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_PACKAGES], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()) == (
        0,
        [
            f"sqlenv serve: {package} is not installed; in SQLEnv's folder: pip install -e '.[serve]'"
            for package in cli.SERVE_PACKAGES
        ],
    )


def test_the_manifest_says_what_is_true() -> None:
    manifest = yaml.safe_load((ROOT / "openenv.yaml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (manifest["name"], manifest["version"]) == (project["name"], project["version"])
    assert manifest["port"] == ServiceSettings.model_fields["port"].default
    module, _, name = manifest["app"].partition(":")
    assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
    assert name == "app"
    low, high = manifest["validation"]["reward"]["range"]
    reward = RewardSettings()
    assert low <= reward.clip_low
    assert high >= max(reward.clip_high, reward.correct + reward.step_cost)
    assert high - manifest["validation"]["reward"]["oracle_tolerance"] <= reward.correct + reward.step_cost
