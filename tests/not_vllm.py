"""A stand-in for a vLLM server that answers as vLLM does but for one fault: another engine, a proxy, a broken model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

STOP = 3
MODELS, COMPLETIONS = "/v1/models", "/v1/completions"


@dataclass(frozen=True)
class Answer:
    """An HTTP answer."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Fault:
    """What is wrong with the answers to requests for a path, given the right one."""

    path: str
    answer: Callable[[dict[str, Any]], Answer]


def _answer(reply: object) -> Answer:
    return Answer(json.dumps(reply).encode())


def _as(body: bytes, status: int = 200, **headers: str) -> Callable[[dict[str, Any]], Answer]:
    return lambda _: Answer(body, status, headers)


def _card(**other: object) -> Fault:
    return Fault(MODELS, lambda reply: _answer({"data": [_changed(reply["data"][0], other)]}))


def _choice(**other: object) -> Fault:
    return Fault(COMPLETIONS, lambda reply: _answer({"choices": [_changed(reply["choices"][0], other)]}))


def _changed(of: dict[str, Any], other: dict[str, object]) -> dict[str, Any]:
    """Return it with other values; `...` stands for none."""
    return {name: value for name, value in {**of, **other}.items() if value is not ...}


def _logprobs(*values: object) -> Fault:
    return _choice(logprobs={"token_logprobs": values})


_LOGIN = b"<html>\n<body>Sign in</body>\n</html>"

NOT_VLLM = {
    "no max_model_len": _card(max_model_len=...),
    "null max_model_len": _card(max_model_len=None),
    "no id": _card(id=...),
    "no models": Fault(MODELS, _as(b'{"data": []}')),
    "models are no list": Fault(MODELS, _as(b'{"data": {"a": 1}}')),
    "models are names": Fault(MODELS, _as(b'{"data": ["a"]}')),
    "models in HTML": Fault(MODELS, _as(_LOGIN)),
    "models elsewhere": Fault(MODELS, _as(b"", 302, Location="https://sso.example/")),
    "nothing for models": Fault(MODELS, _as(b"")),
    "completion in HTML": Fault(COMPLETIONS, _as(_LOGIN)),
    "completion elsewhere": Fault(COMPLETIONS, _as(b"", 307, Location="http://127.0.0.1:1/")),
    "half of a completion": Fault(COMPLETIONS, lambda reply: Answer(json.dumps(reply).encode()[:50])),
    "bytes that are no text": Fault(COMPLETIONS, _as(b'\xff\xfe{"a"')),
    "a list": Fault(COMPLETIONS, _as(b"[1]")),
    "null": Fault(COMPLETIONS, _as(b"null")),
    "error with 200": Fault(COMPLETIONS, _as(b'{"error": {"message": "boom", "code": 500}}')),
    "no choices": Fault(COMPLETIONS, _as(b'{"choices": []}')),
    "two choices": Fault(COMPLETIONS, lambda reply: _answer({"choices": reply["choices"] * 2})),
    "choice is no object": Fault(COMPLETIONS, _as(b'{"choices": [1]}')),
    "no token_ids": _choice(token_ids=...),
    "null token_ids": _choice(token_ids=None),
    "token_ids as text": _choice(token_ids=["7", "8", "3"]),
    "negative token_ids": _choice(token_ids=[7, -5, STOP]),
    "more tokens than asked for": _choice(token_ids=[7] * 500, finish_reason="length"),
    "tokens after the stop": _choice(token_ids=[7, STOP, STOP]),
    "no stop": _choice(token_ids=[7, 8, 9]),
    "null logprobs": _choice(logprobs=None),
    "logprobs of fewer tokens": _logprobs(-0.1, -0.2),
    "logprobs as text": _logprobs("-0.1", "-0.2", "-0.3"),
    "a logprob that is null": _logprobs(None, -0.2, -0.3),
}
"""That the server is none of vLLM's."""

BROKEN_MODEL = {
    "NaN": _logprobs(-0.1, float("nan"), -0.3),
    "minus infinity": _logprobs(-0.1, float("-inf"), -0.3),
    "minus infinity as vLLM writes it": _logprobs(-0.1, -9999.0, -0.3),
    "positive": _logprobs(-0.1, 0.5, -0.3),
}
"""That what it computes is no distribution."""


class _Handler(BaseHTTPRequestHandler):
    model = ""
    fault: Fault | None = None
    version = "default"

    def do_GET(self) -> None:
        card = {"id": self.model, "max_model_len": 4_096, "root": self.model, "parent": None}
        replies = {"/health": "", MODELS: {"data": [card]}, "/weight_info": {"weight_version": type(self).version}}
        self._send(replies.get(self.path))

    def do_POST(self) -> None:
        call = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        path = self.path.partition("?")[0]
        if path == "/update_weight_version":
            type(self).version = call["new_version"]
        logprobs = {"token_logprobs": [-0.1, -0.2, -0.3]}
        end = call.get("stop_token_ids") or [9]
        choice = {
            "token_ids": [7, 8, end[0]],
            "logprobs": logprobs,
            "finish_reason": "stop" if end != [9] else "length",
        }
        replies = {
            "/pause": {},
            "/resume": {},
            "/update_weight_version": {},
            "/collective_rpc": {"results": [{}]},
            "/reset_prefix_cache": {"success": True},
            COMPLETIONS: {"choices": [choice], "system_fingerprint": None},
        }
        self._send(replies.get(path))

    def _send(self, reply: Any) -> None:
        path = self.path.partition("?")[0]
        answer = Answer(b"{}", 404) if reply is None else Answer(b"") if reply == "" else _answer(reply)
        if self.fault is not None and path == self.fault.path:
            answer = self.fault.answer(reply)
        self.send_response(answer.status)
        for name, value in (answer.headers | {"Content-Length": str(len(answer.body))}).items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(ConnectionError):  # whoever has seen the fault may have left
            self.wfile.write(answer.body)

    def log_message(self, *args: object) -> None:
        """Keep quiet."""


@contextmanager
def answering(model: str, fault: Fault | None, port: int = 0) -> Iterator[str]:
    """Serve for the `with` block, on a free port or the given one; yields the URL."""
    handler = type("Handler", (_Handler,), {"model": model, "fault": fault})
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
