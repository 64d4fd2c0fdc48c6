"""SQLEnv for TRL's stock GRPOTrainer: environments for its `environment_factory`, and rewards that read them.

    with TRLEnvironments(load_dataset("synthetic")) as environments:
        trainer = GRPOTrainer(
            "Qwen/Qwen3-0.6B",
            reward_funcs=list(TRL_REWARDS),
            train_dataset=environments.rows(dataset.select(Split.TRAIN)),
            environment_factory=environments,
        )

TRL plays these episodes by a loop of its own, without our rollout client. Guarantees:
- The policy reads the words that it reads when `sqlenv train` plays: system message, question, results, errors. Its
  tools are those of `--action_format tools`.
- What the policy does wrong is an observation. What the infrastructure does wrong (an environment server that is gone,
  after every other one was tried) is no reward of the policy's: the row has None for every reward, and TRL leaves it
  out.
- TRL's loop has no terminal action: after the verdict it generates one more turn, which changes nothing. With
  `max_completion_length` an episode that is over leaves the loop, and its row ends with the policy's last action.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from datasets import Dataset as HubDataset

from env_server.dataset import Dataset, Question
from env_server.errors import EpisodeOverError, SQLEnvError
from env_server.settings import EnvSettings, RewardSettings
from env_server.types import ActionType, AnswerMode, SQLAction, SQLObservation
from trainer.chat.actions import format_action, parse_action
from trainer.chat.prompts import first_message, observation_message, system_prompt
from trainer.config import ActionFormat
from trainer.rollout.environments import LOCAL, open_environments
from trainer.rollout.episodes import Episode, Outcome, Turn, episode_without_tokens, turn_of
from trainer.rollout.players import PlayedEnvironment
from trainer.rollout.rewards import REWARD_FUNCTIONS, Reward


class TRLEnvironment:
    """One environment of TRL's pool: reset for each episode, and played by its public methods, which are the tools."""

    def __init__(
        self, environment: PlayedEnvironment, dataset: Dataset, rewards: RewardSettings, last_result: str
    ) -> None:
        self._environment = environment
        self._dataset = dataset
        self._rewards = rewards
        self._last_result = last_result
        self._question: Question | None = None
        self._observation: SQLObservation | None = None
        self._turns: list[Turn] = []
        self._failure = ""

    def reset(self, *, question_id: str, **_: Any) -> str:
        """Start the episode of a row, and return what TRL appends to the row's user message. Raises SQLEnvError."""
        self._question = self._dataset.question(question_id)
        self._turns, self._failure = [], ""
        self._observation = self._environment.reset(question_id=question_id)
        return first_message(self._observation)

    @property
    def episode(self) -> Episode:
        """The episode so far, for rewards and logs; TRL keeps its tokens."""
        question, observation = self._question, self._observation
        if question is None or observation is None:
            raise RuntimeError("there is no episode before the first reset")
        episode = episode_without_tokens(question, self._environment.state.episode_id, observation, self._turns)
        outcome = Outcome.FAILED if self._failure else episode.outcome
        return replace(episode, outcome=outcome, failure=self._failure, reward_settings=self._rewards)

    def _take(self, action: SQLAction, text: str, *, parseable: bool = True) -> str:
        """Take an action and return what the policy reads. Raises SQLEnvError; TRL shows the policy its words."""
        before = self._observation
        if self._failure or (before is not None and before.done):
            raise EpisodeOverError("the episode is over")
        try:
            observation = self._environment.step(action)
        except SQLEnvError as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise
        self._observation = observation
        self._turns.append(turn_of(text, action, observation, parseable))
        return self._last_result if observation.done and self._last_result else observation_message(observation)

    def _call(self, kind: ActionType, argument: str) -> str:
        # TRL passes on whatever a model wrote: a number, too.
        action = SQLAction(action_type=kind, argument=str(argument))
        return self._take(action, format_action(kind, action.argument))


class SQLTools(TRLEnvironment):
    """Actions are calls of tools, in the format of the model's own chat template; an answer is a value."""

    def describe(self, table: str) -> str:
        """Show a table's columns.

        Args:
            table: The table's name.
        """
        return self._call(ActionType.DESCRIBE, table)

    def sample(self, table: str) -> str:
        """Show a few rows of a table.

        Args:
            table: The table's name.
        """
        return self._call(ActionType.SAMPLE, table)

    def query(self, sql: str) -> str:
        """Run one SELECT and see its result.

        Args:
            sql: The query, in SQLite's dialect.
        """
        return self._call(ActionType.QUERY, sql)

    def answer(self, value: str) -> str:
        """Give the answer and finish.

        Args:
            value: The answer: one value as it is, a list separated by commas, or rows as a | b, one row per line; []
                when nothing fits.
        """
        return self._call(ActionType.ANSWER, value)


class SQLToolsByQuery(SQLTools):
    """The same, where an answer is a query."""

    def answer(self, sql: str) -> str:  # the name of its argument is what a model reads
        """Give the answer and finish.

        Args:
            sql: The query that answers the question.
        """
        return self._call(ActionType.ANSWER, sql)


class SQLText(TRLEnvironment):
    """Actions are lines of text; for tokenizers that `text_as_calls` has prepared. Whatever is written is an action."""

    def act(self, turn: str) -> str:
        """Take an action.

        Args:
            turn: What the policy wrote.
        """
        parsed = parse_action(turn)
        return self._take(parsed.action, turn, parseable=parsed.parseable)


class TRLEnvironments:
    """An `environment_factory`: makes the environments of TRL's pool. A context manager; `close` ends them all.

    `env` is where episodes are played: in this process, or on the servers of these URLs, which ask for `token` and
    serve the same data set. There, an episode survives its server as long as another one is there.
    `max_completion_length` is GRPOConfig's: see the module's docstring. Raises ClientError.
    """

    def __init__(
        self,
        dataset: Dataset,
        env: str = LOCAL,
        token: str | None = None,
        *,
        settings: EnvSettings | None = None,
        answer_mode: AnswerMode = AnswerMode.VALUE,
        action_format: ActionFormat = ActionFormat.TOOLS,
        max_completion_length: int | None = None,
    ) -> None:
        self._dataset = dataset
        self._rewards = (settings or EnvSettings()).reward
        self._system_prompt = system_prompt(answer_mode, action_format)
        self._kind: type[TRLEnvironment] = SQLText
        if action_format is ActionFormat.TOOLS:
            self._kind = SQLTools if answer_mode is AnswerMode.VALUE else SQLToolsByQuery
        # TRL drops a result that would make the row longer than this, and ends the row where the policy's words end.
        self._last_result = "" if max_completion_length is None else "over " * (max_completion_length + 1)
        self._opened = ExitStack()
        self._environments = open_environments(env, token, dataset, settings or EnvSettings(), answer_mode)
        self._opened.callback(self._environments.close)

    def __call__(self) -> TRLEnvironment:
        """Make an environment."""
        blocking: AbstractContextManager[PlayedEnvironment] = self._environments.blocking()
        environment = self._opened.enter_context(blocking)
        return self._kind(environment, self._dataset, self._rewards, self._last_result)

    def rows(self, questions: Sequence[Question]) -> HubDataset:
        """Return questions as a `train_dataset`; `reset` writes the question into the user's message."""
        self._environments.prepare(questions)
        prompt = [{"role": "system", "content": self._system_prompt}, {"role": "user", "content": ""}]
        return HubDataset.from_list([{"prompt": prompt, "question_id": q.question_id} for q in questions])

    def close(self) -> None:
        """Release every session; closing twice is allowed."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _of_environments(reward: Reward) -> Callable[..., list[float | None]]:
    """Make a reward read the environments that TRL hands over; None for those that are not SQLEnv's."""

    def of_environments(*, environments: Sequence[object], **_: Any) -> list[float | None]:
        return [reward.of(each.episode) if isinstance(each, TRLEnvironment) else None for each in environments]

    of_environments.__name__ = reward.__name__
    return of_environments


TRL_REWARDS = tuple(_of_environments(reward) for reward in REWARD_FUNCTIONS)
"""The four rewards of `sqlenv train`, for `reward_funcs`; its weights are (1.0, 0.2, 0.2, 0.1)."""
