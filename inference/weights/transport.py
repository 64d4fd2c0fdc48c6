"""How weights travel from the trainer to an inference server. `push` decides when, `check` shows that they arrived."""

from __future__ import annotations

from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from inference.engine import EngineError

if TYPE_CHECKING:
    import torch

    from inference.vllm.api import VLLMServer

CONSTANT = 0.75
"""What the check of the first push puts in the place of every weight; a norm that nobody trained is 1."""
SERVER_S = 120.0
"""For one server to take the weights and generate the probe."""
GIVE_UP_S = 5.0
"""How long it may take to tell a server that an update failed. One that cannot be told ends by its own deadline."""


class SyncCheck(StrEnum):
    """What is compared after a push, and what follows from a gap that grows."""

    OFF = "off"
    WARN = "warn"
    STRICT = "strict"


class WeightSyncError(EngineError):
    """The weights cannot be brought to the servers, or were not what arrived; the text says what to do."""


class Transport(Protocol):
    """How weights get to a server. `disk`, `lora` and `nccl` are there."""

    name: str
    sends_all_weights: bool
    """And not an adapter alone."""

    def prepare(self, version: int, dtype: torch.dtype | None = None, *, constant: bool = False) -> None:
        """Make the trainer's weights of now ready to be sent. Every rank calls it. Raises WeightSyncError.

        `dtype` is that of all the servers' parameters: the weights are rounded to it here as they would be there.
        `constant` puts CONSTANT in the place of every element.
        """

    async def send(self, server: VLLMServer) -> None:
        """Bring a server to what was prepared last; again, when it was away. Raises EngineError."""

    def close(self) -> None:
        """Remove what was left for the servers."""


async def give_up_update(server: VLLMServer, run: str = "") -> None:
    """Tell a server's workers that an update will not end well: they end, if they have changed weights (`in_vllm`).

    The update is the one that `run` announced, or a reload. Requests that are sent to the server afterwards meet whole
    weights, or no server.
    """
    with suppress(EngineError):  # it may be gone, or not be ours
        await server.call_workers("sqlenv_give_up_update", timeout_s=GIVE_UP_S, run=run)
