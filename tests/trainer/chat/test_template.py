"""Every family's chat template: which can be used, for text and for tools, and what is written into them."""

from __future__ import annotations

import pytest

from env_server.types import AnswerMode, SQLAction
from tests.trainer.chat.families import family_tokenizer, template_names
from trainer.chat.actions import ParsedAction
from trainer.chat.format import THINKING_TOKENS, ChatFormat, ChatSettings
from trainer.chat.template import TemplateUseError
from trainer.config import ActionFormat

REFUSED = {
    "diffusion_gemma": "does not end the model's turn",
    "gptoss": "into a channel",
    "idefics3": "it shows the messages",
    "llava_next": "cannot render",
    "muse_glimmer": "into a channel",
    "smolvlm": "it shows the messages",
}
"""Templates that no policy can be used with: channels, images, and a diffusion model's."""
UNDECLARED = ("cohere", "deepseek", "gemma3", "llama3", "phi", "qwen2_5_vl")
NO_TOOLS = {
    **dict.fromkeys(("cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3"), "declares no tools"),
    **dict.fromkeys(("llama3", "phi3", "phi3_5", "qwen2_5_vl"), "declares no tools"),
    **dict.fromkeys(("gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5"), "without its call"),
    "gemma4_v2": "a format that is not known",
    "lfm2": "does not show the calls",
}
NAMES = [*template_names(), "mistral"]
OPENING = "Question: How many?\nTables: pets"
ACTIONS = [
    SQLAction(action_type="DESCRIBE", argument="pets"),
    SQLAction(action_type="SAMPLE", argument='my "pets"'),
    SQLAction(action_type="QUERY", argument="SELECT 'it''s', \"name\"\nFROM pets WHERE age < 3 -- [x] \\ é"),
    SQLAction(action_type="ANSWER", argument="Zoë | 3\nBo | 4"),
]


@pytest.mark.parametrize("name", sorted(REFUSED))
@pytest.mark.parametrize("action_format", list(ActionFormat))
def test_what_cannot_be_used_is_refused_with_the_reason(name: str, action_format: ActionFormat) -> None:
    with pytest.raises(TemplateUseError, match=None if name == "diffusion_gemma" else REFUSED[name]):
        ChatFormat(family_tokenizer(name), ChatSettings(action_format=action_format))


@pytest.mark.parametrize("name", sorted(NO_TOOLS))
def test_without_tools_text_is_named(name: str) -> None:
    with pytest.raises(TemplateUseError, match=f"{NO_TOOLS[name]}.*--action_format text"):
        ChatFormat(family_tokenizer(name), ChatSettings(action_format=ActionFormat.TOOLS))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_actions_are_read_as_they_are_demonstrated(name: str) -> None:
    check(name, ActionFormat.TEXT)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED | NO_TOOLS])
@pytest.mark.parametrize("mode", list(AnswerMode))
def test_calls_are_read_as_they_are_demonstrated(name: str, mode: AnswerMode) -> None:
    check(name, ActionFormat.TOOLS, mode)


def check(name: str, action_format: ActionFormat, mode: AnswerMode = AnswerMode.VALUE) -> None:
    tokenizer = family_tokenizer(name)
    chat = ChatFormat(tokenizer, ChatSettings(mode, action_format))
    prompt = tokenizer.decode(chat.prompt_ids(OPENING))
    assert OPENING in prompt
    assert (
        all(tool in prompt for tool in ("describe", "sample", "query", "answer")) or action_format is ActionFormat.TEXT
    )
    for action in ACTIONS:
        turn = chat.turn_ids(action)
        assert turn[-1] == chat.stop_ids[0]
        assert not set(turn[:-1]) & set(chat.stop_ids)
        assert chat.parse(chat.text_of(turn)) == ParsedAction(action, parseable=True)
        # Cut off before its end, a call is none.
        assert not chat.is_thinking(turn)
    reply = tokenizer.decode(chat.renderer.observation_ids("40 rows", closed=False))
    assert "40 rows" in reply
    assert reply.startswith(tokenizer.decode([chat.stop_ids[0]]))


WHOLE = [
    "glm4moe",
    "lfm2_2_5",
    "lfm2_v2",
    "llama3_1",
    "llama3_2",
    "mistral",
    "qwen2_5",
    "qwen3_instruct_2507",
    "qwen3_vl",
]


@pytest.mark.parametrize("name", WHOLE)
def test_appending_calls_gives_the_whole_conversation(name: str) -> None:
    """What is written turn by turn is what the template writes of all turns, with the model's own way to call."""
    tokenizer = family_tokenizer(name)
    # The switch changes GLM's alone: off, a thought is closed where a whole conversation shows another line's end.
    settings = ChatSettings(action_format=ActionFormat.TOOLS, chat_template_kwargs={"enable_thinking": True})
    chat = ChatFormat(tokenizer, settings)
    query, reply = ACTIONS[2], "3 rows of 'pets'"
    ids = [*chat.prompt_ids(OPENING), *chat.turn_ids(query), *chat.renderer.observation_ids(reply, closed=True)]
    call = {"name": "query", "arguments": {"sql": query.argument}}
    messages = [
        {"role": "system", "content": settings.system_prompt},
        {"role": "user", "content": OPENING},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "abcdefghi", "function": call}]},
        {"role": "tool", "name": "query", "tool_call_id": "abcdefghi", "content": reply},
    ]
    whole = tokenizer.apply_chat_template(
        messages, tools=settings.tools, add_generation_prompt=True, tokenize=False, **settings.chat_template_kwargs
    )
    # GLM's shows that nothing was thought, which a turn that was generated would have said itself.
    assert tokenizer.decode(ids) == whole.replace("\n<think></think>\n", "")


@pytest.mark.parametrize(
    ("name", "variables", "opened", "budget"),
    [
        ("qwen2_5", {}, "", None),
        ("qwen3", {"enable_thinking": True}, "", THINKING_TOKENS),
        ("qwen3", {"enable_thinking": False}, "", None),
        ("qwen3_instruct_2507", {}, "", None),
        ("qwen3_5_think", {"enable_thinking": True}, "<think>", THINKING_TOKENS),
        ("qwen3_5_nothink", {}, "", None),
        ("deepseek_r1_distill", {}, "<think>", THINKING_TOKENS),
        ("nemotron_3_nano", {"enable_thinking": True}, "<think>", THINKING_TOKENS),
        ("glm4moe", {"enable_thinking": True}, "", THINKING_TOKENS),
    ],
)
def test_templates_that_know_of_thoughts_get_a_budget_for_them(
    name: str, variables: dict[str, bool], opened: str, budget: int | None
) -> None:
    chat = ChatFormat(family_tokenizer(name), ChatSettings(chat_template_kwargs=variables))
    assert (chat.renderer.opened_reasoning, chat.thinking_tokens) == (opened, budget)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "qwen3_6", "nemotron_3_nano", "glm4moe"])
@pytest.mark.parametrize("action_format", ActionFormat)
def test_thinking_is_off_where_the_template_has_a_switch_and_nobody_chose(
    name: str, action_format: ActionFormat
) -> None:
    tokenizer = family_tokenizer(name)
    chat = ChatFormat(tokenizer, ChatSettings(action_format=action_format, chat_template_kwargs={"other": 1}))
    assert chat.settings.chat_template_kwargs == {"other": 1, "enable_thinking": False}
    assert (chat.thinking_tokens, chat.renderer.opened_reasoning) == (None, "")
    assert len(chat.lines) == 1
    again = ChatFormat(tokenizer, chat.settings)
    assert (again.settings, again.lines) == (chat.settings, ())
    assert again.prompt_ids(OPENING) == chat.prompt_ids(OPENING)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3", ChatSettings(chat_template_kwargs={"enable_thinking": True})),
        ("qwen3", ChatSettings(chat_template_kwargs={"enable_thinking": False})),
        ("qwen3", ChatSettings(max_thinking_length=64)),  # whoever gives thoughts a length wants them
        ("qwen2_5", ChatSettings()),
        ("qwen3_5_nothink", ChatSettings()),
        ("deepseek_r1_distill", ChatSettings()),
    ],
)
def test_a_choice_is_kept_and_a_template_without_a_switch_is_left_alone(name: str, settings: ChatSettings) -> None:
    chat = ChatFormat(family_tokenizer(name), settings)
    assert (chat.settings, chat.lines) == (settings, ())


def test_a_demonstration_closes_the_thought_that_the_template_opened() -> None:
    chat = ChatFormat(family_tokenizer("deepseek_r1_distill"))
    assert chat.text_of(chat.turn_ids(ACTIONS[0])) == "<think>\n</think>\n\nDESCRIBE pets"
    assert chat.is_thinking(chat.turn_ids(ACTIONS[0])[:1])
