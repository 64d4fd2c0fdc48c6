"""From a policy's words to one action: every accepted form, what is cut, and what is never raised."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env_server.types import ActionType, SQLAction
from trainer.chat.actions import ParsedAction, format_action, parse_action, parse_call

ACTIONS = st.sampled_from([str(kind) for kind in ActionType])
# Words that make up the syntax, so that arbitrary text meets every branch.
FRAGMENTS = st.sampled_from(
    [
        "DESCRIBE",
        "query ",
        "ANSWER:",
        "Action:",
        "```",
        "```sql\n",
        "**",
        "`",
        "\n",
        "\n\n",
        " ",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        '{"name": "query",',
        '"arguments": {',
        '"sql": "SELECT 1"',
        "}",
        "{",
        "[",
        "a | b",
        "SELECT 1",
        "Observation:",
        "- ",
        "1. ",
        ":",
        "\r\n",
        "\u2028",
        "\x00",
        "\ud800",
        "é",
        "pets",
    ]
)
NOISE = st.one_of(st.text(), st.lists(FRAGMENTS).map("".join))


def parsed(text: str) -> tuple[str, str]:
    """The action of a text that is one."""
    result = parse_action(text)
    assert result.parseable, result
    return result.action.action_type, result.action.argument


@pytest.mark.parametrize(
    "text",
    [
        "DESCRIBE pets",
        "DESCRIBE: pets",
        "describe pets",
        "Describe : pets",
        "  \n\tDESCRIBE \t pets  \n",
        "DESCRIBE\npets",
        "DESCRIBE pets\r\n",
        "**DESCRIBE pets**",
        "**DESCRIBE** pets",
        "**DESCRIBE**: pets",
        "**DESCRIBE:** pets",
        "DESCRIBE: **pets**",
        "`DESCRIBE pets`",
        "DESCRIBE `pets`",
        "- DESCRIBE pets",
        "* **DESCRIBE** `pets`",
        "1. DESCRIBE pets",
        "> DESCRIBE pets",
        "## DESCRIBE pets",
        "ACTION: DESCRIBE pets",
        "Action: DESCRIBE: pets",
        "**Action:** DESCRIBE pets",
        "Next action: describe pets",
        "Action 1: DESCRIBE pets",
        "I will look at the table.\nACTION: DESCRIBE pets",
        "I will look at the table.\n\nDESCRIBE pets\n\nThis shows its columns.",
        "```\nDESCRIBE pets\n```",
        "```sql\nDESCRIBE pets\n```",
        "```DESCRIBE pets```",
        "```sql DESCRIBE pets```",
        "DESCRIBE\n```\npets\n```",
        "<think>SAMPLE owners first?</think>\n\nDESCRIBE pets",
        "SAMPLE owners first? No.\n</think>\nDESCRIBE pets",
        "<THINK>a</THINK>b<think>c</think>\nDESCRIBE pets",
        "DESCRIBE pets\n<think>and then",
    ],
)
def test_spoken_forms_of_one_action(text: str) -> None:
    assert parsed(text) == ("DESCRIBE", "pets")


@pytest.mark.parametrize(
    "text",
    [
        "QUERY SELECT name\nFROM pets",
        "QUERY: SELECT name\nFROM pets",
        "QUERY\nSELECT name\nFROM pets",
        "QUERY ```sql\nSELECT name\nFROM pets\n```",
        "QUERY:\n```sql\nSELECT name\nFROM pets\n```\nThis lists the names.",
        "QUERY\n```\nSELECT name\nFROM pets",
        "QUERY ```SELECT name\nFROM pets```",
        "QUERY `SELECT name\nFROM pets`",
        "```sql\nQUERY SELECT name\nFROM pets\n```",
        "Action: QUERY SELECT name\nFROM pets\n\nThis lists the names.",
    ],
)
def test_sql_of_several_lines(text: str) -> None:
    assert parsed(text) == ("QUERY", "SELECT name\nFROM pets")


def test_a_fence_bounds_sql_with_blank_lines() -> None:
    assert parsed("QUERY\n```sql\nSELECT 1\n\nUNION SELECT 2\n```\n\nDone.") == ("QUERY", "SELECT 1\n\nUNION SELECT 2")


@pytest.mark.parametrize(
    "invented",
    [
        "ACTION: ANSWER 3",
        "ANSWER 3",
        "**ANSWER:** 3",
        "Observation: 3\nANSWER 3",
        "Result: 3",
        "```\nANSWER 3",
        '{"action_type": "ANSWER", "argument": "3"}',
        '<tool_call>{"name": "answer", "arguments": {"value": 3}}</tool_call>',
        "\nSo the answer is 3.",
    ],
)
def test_the_first_action_wins_and_what_follows_is_cut(invented: str) -> None:
    assert parsed("QUERY SELECT COUNT(*)\nFROM pets\n" + invented) == ("QUERY", "SELECT COUNT(*)\nFROM pets")
    assert parsed("DESCRIBE pets\n" + invented) == ("DESCRIBE", "pets")


def test_json_before_a_spoken_action_is_the_first() -> None:
    assert parsed('{"action": "sample", "table": "pets"}\nANSWER 3') == ("SAMPLE", "pets")


def test_rows_of_an_answer_survive() -> None:
    rows = "Anna | 3\nSample B\nSAMPLE | 4\nanswer | 5\n{x} | 6"
    assert parsed(f"ANSWER {rows}") == ("ANSWER", rows)
    assert parsed(f"ANSWER:\n{rows}\n\nThese are the rows.") == ("ANSWER", rows)


@pytest.mark.parametrize("answer", ["-5", "[]", '[[1, "a"]]', '[\n{"a": 1}\n]', "12:30", "Rome, Oslo", "SELECT 1", "*"])
def test_answers_are_kept_as_they_are(answer: str) -> None:
    assert parsed(f"ANSWER {answer}") == ("ANSWER", answer)
    assert parsed(f"ANSWER: {answer}") == ("ANSWER", answer)


def test_prose_gives_way_to_an_action() -> None:
    assert parsed("Query the table first.\nQUERY SELECT 1") == ("QUERY", "SELECT 1")
    assert parsed("Answer the question by counting:\nquery select 1") == ("QUERY", "select 1")


def test_a_lower_case_action_alone_counts() -> None:
    assert parsed("answer forty two") == ("ANSWER", "forty two")
    assert parsed("describe my table") == ("DESCRIBE", "my table")
    assert parsed("describe pets\nsample pets") == ("DESCRIBE", "pets")


@pytest.mark.parametrize("kind", list(ActionType))
def test_an_action_without_an_argument_is_an_action(kind: ActionType) -> None:
    assert parsed(kind) == (kind, "")
    assert parsed(f"{kind}:\nANSWER 3") == (kind, "")


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "query", "arguments": {"sql": "SELECT 1"}}</tool_call>',
        '<tool_call>\n{"name": "QUERY", "arguments": {"query": "SELECT 1"}}\n</tool_call>',
        'I count.\n<tool_call>{"name": "query", "arguments": {"statement": "SELECT 1"}}',
        'So <tool_call>{"name": "query", "arguments": "{\\"sql\\": \\"SELECT 1\\"}"}</tool_call> DESCRIBE pets',
        '<tool_call>{"name": "query", "arguments": "SELECT 1"}</tool_call>',
        '<tool_call>```json\n{"name": "query", "arguments": {"sql": "SELECT 1"}}\n```</tool_call>',
        '<tool_call>nothing</tool_call>\n{"action": "query", "value": "SELECT 1"}',
        '{"action_type": "QUERY", "argument": "SELECT 1"}',
        '{"action": "query", "sql": "SELECT 1"} and so on',
        '{"name": "query", "query": "SELECT 1"}',
        '```json\n{"action_type": "QUERY",\n "argument": "SELECT 1"}\n```',
        'ACTION: {"action_type": "QUERY", "argument": "SELECT 1"}',
        '<think>{"action": "answer"}</think>{"action": "query", "argument": "SELECT 1"}',
    ],
)
def test_json_forms(text: str) -> None:
    assert parsed(text) == ("QUERY", "SELECT 1")


@pytest.mark.parametrize(
    ("value", "argument"),
    [
        ("3", "3"),
        (3, "3"),
        (2.5, "2.5"),
        ([[1, "é"]], '[[1, "é"]]'),
        (None, ""),
        (" a\n\nb ", " a\n\nb "),
        (True, "true"),
    ],
)
@pytest.mark.parametrize("key", ["argument", "value", "answer", "anything"])
def test_json_values(key: str, value: object, argument: str) -> None:
    assert parsed(json.dumps({"name": "answer", "arguments": {key: value}})) == ("ANSWER", argument)


def test_json_without_a_usable_argument_has_an_empty_one() -> None:
    assert parsed('{"action": "query"}') == ("QUERY", "")
    assert parsed('{"action": "query", "arguments": {"x": "a", "y": "b"}}') == ("QUERY", "")


def test_raw_newlines_in_a_json_string_are_accepted() -> None:
    assert parsed('{"action": "query", "argument": "SELECT 1\nFROM pets"}') == ("QUERY", "SELECT 1\nFROM pets")


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ("", ""),
        ("  \n ", ""),
        ("SELECT COUNT(*) FROM pets", "SELECT COUNT(*) FROM pets"),
        ("```sql\nSELECT 1\n```", "SELECT 1"),
        ("<think>I count.</think>\nSELECT 1", "SELECT 1"),
        (" I will DESCRIBE the pets. ", "I will DESCRIBE the pets."),
        ("DESCRIBED pets", "DESCRIBED pets"),
        ("DESCR\u0130BE pets", "DESCR\u0130BE pets"),
        ("an\u017fwer 3", "an\u017fwer 3"),
        ("query_table pets", "query_table pets"),
        ("ANSWERS: 3", "ANSWERS: 3"),
        ("<think>DESCRIBE pets", ""),
        ("<think>DESCRIBE pets</think>", ""),
        (
            '{"name": "query", "parameters": {"sql": {"text": "SELECT 1"}}}',
            '{"name": "query", "parameters": {"sql": {"text": "SELECT 1"}}}',
        ),
        ('{"name": "query", "args": {"sql": "SELECT 1"}}', '{"name": "query", "args": {"sql": "SELECT 1"}}'),
        ('{"action": "drop", "argument": "pets"}', '{"action": "drop", "argument": "pets"}'),
        ('{"argument": "pets"}', '{"argument": "pets"}'),
        ('{"action": 3}', '{"action": 3}'),
        ("[1]", "[1]"),
        ("<tool_call></tool_call>", "<tool_call></tool_call>"),
    ],
)
def test_what_is_no_action_is_a_raw_query(text: str, argument: str) -> None:
    action = SQLAction(action_type="QUERY", argument=argument)
    assert parse_action(text) == ParsedAction(action, parseable=False)


def test_lone_surrogates_cannot_reach_the_wire() -> None:
    assert parsed("ANSWER a\ud800b") == ("ANSWER", "a?b")
    assert parsed('{"action": "answer", "value": "a\\ud800b"}') == ("ANSWER", "a?b")


@settings(deadline=None)  # the machine may be busy
@given(NOISE)
def test_any_text_is_one_action(text: str) -> None:
    result = parse_action(text)
    assert result.action.action_type in ActionType.__members__
    result.action.model_dump_json()
    if not result.parseable:
        assert result.action.action_type == "QUERY"


@settings(deadline=None)  # the machine may be busy
@given(ACTIONS, NOISE)
def test_round_trip(kind: str, argument: str) -> None:
    argument = argument.encode("utf-8", "replace").decode()
    said = format_action(kind, argument)
    assert parse_action(said) == ParsedAction(SQLAction(action_type=kind, argument=argument), parseable=True)


@settings(deadline=None)  # the machine may be busy
@given(ACTIONS, st.from_regex(r"[a-zA-Z0-9_.,;(]+( [a-zA-Z0-9_=<>|'-]+)*", fullmatch=True))
def test_ordinary_arguments_are_written_plainly(kind: str, argument: str) -> None:
    assert format_action(kind.lower(), argument) == f"{kind} {argument}"


def test_canonical_text() -> None:
    assert format_action("describe", "pets") == "DESCRIBE pets"
    assert format_action("QUERY", "SELECT a\nFROM b") == "QUERY SELECT a\nFROM b"
    assert format_action("ANSWER", "a | 1\nb | 2") == "ANSWER a | 1\nb | 2"
    assert format_action("ANSWER", "") == "ANSWER"
    assert format_action("ANSWER", "a\n\nb<") == '{"action_type": "ANSWER", "argument": "a\\n\\nb\\u003c"}'
    with pytest.raises(ValueError, match="DROP"):
        format_action("DROP", "pets")


@settings(deadline=None)  # the machine may be busy
@given(
    ACTIONS,
    st.sampled_from(
        ["", "\n", "  ", "Let me see.\n", "<think>ANSWER 1</think>", "```\n", "- ", "**Action:** ", "hm?\n\n> "]
    ),
    st.sampled_from(["", "\n", "  ", "\n\nThat is it.", "\n```", "\nObservation: 3", "\nANSWER 1", "\n<think>"]),
    st.from_regex(r"[a-z]{1,8}( [a-z]{1,8})*", fullmatch=True),
)
def test_noise_around_an_action_changes_nothing(kind: str, prefix: str, suffix: str, argument: str) -> None:
    assert parsed(f"{prefix}{kind} {argument}{suffix}") == (kind, argument)


@pytest.mark.parametrize(
    "unit",
    [
        "*",
        " ",
        "\n",
        "1",
        "`",
        "<think>",
        "</think>",
        "<tool_call>",
        "<tool_call>\n",
        '{"a":',
        '{"a":\n',
        '{"action":\n',
        "[",
        "```\n",
        "query \n",
        "QUERY\n",
        "query a b\n",
        "QUERY ```",
        "ANSWER ",
        "action ",
        "**`",
        "Action:",
        "<tool_call>{",
    ],
)
@pytest.mark.parametrize("prefix", ["", "ANSWER ", '{"action": "answer", "value": '])
def test_a_megabyte_of_anything_is_parsed(prefix: str, unit: str) -> None:
    """A quadratic parser would need minutes for one of these."""
    text = prefix + unit * (1_000_000 // len(unit))
    assert parse_action(text).action.action_type in ActionType.__members__


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "query", "parameters": {"sql": "SELECT 1"}}',
        "<reasoning>One row is enough.</reasoning>\n<answer>\nQUERY SELECT 1\n</answer>",
        "<reasoning>DESCRIBE pets</reasoning><answer>QUERY SELECT 1",
        "[THINK]DESCRIBE pets[/THINK]QUERY SELECT 1",
        "<thinking>ANSWER 3</thinking>\nQUERY SELECT 1",
        "DESCRIBE pets</think>QUERY SELECT 1",
    ],
)
def test_habits_of_other_families_are_read(text: str) -> None:
    assert parsed(text) == ("QUERY", "SELECT 1")


# Calls of tools

CALLS = {
    "hermes": '<tool_call>\n{"name": "query", "arguments": {"sql": "SELECT \'a\'\\nFROM t"}}\n</tool_call>',
    "qwen_coder": "<tool_call>\n<function=query>\n<parameter=sql>\nSELECT 'a'\nFROM t\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm": "<tool_call>query\n<arg_key>sql</arg_key>\n<arg_value>SELECT 'a'\nFROM t</arg_value>\n</tool_call>",
    "llama": '{"name": "query", "parameters": {"sql": "SELECT \'a\'\\nFROM t"}}',
    "mistral": '[TOOL_CALLS] [{"name": "query", "arguments": {"sql": "SELECT \'a\'\\nFROM t"}, "id": "abcdefghi"}]',
    "pythonic": "<|tool_call_start|>[query(sql='SELECT \\'a\\'\\nFROM t')]<|tool_call_end|>",
}


@pytest.mark.parametrize("family", CALLS)
def test_a_call_counts_in_the_models_own_format_alone(family: str) -> None:
    wanted = SQLAction(action_type="QUERY", argument="SELECT 'a'\nFROM t")
    said = f"<think>Which? {CALLS['llama']}</think>\n{CALLS[family]}"
    assert parse_call(said, [family]) == ParsedAction(wanted, parseable=True)
    others = [name for name in CALLS if name != family]
    assert parse_call(said, others) == ParsedAction(wanted, parseable=False)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ('[TOOL_CALLS]sample[ARGS]{"table": "pets"}', ("SAMPLE", "pets")),
        ('<|python_tag|>{"name": "describe", "parameters": {"table": "pets"}}', ("DESCRIBE", "pets")),
        ('[answer(value="a, b")]', ("ANSWER", "a, b")),
        ("<|tool_call_start|>[query(sql='SELECT 'a'')]<|tool_call_end|>", ("QUERY", "SELECT 'a'")),
        ('<tool_call>{"name": "answer", "arguments": "{\\"value\\": 3}"}', ("ANSWER", "3")),
        ("<function=answer>\n<parameter=value>\n3", ("ANSWER", "3")),
    ],
)
def test_other_ways_to_call(text: str, action: tuple[str, str]) -> None:
    found = parse_call(text, CALLS)
    assert ((found.action.action_type, found.action.argument), found.parseable) == (action, True)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("QUERY SELECT 1", ("QUERY", "SELECT 1")),
        ("SELECT 1", ("QUERY", "SELECT 1")),
        ("<think>query(", ("QUERY", "")),
        ('<tool_call>{"name": "drop", "arguments": {"table": "pets"}}</tool_call>', None),
        ('<tool_call>{"name": "query", "arguments": {"sql": ["SELECT 1"]}}</tool_call>', None),
        ('<tool_call>{"name": "query", "arguments"', None),
        ("[TOOL_CALLS] nothing", None),
        ("[1, 2]", None),
    ],
)
def test_what_is_no_call_does_not_count(text: str, action: tuple[str, str] | None) -> None:
    found = parse_call(text, CALLS)
    assert not found.parseable
    assert (found.action.action_type, found.action.argument) == (action or ("QUERY", text))


@given(st.text(alphabet="<>[]{}()'\"=\\/,: \n_atolcfunciqersgmk|", max_size=60))
def test_every_text_is_read(text: str) -> None:
    for family, call in CALLS.items():
        cut = call[: len(call) // 2]
        for said in (text, call + text, text + call, cut + text):
            assert isinstance(parse_call(said, [family]), ParsedAction)


@given(
    st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40),
    st.sampled_from(["[THINK]", "<reasoning>", "<answer>"]),
)
def test_an_argument_may_spell_a_tag(text: str, tag: str) -> None:
    for argument in (tag + text, text + tag, f"{text}{tag}{text}"):
        action = SQLAction(action_type="QUERY", argument=argument.strip())
        assert parse_action(format_action("QUERY", argument.strip())) == ParsedAction(action, parseable=True)
