"""Frames: what is understood, what is answered to the rest, and what a reply looks like."""

from __future__ import annotations

import json
import math
import sys
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.dataset import Split
from env_server.service.protocol import (
    MAX_VALUES,
    ControlRequest,
    FrameError,
    mcp_reply,
    observation_data,
    parse_frame,
    reply_frame,
    state_data,
)
from env_server.types import ResetRequest, SQLAction, SQLObservation, SQLState

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def rejection(frame: str | bytes) -> dict[str, object]:
    with pytest.raises(FrameError) as caught:
        parse_frame(frame)
    reply = json.loads(caught.value.reply)
    assert reply["type"] == "error"
    assert reply["data"]["code"] == caught.value.code
    data: dict[str, object] = reply["data"]
    return data


def test_each_request_is_read() -> None:
    assert parse_frame('{"type":"reset"}') == ResetRequest()
    assert parse_frame('{"type":"reset","data":{"seed":3,"split":"eval","episode_id":"e","colour":1}}') == ResetRequest(
        seed=3, split=Split.EVAL, episode_id="e"
    )
    step = '{"type":"step","data":{"action_type":"QUERY","argument":"SELECT 1"}}'
    assert parse_frame(step) == SQLAction(action_type="QUERY", argument="SELECT 1")
    assert parse_frame('{"type":"state"}') == ControlRequest("state")
    assert parse_frame('{"type":"close"}') == ControlRequest("close")
    assert parse_frame('{"type":"mcp","data":{"id":1}}') == ControlRequest("mcp", {"id": 1})


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b'{"type":"state"}', "INVALID_JSON"),
        ("", "INVALID_JSON"),
        ("{", "INVALID_JSON"),
        ("[" * 100_000, "INVALID_JSON"),
        ('{"type":"reset","data":{"seed":' + "9" * 5_000 + "}}", "INVALID_JSON"),
        (b"\xff\xfe\x00", "INVALID_JSON"),
        ('{"type":"\\ud800"}', "INVALID_JSON"),
        ("[]", "VALIDATION_ERROR"),
        ("null", "VALIDATION_ERROR"),
        ('"state"', "VALIDATION_ERROR"),
        ("3", "VALIDATION_ERROR"),
        ("{}", "UNKNOWN_TYPE"),
        ('{"type":3}', "UNKNOWN_TYPE"),
        ('{"type":["reset"]}', "UNKNOWN_TYPE"),
        ('{"type":"dance"}', "UNKNOWN_TYPE"),
        ('{"type":"state","data":{}}', "VALIDATION_ERROR"),
        ('{"type":"state","id":1}', "VALIDATION_ERROR"),
        ('{"type":"step"}', "VALIDATION_ERROR"),
        ('{"type":"step","data":[]}', "VALIDATION_ERROR"),
        ('{"type":"step","data":{}}', "VALIDATION_ERROR"),
        ('{"type":"reset","data":{},"extra":1}', "VALIDATION_ERROR"),
        ('{"type":"step","data":{"action":{"action_type":"QUERY"}}}', "VALIDATION_ERROR"),
        ('{"type":"step","data":{"action_type":7}}', "VALIDATION_ERROR"),
        ('{"type":"step","data":{"action_type":"QUERY","sql":"x"}}', "VALIDATION_ERROR"),
        ('{"type":"reset","data":{"seed":-1}}', "VALIDATION_ERROR"),
        ('{"type":"reset","data":{"seed":"x"}}', "VALIDATION_ERROR"),
        ('{"type":"reset","data":{"seed":99999999999999999999999}}', "VALIDATION_ERROR"),
        ('{"type":"reset","data":{"episode_id":"' + "x" * 256 + '"}}', "VALIDATION_ERROR"),
        ('{"type":"reset","data":{"split":"test"}}', "VALIDATION_ERROR"),
        ('{"type":"reset","data":null}', "VALIDATION_ERROR"),
        ('{"type":"state","\\ud800":1}', "INVALID_JSON"),
        ('{"type":"step","data":{"action_type":"QUERY","argument":"\\uDfff"}}', "INVALID_JSON"),
    ],
)
def test_what_is_not_understood_is_told(frame: str | bytes, code: str) -> None:
    data = rejection(frame)
    assert data["code"] == code
    assert data["message"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"type":', "}"),
        ('{"type":"mcp","data":["\\ud83d\\ude00",', "]}"),
        ('{"type":"mcp","data":', "}"),
        ('{"type":"step","data":{"action_type":"QUERY","metadata":{"x":', "}}}"),
        ('{"type":"step","data":{"action_type":', "}}"),
        ('{"type":"reset","data":{"seed":', "}}"),
    ],
)
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_at_every_depth_of_nesting_it_is_a_request_or_a_refusal(
    before: str, after: str, opening: str, closing: str
) -> None:
    for depth in range(sys.getrecursionlimit() + 20):
        frame = before + opening * depth + "0" + closing * depth + after
        with suppress(FrameError):
            parse_frame(frame)


MEGABYTE = 1_000_000
STEP = '{"type":"step","data":{"action_type":"QUERY",...}}'
KEYS = ",".join(f'"k{number}":0' for number in range(MEGABYTE // 11))


@pytest.mark.parametrize(
    ("frame", "filling", "code"),
    [
        (STEP, '"argument":"' + "a, " * (MEGABYTE // 3) + '"', None),
        (STEP, '"argument":"' + '\\"[{,\\\\' * (MEGABYTE // 7) + '"', None),
        ('{"type":"mcp","data":{"id":"..."}}', "x" * MEGABYTE, None),
        ("...", "[" * MEGABYTE, "INVALID_JSON"),
        ('{"type":["...', "," * MEGABYTE, "INVALID_JSON"),
        ('{"type":"..."}', "x" * MEGABYTE, "UNKNOWN_TYPE"),
        ('{"type":"reset","data":{"question_id":"..."}}', "é" * MEGABYTE, "VALIDATION_ERROR"),
        (STEP, KEYS, "VALIDATION_ERROR"),
        ('{"type":"step","data":{"action_type":"QUERY","metadata":{...}}}', KEYS, "VALIDATION_ERROR"),
        ('{"type":"step",...}', KEYS, "VALIDATION_ERROR"),
        ('{"type":"reset","data":{...}}', KEYS, "VALIDATION_ERROR"),
        ('{"type":"mcp","data":[...]}', "{}," * (MEGABYTE // 3) + "0", "VALIDATION_ERROR"),
        ('{"type":[...]}', "1," * (MEGABYTE // 2) + "1", "VALIDATION_ERROR"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else value,
)
def test_a_megabyte_is_read_or_refused_in_few_words(frame: str, filling: str, code: str | None) -> None:
    frame = frame.replace("...", filling)
    assert len(frame) > 900_000
    if code is None:
        parse_frame(frame)
    else:
        data = rejection(frame)
        assert data["code"] == code
        assert len(json.dumps(data)) < 2_000


def test_as_many_values_are_read_as_a_frame_may_hold() -> None:
    many = ",".join('"a, b"' for _ in range(MAX_VALUES))
    assert parse_frame(f'{{"type":"mcp","data":[{many}]}}') == ControlRequest("mcp", ["a, b"] * MAX_VALUES)
    assert rejection(f'{{"type":"mcp","data":[{many},1,2]}}')["code"] == "VALIDATION_ERROR"


def test_validation_errors_are_listed_without_the_values_sent() -> None:
    data = rejection('{"type":"step","data":{"action_type":7,"argument":"SELECT secret"}}')
    assert data["errors"] == [{"loc": ["action_type"], "msg": "Input should be a valid string", "type": "string_type"}]
    assert "secret" not in json.dumps(data)


@given(frame=st.one_of(st.text(), st.binary(), json_values.map(json.dumps)))
def test_whatever_comes_is_a_request_or_a_refusal(frame: str | bytes) -> None:
    read: object
    try:
        read = parse_frame(frame)
    except FrameError as error:
        read = json.loads(error.reply)["type"]
    assert read == "error" or isinstance(read, ResetRequest | SQLAction | ControlRequest)


def test_a_whole_surrogate_pair_is_a_character() -> None:
    step = parse_frame('{"type":"step","data":{"action_type":"QUERY","argument":"\\ud83d\\ude00"}}')
    assert step == SQLAction(action_type="QUERY", argument="\U0001f600")


def test_an_observation_stands_apart_from_its_reward() -> None:
    observation = SQLObservation(
        done=True,
        reward=math.inf,
        question="q?",
        schema_info="Tables: t",
        budget_remaining=1,
        metadata={"verdict": "wrong"},
    )
    reply = json.loads(reply_frame("observation", observation_data(observation)))
    assert reply["type"] == "observation"
    assert set(reply["data"]) == {"observation", "reward", "done", "metadata"}
    assert reply["data"]["reward"] is None
    assert reply["data"]["metadata"] == {"verdict": "wrong"}
    assert set(reply["data"]["observation"]) == set(SQLObservation.model_fields) - {"done", "reward", "metadata"}


def test_the_state_before_and_after_a_reset() -> None:
    assert state_data(None) == {"episode_id": None, "step_count": 0}
    assert state_data(SQLState(episode_id="e", step_count=2)) == {"episode_id": "e", "step_count": 2}


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({}, -32600),
        ([], -32600),
        ({"jsonrpc": "1.0", "method": "x"}, -32600),
        ({"jsonrpc": "2.0", "method": 3, "id": 4}, -32600),
        ({"jsonrpc": "2.0", "method": "tools/list", "id": 5}, -32603),
    ],
)
def test_there_are_no_tools(message: object, code: int) -> None:
    reply = mcp_reply(message)
    assert reply["jsonrpc"] == "2.0"
    assert reply["id"] == (message.get("id") if isinstance(message, dict) else None)
    assert isinstance(reply["error"], dict)
    assert reply["error"]["code"] == code
