"""What the policy reads: the messages of an episode.

Training, evaluation and the warm-up data use this one module, so that a policy sees the same words everywhere.
"""

from __future__ import annotations

from env_server.actions import ACTIONS, ANSWER
from env_server.types import AnswerMode, SQLObservation
from trainer.config import ActionFormat

_LAST_STEPS = 3
_RULES = """\
You answer a question about a SQLite database that you cannot see. Explore it first. Take small steps.

Every message from you is exactly one action, and nothing else:
{actions}

After each action you see its result, then you choose the next one. Your steps are limited; ANSWER before they \
run out.

Strategy:
1. DESCRIBE the tables that the question is about. Never guess a name.
2. SAMPLE a table to see how its values are written.
3. QUERY for what the question asks. When you get an error, read it and correct the query.
4. {last}
"""
_ANSWER_VALUE = """\
{usage}
Write one value as it is, a list separated by commas (ANSWER Rome, Oslo), and rows as a | b, one row per line. \
Write [] when nothing fits."""
_ANSWER_SQL = """\
ANSWER sql - give the query that answers the question and finish. \
Example: ANSWER SELECT COUNT(*) FROM employees WHERE age > 30"""


_TOOL_RULES = """\
You answer a question about a SQLite database that you cannot see. Explore it first. Take small steps.

Every message from you is exactly one call of a tool. After each call you see its result, then you choose the next \
one. Your steps are limited; call answer before they run out.

Strategy:
1. Call describe for the tables that the question is about. Never guess a name.
2. Call sample to see how a table's values are written.
3. Call query for what the question asks. When you get an error, read it and correct the query.
4. Call answer with {last}.
"""


def system_prompt(mode: AnswerMode, action_format: ActionFormat = ActionFormat.TEXT) -> str:
    """Return the system message that teaches the actions; under 350 tokens of a usual tokenizer."""
    by_query = mode is AnswerMode.SQL
    asked = "the query once its result is what the question asks for"
    if action_format is ActionFormat.TOOLS:
        return _TOOL_RULES.format(last=asked if by_query else "what your query returned").strip()
    last = asked if by_query else "the values that your query returned"
    actions = "\n".join(_usage(kind, mode) for kind in ACTIONS)
    return _RULES.format(actions=actions, last=f"ANSWER with {last}.").strip()


def _usage(kind: str, mode: AnswerMode) -> str:
    action = ACTIONS[kind]
    usage = f"{kind} {action.argument.name} - {action.help}. Example: {kind} {action.example}"
    if action.argument is ANSWER:
        return _ANSWER_SQL if mode is AnswerMode.SQL else _ANSWER_VALUE.format(usage=usage)
    return usage


SYSTEM_PROMPT = system_prompt(AnswerMode.VALUE)


def first_message(observation: SQLObservation) -> str:
    """Return the user message that opens an episode: the question and the table names."""
    return f"Question: {observation.question}\n{observation.schema_info}"


def observation_message(observation: SQLObservation) -> str:
    """Return the user message after a step; it says how many steps are left only when few are."""
    text = f"Error: {observation.error}" if observation.error else observation.result
    left = observation.budget_remaining
    if observation.done or left > _LAST_STEPS:
        return text
    return f"{text}\n{left} {'step' if left == 1 else 'steps'} left."
