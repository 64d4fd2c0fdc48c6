"""OpenEnv's WebSocket frames: what a client may send, and what it gets. Pure.

Facts: openenv 0.10.0 on the wire, identical since 0.8. Frames are JSON objects in text; a request has a `type`, and
`data` where the type wants it; no other keys. Replies come in the order of the requests and carry no id. What breaks
an upstream session (a frame that is no object, bytes, a value that cannot be validated) is an error reply here.

`reset` takes `seed`, `episode_id`, and ours: `question_id` and `split`; unknown keys are ignored. `step` takes
the action's fields. NaN and infinities become null.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json

from env_server.types import ErrorCode, ResetRequest, SQLAction, SQLObservation, SQLState, is_unicode

MAX_ERRORS = 10
"""Validation errors listed in one reply."""
MAX_VALUES = 2_000
"""Values in one frame: more take longer to read than an event loop may be held."""
_BESIDE = {"done", "reward", "metadata"}
"""What stands beside the observation's own fields."""


class FrameError(Exception):
    """A request that cannot be carried out; `reply` is the frame that says so."""

    def __init__(self, code: ErrorCode, message: str, **details: object) -> None:
        super().__init__(message)
        self.code = code
        self.reply = error_frame(code, message, **details)


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """`state`; `close`, which ends the session; or `mcp`, a JSON-RPC message, whose tools are at /mcp."""

    kind: str
    message: object = None


Request = ResetRequest | SQLAction | ControlRequest

_KEYS = {
    "reset": {"type", "data"},
    "step": {"type", "data"},
    "mcp": {"type", "data"},
    "state": {"type"},
    "close": {"type"},
}


_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


def parse_frame(frame: str | bytes) -> Request:
    """Read a request. Raises FrameError."""
    if isinstance(frame, bytes):
        raise FrameError(ErrorCode.INVALID_JSON, "binary frames are not understood; send JSON as text")
    try:
        return _read(frame)
    except RecursionError as error:
        # JSON that is just shallow enough to be read may be too deep to be written or looked through.
        raise _no_json(error) from None


def _read(frame: str) -> Request:
    """Read a request. Raises FrameError, and RecursionError where it is nested too deeply."""
    if _holds_too_much(frame):
        raise FrameError(ErrorCode.VALIDATION_ERROR, f"a request holds at most {MAX_VALUES:,} values")
    try:
        message = json.loads(frame)
    except ValueError as error:
        raise _no_json(error) from None
    if _HALF_PAIR.search(frame) and not is_unicode(message):
        raise FrameError(ErrorCode.INVALID_JSON, "the frame holds half of a surrogate pair, which is no character")
    if not isinstance(message, dict):
        raise FrameError(ErrorCode.VALIDATION_ERROR, 'a request is a JSON object with a type, such as {"type":"state"}')
    kind = message.get("type")
    keys = _KEYS.get(kind) if isinstance(kind, str) else None
    if keys is None:
        known = ", ".join(_KEYS)
        shown = json.dumps(kind[:80] if isinstance(kind, str) else kind)[:80]
        raise FrameError(ErrorCode.UNKNOWN_TYPE, f"unknown type {shown}; known are {known}")
    extra = [key for key in message if key not in keys]
    if extra:
        errors = [{"loc": [key[:80]], "msg": "extra keys are not allowed", "type": "extra_forbidden"} for key in extra]
        raise _invalid(errors)
    return _request(str(kind), message)


def _holds_too_much(frame: str) -> bool:
    """Tell whether more than `MAX_VALUES` commas separate values; those within texts do not count."""
    if frame.count(",") <= MAX_VALUES:
        return False
    # Every other part is outside of texts. So many values with a key each have half as many quotation marks.
    most = 8 * MAX_VALUES
    parts = frame.replace("\\\\", "").replace('\\"', "").split('"', most)
    return len(parts) > most or sum(part.count(",") for part in parts[::2]) > MAX_VALUES


def _request(kind: str, message: dict[str, Any]) -> Request:
    if kind in ("state", "close", "mcp"):
        return ControlRequest(kind, message.get("data"))
    data = message.get("data", {} if kind == "reset" else None)
    if not isinstance(data, dict):
        raise _invalid([{"loc": ["data"], "msg": "must be an object", "type": "dict_type"}])
    try:
        return ResetRequest.model_validate(data) if kind == "reset" else SQLAction.model_validate(data)
    except ValidationError as error:
        raise _invalid(validation_errors(error)) from None


def validation_errors(error: ValidationError) -> list[dict[str, Any]]:
    """Return what is wrong, without the values that were sent and without connections."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    return [{"loc": list(each["loc"]), "msg": each["msg"], "type": each["type"]} for each in errors]


def _no_json(error: Exception) -> FrameError:
    return FrameError(ErrorCode.INVALID_JSON, f"the frame is not JSON: {str(error)[:200]}")


def _invalid(errors: list[dict[str, Any]]) -> FrameError:
    first = errors[0]
    place = ".".join(str(part) for part in first["loc"])
    return FrameError(ErrorCode.VALIDATION_ERROR, f"{place}: {first['msg']}", errors=errors[:MAX_ERRORS])


def observation_data(observation: SQLObservation) -> dict[str, Any]:
    """Return what `reset` and `step` answer, over WebSocket and HTTP."""
    fields = vars(observation)
    return {
        "observation": {name: value for name, value in fields.items() if name not in _BESIDE},
        "reward": observation.reward,
        "done": observation.done,
        "metadata": observation.metadata,
    }


def state_data(state: SQLState | None) -> dict[str, Any]:
    """Return what `state` answers; None before the first reset."""
    return {"episode_id": None, "step_count": 0} if state is None else dict(state)


def error_frame(code: ErrorCode, message: str, **details: object) -> str:
    """Return the reply to a request that was not carried out."""
    return reply_frame("error", {"message": message, "code": code.value, **details})


def mcp_reply(message: object) -> dict[str, object]:
    """Answer a JSON-RPC 2.0 request that comes some other way than clients of MCP go."""
    request = message if isinstance(message, dict) else {}
    request_id = request.get("id")
    known = isinstance(request_id, str | int | float | None)
    reply: dict[str, object] = {"jsonrpc": "2.0", "id": request_id if known else None}
    if request.get("jsonrpc") != "2.0" or not isinstance(request.get("method"), str):
        return {**reply, "error": {"code": -32600, "message": "not a JSON-RPC 2.0 request"}}
    return {
        **reply,
        "error": {"code": -32603, "message": "tools are for clients of MCP, at /mcp; use reset and step"},
    }


def reply_frame(kind: str, data: object) -> str:
    """Return a reply as it goes over the socket."""
    return to_json({"type": kind, "data": data}, inf_nan_mode="null").decode()
