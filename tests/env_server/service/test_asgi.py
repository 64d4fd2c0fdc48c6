"""The application for another ASGI server: settings from variables, and never without a token."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI

from env_server.service import asgi
from env_server.service.settings import PREFIX, SettingsError


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """The variables that a test sets, and no others; and no application from before."""
    for name in os.environ:
        if name.upper().startswith(PREFIX):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SQLENV_CACHE_DIR", str(tmp_path / "cache"))
    yield monkeypatch
    vars(asgi).pop("app", None)


def test_it_is_made_once_with_the_settings_of_the_variables(variables: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "customers.csv").write_text("name,city\nAda,Oslo\nBo,Lima\n", encoding="utf-8")
    question = '{"question": "How many?", "sql": "SELECT COUNT(*) FROM customers"}'
    (tmp_path / "questions.jsonl").write_text(question, encoding="utf-8")
    variables.setenv("SQLENV_DATA", str(tmp_path))
    variables.setenv("SQLENV_TOKEN", "secret")
    variables.setenv("SQLENV_MAX_SESSIONS", "7")
    app = asgi.app
    assert isinstance(app, FastAPI)
    assert app.state.service.ready()["max_sessions"] == 7
    assert app.state.service.ready()["data"]["questions"] == 1
    assert asgi.app is app


def test_it_cannot_see_who_reaches_it_and_so_wants_a_token() -> None:
    with pytest.raises(SettingsError, match=r"no token is set. Set SQLENV_TOKEN .* SQLENV_INSECURE=true"):
        asgi.app  # noqa: B018


def test_a_wrong_variable_is_said(variables: pytest.MonkeyPatch) -> None:
    variables.setenv("SQLENV_PORT", "no number")
    with pytest.raises(SettingsError, match=r"^SQLENV_PORT=no number: input should be a valid integer"):
        asgi.app  # noqa: B018


def test_it_has_nothing_else() -> None:
    with pytest.raises(AttributeError, match="no attribute 'application'"):
        asgi.application  # noqa: B018
