"""The tiny policy's tokenizer: one token per known word, bytes for everything else, lossless.

A model of a million parameters learns to copy a name when the name is one token, and does not when it falls
into pieces. So white space, `_`, digits and punctuation stand alone, every frequent word is a token, and the
fixed parts of actions and SQL (`SELECT `, ` WHERE `) are one token each. Any other word is spelled in bytes: any
text can be encoded, and decoding gives it back exactly.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, OBS, ACT, END = "<pad>", "<obs>", "<act>", "<end>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<obs>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<act>{{ message['content'] }}<end>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<act>{% endif %}"
)
"""Leaves the system prompt out: the policy was trained on the game, and each token costs time on a CPU."""

SKELETONS = (
    *("DESCRIBE ", "SAMPLE ", "QUERY ", "ANSWER ", "Question: ", "Tables: ", "Error: "),
    *("SELECT DISTINCT ", "SELECT ", " FROM ", " WHERE ", " GROUP BY ", " ORDER BY ", " HAVING ", " LIMIT "),
    *(" JOIN ", " ON ", " AND ", " OR ", " NOT IN ", " IN ", " BETWEEN ", " LIKE ", " DESC", " ASC"),
    *(" INTERSECT ", " EXCEPT ", " UNION ", " IS NOT NULL", " IS NULL", "COUNT(*)", "COUNT(DISTINCT "),
    *("COUNT(", "AVG(", "SUM(", "MIN(", "MAX(", "ROUND(", "strftime('%Y', ", "T1.", "T2.", "T3."),
    *(
        " AS T1",
        " AS T2",
        " AS T3",
        " AS ",
        " = ",
        " > ",
        " < ",
        " >= ",
        " <= ",
        " != ",
        " | ",
        ", ",
        " INTEGER",
        " TEXT",
        " REAL",
        " DATE",
    ),
    *(" primary key", " references ", " rows", " row", "no rows", " steps left."),
)
"""Fixed strings that are one token each; longer ones are listed before their prefixes."""

_WORD = "[A-Za-z]+"


def _whole(text: str) -> str:
    """A pattern for a skeleton that never ends inside a word or a number."""
    return re.escape(text) + ("(?![A-Za-z0-9])" if text[-1].isalnum() else "")


_PIECE = "|".join([*map(_whole, SKELETONS), _WORD, "[0-9]", r"\s", r"[^A-Za-z0-9\s]"])


def build_tokenizer(texts: Iterable[str], max_words: int = 1_800) -> PreTrainedTokenizerFast:
    """Build the tokenizer from the words of `texts`, the `max_words` most frequent ones (ties by spelling)."""
    counts = Counter(word for text in texts for word in re.findall(_WORD, text))
    words = sorted(counts, key=lambda word: (-counts[word], word))[:max_words]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary: dict[str, int] = {}
    for token in (PAD, OBS, ACT, END, *sorted(pre_tokenizers.ByteLevel.alphabet())):
        vocabulary.setdefault(token, len(vocabulary))
    for text in (*SKELETONS, *words):
        # Stored as the byte-level alphabet spells it (a space is "Ġ"), which is what the model looks up.
        spelled = "".join(piece for piece, _ in byte_level.pre_tokenize_str(text))
        vocabulary.setdefault(spelled, len(vocabulary))
    # Without merges and with ignore_merges, a piece is one token if it is in the vocabulary, else its bytes.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_PIECE), behavior="isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (PAD, OBS, ACT, END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[OBS, ACT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
