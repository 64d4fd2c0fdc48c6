"""What a vLLM server imports until it serves, imported ahead by the fork server of the tests; see tests/fork_server.py.

The engine's process is forked from its server, too: it would import all of it once more. vLLM's CPU platform insists on
a fresh process for the sake of OpenMP's threads, and the servers of tests have one.
"""

from __future__ import annotations

import multiprocessing

import vllm.entrypoints.generate.api_router  # type: ignore[import-not-found]
import vllm.entrypoints.launchers.api_server.entry  # type: ignore[import-not-found]
import vllm.model_executor.models.llama  # type: ignore[import-not-found]
import vllm.model_executor.models.qwen3  # type: ignore[import-not-found]
import vllm.v1.engine.async_llm  # type: ignore[import-not-found]
import vllm.v1.engine.core  # type: ignore[import-not-found]
import vllm.v1.engine.utils  # type: ignore[import-not-found]
import vllm.v1.worker.cpu_worker  # type: ignore[import-not-found]

vllm.v1.engine.utils.get_mp_context = lambda: multiprocessing.get_context("fork")
