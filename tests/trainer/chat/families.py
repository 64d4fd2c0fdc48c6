"""Chat templates of the families of models, over a stand-in tokenizer that has the families' own special tokens.

The templates are the models' own, in the copies that TRL ships, but for Mistral's, which TRL does not ship. The
tokenizer is a byte-level BPE that is trained here on a few sentences: what is tested is what a template writes and
which of it is a token of its own, and not how a family cuts up its words.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AddedToken, PreTrainedTokenizerFast

TEMPLATES = files("trl") / "chat_templates"
MISTRAL = """\
{{ bos_token }}{% set last = (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}
{%- for m in messages %}
{%- if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]
{%- elif m.role == 'user' %}
{%- if tools and m == last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls is defined %}[TOOL_CALLS] [
{%- for call in m.tool_calls %}{{ (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{% endfor -%}
]{{ eos_token }}
{%- elif m.role == 'assistant' %}{{ m.content + eos_token }}
{%- elif m.tool_call_id | length != 9 %}{{ raise_exception('call ids have nine characters') }}
{%- else %}[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% endif %}
{%- endfor %}"""
"""Writes what Mistral's templates of the third version write; those themselves are in no package."""

CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
SPECIAL = {
    "cohere2": (
        *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        *("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    "cohere": ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
    "deepseek": tuple(
        f"<\uff5c{name}\uff5c>".replace(" ", "\u2581")
        for name in (
            "begin of sentence",
            "end of sentence",
            "User",
            "Assistant",
            "tool calls begin",
            "tool calls end",
            "tool call begin",
            "tool call end",
            "tool sep",
            "tool outputs begin",
            "tool outputs end",
            "tool output begin",
            "tool output end",
        )
    ),
    "gemma": ("<start_of_turn>", "<end_of_turn>", "<bos>"),
    "gemma4": (
        "<|turn>",
        "<turn|>",
        "<bos>",
        "<|channel>",
        "<channel|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
    ),
    "glm": ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "gptoss": ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
    "lfm": (*CHATML, "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_response_start|>", "<|tool_response_end|>"),
    "llama": (
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|python_tag|>",
    ),
    "mistral": (
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ),
    "muse": ("<|start|>", "<|message|>", "<|eot|>"),
    "phi": ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
}
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Qwen's and others' added tokens that are not special: decoding keeps them."""


def template_names() -> list[str]:
    """The templates that TRL ships, apart from its own rewritings of them for training."""
    names = sorted(entry.name.removesuffix(".jinja") for entry in TEMPLATES.iterdir() if entry.name.endswith(".jinja"))
    return [name for name in names if not name.endswith("_training")]


def template_source(name: str) -> str:
    """Return a model's chat template."""
    return MISTRAL if name == "mistral" else (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def special_tokens(name: str) -> tuple[str, ...]:
    """Return the special tokens of a template's family."""
    exact = [family for family in SPECIAL if name.removeprefix("diffusion_").startswith(family)]
    return SPECIAL[max(exact, key=len)] if exact else CHATML


@cache
def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return the stand-in with a family's template and special tokens. Not to be changed by a test."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(["Question: How many pets are there?", "SELECT name FROM pets"], trainer)
    source = template_source(name)
    marks = [mark for mark in MARKS if re.search(rf"{re.escape(mark)}", source)]
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        extra_special_tokens=list(special_tokens(name)),
    )
    fast.chat_template = source
    return fast
