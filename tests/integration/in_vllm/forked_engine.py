"""What a vLLM server imports until it serves, imported ahead by the fork server of the tests; see tests/fork_server.py.

The engine's process is forked from its server, too: it would import all of it once more. vLLM's CPU platform insists on
a fresh process for the sake of OpenMP's threads, and the servers of tests have one. The sockets on which the server
listens are not the engine's, as they are not in a fresh process: a port that it kept would be taken for as long as it
lives, also after the server was killed.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from contextlib import suppress
from pathlib import Path

import vllm.entrypoints.generate.api_router  # type: ignore[import-not-found]
import vllm.entrypoints.launchers.api_server.entry  # type: ignore[import-not-found]
import vllm.model_executor.models.llama  # type: ignore[import-not-found]
import vllm.model_executor.models.qwen3  # type: ignore[import-not-found]
import vllm.v1.engine.async_llm  # type: ignore[import-not-found]
import vllm.v1.engine.core  # type: ignore[import-not-found]
import vllm.v1.engine.utils  # type: ignore[import-not-found]
import vllm.v1.worker.cpu_worker  # type: ignore[import-not-found]


def _let_go_of_ports() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in [entry.name for entry in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockname()[1]:
                # The object that owns the descriptor will close it; its number must not be another's by then.
                os.dup2(nothing, int(name), inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_let_go_of_ports)
vllm.v1.engine.utils.get_mp_context = lambda: multiprocessing.get_context("fork")
