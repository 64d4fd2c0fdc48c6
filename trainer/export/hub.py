"""Pushing an exported policy to the Hugging Face Hub.

`Destination.prepared` checks that a push will be allowed, before a run spends hours on the policy: it creates the
repository and the branch where they do not exist, and asks the Hub for write access. `Destination.check_token` changes
nothing on the Hub.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from huggingface_hub import HfApi, get_session, get_token, hf_raise_for_status
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from trl import GRPOConfig

from env_server.errors import SQLEnvError
from trainer.config import ConfigError

WHOAMI_TIMEOUT_S = 10.0
"""For the Hub's answer to whose a token is; its client sets no timeout."""


class HubError(SQLEnvError):
    """The Hub refuses, or cannot be reached; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Destination:
    """A repository of models on the Hub. `private` None leaves it to the account's setting, `revision` None is main."""

    repo: str
    private: bool | None = None
    token: str | None = None
    revision: str | None = None

    @classmethod
    def of(cls, grpo: GRPOConfig) -> Destination | None:
        """Return where TRL's flags say that the policy goes; None without --push_to_hub. Raises ConfigError."""
        if not grpo.push_to_hub:
            return None
        if grpo.hub_strategy != "end":
            raise ConfigError(
                f"--hub_strategy {grpo.hub_strategy.value} pushes the run's folder as it grows; SQLEnv pushes the "
                "policy, its card and its evaluation once it is trained: leave the flag out"
            )
        return cls(
            grpo.hub_model_id or Path(grpo.output_dir).resolve().name,
            grpo.hub_private_repo,
            grpo.hub_token,
            grpo.hub_revision,
        )

    def check_token(self) -> None:
        """Check that there is a token, and that the Hub can be reached and accepts it. Raises HubError."""
        token = self.token or get_token()
        if not token:
            raise HubError(
                f"pushing to {self.repo} needs a token of the Hub: `hf auth login` keeps one, HF_TOKEN or --hub_token "
                "gives one"
            )
        url, headers = f"{HfApi().endpoint}/api/whoami-v2", {"Authorization": f"Bearer {token}"}
        with _asking(self.repo):
            hf_raise_for_status(get_session().get(url, headers=headers, timeout=WHOAMI_TIMEOUT_S))

    def prepared(self) -> Destination:
        """Return the destination with the repository's full name, once it is there and may be written to.

        Raises HubError.
        """
        self.check_token()
        api = HfApi(token=self.token)
        with _asking(self.repo):
            repo = api.create_repo(self.repo, private=self.private, exist_ok=True).repo_id
            api.auth_check(repo, write=True)
            if self.revision:
                api.create_branch(repo, branch=self.revision, exist_ok=True)
        return replace(self, repo=repo)

    def push(self, folder: Path) -> str:
        """Upload a policy's folder in one commit, and return its address. Raises HubError."""
        with _asking(self.repo):
            commit = HfApi(token=self.token).upload_folder(
                repo_id=self.repo,
                folder_path=folder,
                revision=self.revision,
                commit_message="A policy trained with SQLEnv",
            )
        return str(commit.commit_url)


@contextmanager
def _asking(repo: str) -> Iterator[None]:
    """Raise what the Hub's client raises as one line that says what to do."""
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise HubError(f"HF_HUB_OFFLINE is set; unset it to push to {repo}") from error
    except (HFValidationError, LocalTokenNotFoundError) as error:
        raise HubError(f"pushing to {repo}: {_line(error)}") from error
    except RepositoryNotFoundError as error:
        raise HubError(f"the Hub has no {repo} that this token may see; check the name and the token") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        remedy = {
            401: "the token is not valid; `hf auth login` again",
            403: "the token may not write there; make one with the right to write, or name another repository",
        }.get(status, "try again later")
        raise HubError(f"the Hub answered {status} for {repo}: {remedy} ({_line(error)})") from error
    except RuntimeError as error:  # what it makes of any failure to upload a large file
        raise HubError(f"pushing to {repo} failed: {_line(error)} ({_line(error.__cause__ or error)})") from error
    except (httpx.HTTPError, OSError) as error:
        raise HubError(
            f"the Hub cannot be reached to push to {repo} ({type(error).__name__}: {_line(error)})"
        ) from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
