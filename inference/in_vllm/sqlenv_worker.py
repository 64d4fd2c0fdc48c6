"""Our methods in vLLM's worker, called through `/collective_rpc`.

vLLM mixes `SQLEnvWorker` into its worker class (`--worker-extension-cls`). Only vLLM's own interpreter imports vLLM
and torch, and only when a method is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


class SQLEnvWorker:
    """What vLLM's worker lacks for training."""

    model_runner: Any

    def sqlenv_reload_weights(self, weights_path: str) -> None:
        """Load the weights of the checkpoint in a folder, in place, the output head included.

        vLLM's CPU engine computes the output head from a packed copy of the weights. When the head is tied to the
        input embeddings, its own `reload_weights` leaves that copy as it was. And where there is no such folder, it
        looks on the Hub, having taken the weights apart: the next request would end the engine.

        Raises FileNotFoundError, upon which the weights are what they were.
        """
        if not Path(weights_path).is_dir():
            raise FileNotFoundError(f"there is no folder {weights_path} here")
        from vllm.model_executor.layers import vocab_parallel_embedding as vocabulary  # type: ignore[import-not-found]

        self.reload_weights(weights_path=weights_path)  # type: ignore[attr-defined]  # the worker's
        for module in self.model_runner.get_model().modules():
            if isinstance(module, vocabulary.ParallelLMHead):
                method = module.quant_method
                if isinstance(method, vocabulary.UnquantizedEmbeddingMethod):
                    method.process_weights_after_loading(module)
