"""One vLLM server over HTTP: token ids in, token ids and logprobs out, and the calls that change its weights.

Guarantees:
- Every failure is typed by what a caller can do about it: `ReplicaUnavailableError` may go away by itself or on another
  server (no connection, no answer in time, 429, 5xx); `ReplicaRejectedError` is a mistake in the call (any other 4xx),
  or, as `NotVLLMError`, in its address: what answers there does not answer as vLLM does.
- A completion is what was asked for: one choice, no more tokens than allowed, ended by a stop id or the limit, each
  with a logprob that is finite and not positive.
- Every sampling field is sent. vLLM would take what is missing from the model's generation config.
- A cancelled call closes its connection, and vLLM then drops the request.

The calls that change weights belong to vLLM's development endpoints (VLLM_SERVER_DEV_MODE=1), which must never be
reachable by strangers. Written for vLLM 0.32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import aiohttp

from inference.engine import EngineError, FinishReason, Sampling

NEW_PROCESS = "default"
"""The weight version of a server that nobody has pushed to."""

_FACTS = "sqlenv_facts"
WORKERS = "/collective_rpc"
"""Where the methods of a server's workers are called."""

OPENENV_HEALTH = {"status": "healthy"}
"""What environment servers answer to GET /health, where vLLM answers with nothing."""

T = TypeVar("T")

LEAST_LOGPROB = -9_999.0
"""What vLLM writes for minus infinity: JSON has none."""
LARGEST_LOGPROB = 1e-3
"""Logprobs are at most 0; kernels that subtract a rounded log-sum-exp from a logit miss that by a rounding error."""
_BUSY = frozenset((429, 503))
_MODELS, _COMPLETIONS = "/v1/models", "/v1/completions"
_SHOWN_CHARS = 300
"""Of an error's text."""


class ReplicaError(EngineError):
    """A call to a server failed. `url` names the server."""

    def __init__(self, url: str, text: str) -> None:
        super().__init__(f"{url}: {text}")
        self.url = url


class ReplicaUnavailableError(ReplicaError):
    """The server did not answer, or cannot now. `busy`: it is there, and asks to be left alone for a moment."""

    def __init__(self, url: str, text: str, *, busy: bool = False, answered: bool = False) -> None:
        super().__init__(url, text)
        self.busy = busy
        self.answered = answered
        """Whether there was an HTTP answer at all."""


class ReplicaRejectedError(ReplicaError):
    """The server refuses the call itself; the same call fails anywhere."""


class NotVLLMError(ReplicaRejectedError):
    """What answers at this address is not vLLM, or a proxy answers for it: a login page, another engine."""

    def __init__(self, url: str, path: str, found: str) -> None:
        super().__init__(
            url, f"{path} answered {found}, which vLLM does not; start a server with `sqlenv inference --model ...`"
        )


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a server serves: the name that requests ask for, and its context in tokens."""

    name: str
    max_model_len: int


@dataclass(frozen=True, slots=True)
class ServerCompletion:
    """One completion. `logprobs` are under the temperature-scaled distribution (greedy: under temperature 1).

    `fingerprint` is the server's own word for itself. The launcher makes it new for each process, so that a client can
    tell a server that was restarted; elsewhere it only names the version.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    fingerprint: str | None


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One process that holds a model on a GPU: a worker of a server, or the trainer's main process.

    `transfer` is the transport that the server was prepared for, `gpu` a UUID, `nccl` the version of the library that
    vLLM loads, `process` a name that no other process has had, `dtype` the one of all its parameters.
    `config` and `weights` are digests of what `location` holds. "" where there is none, or it is not known.
    """

    process: str = ""
    transfer: str = ""
    gpu: str = ""
    nccl: str = ""
    dtype: str = ""
    location: str = ""
    config: str = ""
    weights: str = ""

    def has_same_model(self, other: WorkerFacts) -> bool:
        """Whether both hold the same model, as far as that is known of both."""
        return bool(self.config and self.weights) and (self.config, self.weights) == (other.config, other.weights)


class VLLMServer:
    """The calls to one server, over a client whose life is the caller's.

    `model` is the name that requests ask for: the served model, or an adapter on it.
    """

    def __init__(self, url: str, client: aiohttp.ClientSession, model: str = "") -> None:
        self.url = url.rstrip("/")
        self.model = model
        self._client = client

    async def health(self, timeout_s: float) -> None:
        """Return when the server is healthy. Raises ReplicaError."""
        await self._call("GET", "/health", timeout_s=timeout_s)

    async def metrics(self, timeout_s: float) -> str:
        """Return what the server tells Prometheus. Raises ReplicaError."""
        return str(await self._call("GET", "/metrics", timeout_s=timeout_s))

    async def served_model(self) -> ServedModel:
        """Return the base model that the server serves. Raises ReplicaError."""
        try:
            cards = await self._cards()
        except ReplicaRejectedError as error:
            if await self._call("GET", "/health") != OPENENV_HEALTH:
                raise
            raise ReplicaRejectedError(
                self.url,
                "it is an environment server of `sqlenv serve`, which --env takes; --vllm_server_base_url wants one of "
                "`sqlenv inference`",
            ) from error
        for card in cards:
            if not card.get("parent"):
                context = self._part(_MODELS, card, "max_model_len", int)
                return ServedModel(self._part(_MODELS, card, "id", str), context)
        raise NotVLLMError(self.url, _MODELS, "no model")

    async def served_adapters(self) -> dict[str, str]:
        """Return the adapters that requests can ask for: where each was loaded from, by name. Raises ReplicaError."""
        found = [card for card in await self._cards() if card.get("parent")]
        return {self._part(_MODELS, card, "id", str): str(card.get("root")) for card in found}

    async def complete(
        self,
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        seed: int,
        stop_ids: tuple[int, ...],
        *,
        is_bounded: bool = True,
    ) -> ServerCompletion:
        """Generate until one of `stop_ids`, or as many tokens as asked for. Raises ReplicaError.

        Unless `is_bounded`, the session's deadline is for the connection only, and the caller ends the call.
        """
        reply = await self._call(
            "POST",
            _COMPLETIONS,
            {
                "model": self.model,
                "prompt": prompt_ids,
                "add_special_tokens": False,
                "max_tokens": sampling.max_new_tokens,
                "min_tokens": 0,
                "temperature": sampling.temperature,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "seed": seed,
                "n": 1,
                "stop": [],
                "stop_token_ids": stop_ids,
                # What ends a turn is the caller's to say; a stop id ends it all the same.
                "ignore_eos": True,
                "logprobs": 0,
                "return_token_ids": True,
                "skip_special_tokens": False,
                "stream": False,
            },
            timeout_s=None if is_bounded else math.inf,
        )
        return self._completion(reply, sampling, stop_ids)

    async def settings(self) -> dict[str, Any]:
        """Return vLLM's settings, section by section. Takes it seconds. Raises ReplicaError."""
        reply = await self._call("GET", "/server_info", params={"config_format": "json"})
        return self._part("/server_info", reply, "vllm_config", dict)

    async def pause(self) -> None:
        """Stop generating, once what is in flight has ended. Raises ReplicaError."""
        await self.post("/pause", params={"mode": "wait"})

    async def resume(self, timeout_s: float | None = None) -> None:
        """Go on generating. Raises ReplicaError."""
        await self._call("POST", "/resume", timeout_s=timeout_s)

    async def reset_prefix_cache(self) -> None:
        """Forget what was computed with earlier weights. Raises ReplicaError.

        Requests that run are computed again from their first token on, and go on: else the server would keep what they
        hold, and requests to come would begin with it.
        """
        reply = await self.post("/reset_prefix_cache", params={"reset_running_requests": "true"})
        if reply != {"success": True}:
            raise ReplicaUnavailableError(self.url, f"it did not reset its prefix cache: {reply}", answered=True)

    async def weight_version(self) -> str:
        """Return what `set_weight_version` set in this process of the server. Raises ReplicaError."""
        reply = await self._call("GET", "/weight_info")
        return self._part("/weight_info", reply, "weight_version", str)

    async def set_weight_version(self, version: str) -> None:
        """Mark the weights that the server has now. Raises ReplicaError."""
        await self.post("/update_weight_version", json={"new_version": version})

    async def _cards(self) -> list[dict[str, Any]]:
        cards = self._part(_MODELS, await self._call("GET", _MODELS), "data", list)
        if not all(isinstance(card, dict) for card in cards):
            raise NotVLLMError(self.url, _MODELS, _shown(cards))
        return cards

    def _completion(self, reply: object, sampling: Sampling, stop_ids: tuple[int, ...]) -> ServerCompletion:
        """Return the completion that a reply holds. Raises ReplicaError."""
        choices = self._part(_COMPLETIONS, reply, "choices", list)
        if len(choices) != 1:
            raise NotVLLMError(self.url, _COMPLETIONS, f"{len(choices)} choices, of which one was asked for")
        (choice,) = choices
        reason = choice.get("finish_reason") if isinstance(choice, dict) else None
        token_ids = self._part(_COMPLETIONS, choice, "token_ids", list)
        if not token_ids or reason not in tuple(FinishReason):
            # An aborted request ends so, when the server was paused in mode abort.
            raise ReplicaUnavailableError(
                self.url, f"it broke off a completion ({len(token_ids)} tokens, {reason!r})", answered=True
            )
        logprobs = self._part(_COMPLETIONS, self._part(_COMPLETIONS, choice, "logprobs", dict), "token_logprobs", list)
        if wrong := _wrong_tokens(token_ids, reason, sampling, stop_ids) or _wrong_logprobs(logprobs, len(token_ids)):
            raise NotVLLMError(self.url, _COMPLETIONS, wrong)
        # They are numbers by now.
        if not all(LEAST_LOGPROB < value <= LARGEST_LOGPROB for value in logprobs):
            raise ReplicaRejectedError(
                self.url,
                "it generates tokens whose logprobs are not finite, or positive; its weights or its precision are "
                "broken, or they are no logprobs (sqlenv inference: --logprobs-mode processed_logprobs)",
            )
        assert isinstance(reply, dict)  # it has choices
        return ServerCompletion(
            tuple(token_ids), tuple(logprobs), FinishReason(reason), reply.get("system_fingerprint")
        )

    def _part(self, path: str, reply: object, name: str, kind: type[T]) -> T:
        """Return what a reply holds under a name. Raises NotVLLMError when it is not of that kind."""
        found = reply.get(name) if isinstance(reply, dict) else None
        if not isinstance(found, kind):
            raise NotVLLMError(self.url, path, f"no {name}: {_shown(reply)}")
        return found

    async def facts(self) -> tuple[WorkerFacts, ...]:
        """Return what the server's workers say of themselves; nothing where `sqlenv inference` did not start it.

        Raises ReplicaError.
        """
        try:
            return self.worker_facts(await self.call_workers(_FACTS))
        except NotVLLMError:
            raise
        except ReplicaRejectedError:  # its development endpoints are closed
            return ()
        except ReplicaUnavailableError as error:
            if _FACTS in str(error):
                return ()
            raise

    def worker_facts(self, told: Sequence[object]) -> tuple[WorkerFacts, ...]:
        """Return the facts that workers told; what is not known here is left out. Raises NotVLLMError."""
        known = {field.name for field in fields(WorkerFacts)}
        workers = []
        for one in told:
            if not isinstance(one, dict):
                raise NotVLLMError(self.url, WORKERS, f"no facts: {one}")
            workers.append(WorkerFacts(**{name: str(one[name]) for name in known & one.keys()}))
        return tuple(workers)

    async def call_workers(self, method: str, *, timeout_s: float | None = None, **arguments: object) -> list[Any]:
        """Call a method of each of the server's workers; return what each returned. Raises ReplicaError."""
        reply = await self.post(WORKERS, {"method": method, "kwargs": arguments}, timeout_s=timeout_s)
        return self._part(WORKERS, reply, "results", list)

    async def get(self, path: str) -> Any:
        """GET, and return the reply's JSON, or its text. Raises ReplicaError."""
        return await self._call("GET", path)

    async def post(
        self,
        path: str,
        json: object = None,
        params: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """POST, and return the reply's JSON, or its text. Raises ReplicaError."""
        return await self._call("POST", path, json, params, timeout_s)

    async def _call(
        self,
        method: str,
        path: str,
        body: object = None,
        params: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Make a request and read its answer within the session's deadline, or `timeout_s`. Raises ReplicaError."""
        usual = self._client.timeout
        limit = usual.total if timeout_s is None else timeout_s
        deadlines = aiohttp.ClientTimeout(None if limit == math.inf else limit, sock_connect=usual.sock_connect)
        try:
            async with self._client.request(
                method, self.url + path, json=body, params=params, timeout=deadlines, allow_redirects=False
            ) as reply:
                text = await reply.text(errors="replace")
        except TimeoutError as error:
            raise ReplicaUnavailableError(self.url, f"no answer to {path} in time ({type(error).__name__})") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ReplicaUnavailableError(self.url, f"{type(error).__name__}: {error}".rstrip(": ")) from error
        if reply.status == 429 or reply.status >= 500:
            complaint = f"{path} answered {reply.status}: {_complaint(text)}"
            raise ReplicaUnavailableError(self.url, complaint, busy=reply.status in _BUSY, answered=True)
        if 300 <= reply.status < 400:
            raise NotVLLMError(self.url, path, f"a redirect to {reply.headers.get('Location', 'nowhere')}")
        if reply.status >= 400:
            hint = ""
            if reply.status == 404 and not path.startswith("/v1/"):
                hint = "; was the server started by `sqlenv inference`, or with VLLM_SERVER_DEV_MODE=1?"
            raise ReplicaRejectedError(self.url, f"{path} answered {reply.status}: {_complaint(text)}{hint}")
        try:
            return json.loads(text)
        except ValueError:
            return text


def _complaint(text: str) -> str:
    """The server's own words, in one line."""
    try:
        found = json.loads(text)
        error = found.get("error", found.get("detail", found))
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        pass
    return _in_one_line(text)


def _shown(reply: object) -> str:
    """What came instead of what was expected, in one line."""
    return _in_one_line(reply if isinstance(reply, str) else json.dumps(reply)) or "nothing"


def _in_one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _wrong_tokens(token_ids: list[Any], reason: str, sampling: Sampling, stop_ids: tuple[int, ...]) -> str:
    """Say what is wrong with a completion's tokens, "" when nothing is."""
    if not all(type(token) is int and token >= 0 for token in token_ids):
        return f"token_ids that are no token ids: {_shown(token_ids)}"
    if len(token_ids) > sampling.max_new_tokens:
        return f"{len(token_ids)} tokens, where at most {sampling.max_new_tokens} were asked for"
    ends = [token in stop_ids for token in token_ids]
    if any(ends[:-1]) or (reason == FinishReason.STOP and not ends[-1]):
        return "a completion that did not end where its stop_token_ids say"
    return ""


def _wrong_logprobs(logprobs: list[Any], tokens: int) -> str:
    """Say why these are no logprobs of so many tokens, "" when they are."""
    if len(logprobs) != tokens or not all(isinstance(value, int | float) for value in logprobs):
        return f"no logprob for each of {tokens} tokens: {_shown(logprobs)}"
    return ""
