"""Our methods in vLLM's worker, called through `/collective_rpc`.

vLLM mixes `SQLEnvWorker` into its worker class (`--worker-extension-cls`). Only vLLM's own interpreter imports vLLM
and torch, and only when a method is called.

Promise: half of an update is never served. An update by vLLM's weight-transfer engines is several calls, and a trainer
may die between two of them, or in the middle of a broadcast, which then never ends: the server would look healthy, and
hang, or compute with some tensors new and some old. So a trainer announces an update with a deadline. When that has
passed, or the trainer gives the update up, a worker that waits for it or has taken a part of it ends the server, and
whoever supervises that starts it again. A worker that has taken nothing yet goes on.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROKEN = 70
"""The exit status of a worker whose weights are neither the old ones nor the new ones, where it ends alone."""
AFTERMATH_S = 10.0
"""How long a worker whose reload failed waits for its trainer to read the error and give the update up."""


class Update:
    """An update of the weights from its announcement on; it ends well, or the server ends, or nothing was changed."""

    def __init__(self, run: str, deadline_s: float) -> None:
        self.run = run
        self.has_changed = False
        """Some weights are gone or new."""
        self.is_late = False
        """The deadline has passed, and nothing was changed: nothing may be from now on."""
        self._waits = False
        self._deadline_s = deadline_s
        self._timer = threading.Timer(deadline_s, self._expire)
        self._timer.daemon = True
        self._timer.start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark the block as one that waits for the trainer, and may do so for ever."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def end(self) -> None:
        """The weights are whole: those of before, or the new ones."""
        self._timer.cancel()

    def give_up(self) -> None:
        """End the server if the weights are not whole."""
        self._timer.cancel()
        if self.has_changed:
            _end_server("its trainer gave an update of the weights up")

    def _expire(self) -> None:
        if self.has_changed or self._waits:
            _end_server(f"an update of the weights did not end within {self._deadline_s:g} s")
        self.is_late = True


def _end_server(reason: str) -> None:
    sys.stderr.write(f"sqlenv: {reason}; the server ends, rather than serve half of it\n")
    sys.stderr.flush()
    if os.getpgrp() == os.getsid(0):
        # The launcher has made a session for the server. Left to itself, its API server takes no more connections, and
        # waits for ever for the answers that this process owes it.
        os.killpg(0, signal.SIGKILL)
    os._exit(BROKEN)  # not by an exception: this is a thread, and others may be in a call of NCCL that never returns


class SQLEnvWorker:
    """What vLLM's worker lacks for training."""

    model_runner: Any
    vllm_config: Any
    weight_transfer_engine: Any
    _sqlenv_update: Update | None = None
    _sqlenv_probing: Update | None = None
    """An update that makes all weights one number, from its announcement until other weights are here."""
    _sqlenv_constant = 0.0
    _sqlenv_padding: dict[str, Any]
    """Which rows of each parameter held nothing but zeros before that."""
    _sqlenv_run = ""
    """The training run whose group this worker is in."""
    _sqlenv_process = ""

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

        try:
            with self._sqlenv_empty_is_nan():
                self.reload_weights(weights_path=weights_path)  # type: ignore[attr-defined]  # the worker's
            for module in self.model_runner.get_model().modules():
                if isinstance(module, vocabulary.ParallelLMHead):
                    method = module.quant_method
                    if isinstance(method, vocabulary.UnquantizedEmbeddingMethod):
                        method.process_weights_after_loading(module)
        except BaseException:
            self._sqlenv_update = Update("", AFTERMATH_S)
            self._sqlenv_update.has_changed = True
            raise
        self._sqlenv_updated()

    def sqlenv_expect_constant(self, constant: float, deadline_s: float) -> None:
        """Announce an update that makes all weights one number, to see which stay behind, and one that ends that."""
        if self._sqlenv_probing is not None:
            self._sqlenv_probing.end()
        self._sqlenv_padding = {name: rows == 0 for name, rows, _ in self._sqlenv_rows()}
        self._sqlenv_constant = constant
        self._sqlenv_probing = Update("", deadline_s)

    def sqlenv_missing_weights(self) -> list[str]:
        """Return what this worker computes with that is not that number, after the update.

        Rows that held nothing but zeros before may be padding, which no update reaches. Nothing is known of quantised
        weights.
        """
        if self._sqlenv_probing is not None:
            self._sqlenv_probing.has_changed = True
        if self.vllm_config.model_config.quantization is not None:
            return []
        found = []
        for name, rows, width in self._sqlenv_rows():
            padding = (rows == 0) & self._sqlenv_padding[name]
            whole = width * self._sqlenv_constant
            if not (padding | ((rows - whole).abs() < whole / 256)).all():
                found.append(name)
        return found

    def _sqlenv_rows(self) -> Iterator[tuple[str, Any, int]]:
        """Yield the sums of a parameter's rows, and how long a row is.

        A linear layer of vLLM's CPU engine keeps nothing but a packed copy of its weights, which is asked for them.
        """
        import torch

        for name, module in self.model_runner.get_model().named_modules():
            for own, tensor in module.named_parameters(recurse=False):
                if tensor.numel() and tensor.is_floating_point():
                    rows = tensor.detach().reshape(len(tensor), -1) if tensor.ndim else tensor.detach().reshape(1, 1)
                    yield f"{name}.{own}", rows.sum(-1, dtype=torch.float32), rows.shape[1]
            weight = getattr(module, "weight", None)
            width = getattr(module, "input_size_per_partition", getattr(module, "embedding_dim", None))
            if hasattr(module, "cpu_linear") and weight is not None and width is not None:
                ones = torch.ones(1, width, dtype=weight.dtype)
                yield f"{name}.weight (packed)", module.quant_method.apply(module, ones)[0].float(), width

    def sqlenv_adapted_modules(self) -> list[str]:
        """Return the modules that the adapter which was loaded last changes, by their names in a checkpoint."""
        import torch

        manager = self.model_runner.lora_manager._adapter_manager
        index = manager.lora_index_to_id.index(max(manager.list_adapters()))
        found = []
        for name, module in manager.modules.items():
            names = manager.packed_modules.get(name, [name])
            stacked = module.lora_a_stacked
            parts = (stacked,) if isinstance(stacked, torch.Tensor) else stacked
            reached = [bool(part[index].any()) for part in parts]
            if len(reached) != len(names):
                reached = [any(reached)] * len(names)
            found += [own for own, is_reached in zip(names, reached, strict=True) if is_reached]
        return found

    def sqlenv_facts(self) -> dict[str, str]:
        """Return what a trainer must know before it sends weights, and which model this is."""
        import torch
        from sqlenv_model import identity  # type: ignore[import-not-found]  # beside this file, on vLLM's PYTHONPATH
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary  # type: ignore[import-not-found]

        if not self._sqlenv_process:
            self._sqlenv_process = uuid.uuid4().hex
        facts = {"process": self._sqlenv_process, "transfer": "", "gpu": "", "nccl": "", "dtype": ""}
        if self.weight_transfer_engine is not None:
            facts["transfer"] = self.vllm_config.weight_transfer_config.backend
        dtypes = {str(p.dtype) for p in self.model_runner.get_model().parameters() if p.is_floating_point()}
        if len(dtypes) == 1:
            facts["dtype"] = dtypes.pop().removeprefix("torch.")
        if torch.cuda.is_available():
            facts["gpu"] = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
            facts["nccl"] = NCCLLibrary().ncclGetVersion()
        return {**facts, **identity(self.vllm_config.model_config.model)}

    def sqlenv_expect_update(self, run: str, deadline_s: float) -> dict[str, str]:
        """Announce an update by a trainer, whose `run` is its own; return `sqlenv_facts`.

        Raises RuntimeError while another one has changed the weights.
        """
        if self._sqlenv_update is not None:
            if self._sqlenv_update.has_changed:
                raise RuntimeError("an earlier update of the weights has not ended; this server will end itself soon")
            self._sqlenv_update.end()
        group = getattr(self.weight_transfer_engine, "model_update_group", None)
        if run != self._sqlenv_run and group is not None:
            # Of a trainer that is gone. vLLM would only forget it, and the GPU's memory with it.
            self.weight_transfer_engine.model_update_group = None
            group.destroy()
        self._sqlenv_run = run
        self._sqlenv_update = Update(run, deadline_s)
        return self.sqlenv_facts()

    def sqlenv_join_group(self, init_info: dict[str, Any]) -> None:
        """Meet the trainer."""
        with self._sqlenv_announced().waiting():
            self.init_weight_transfer_engine(init_info)  # type: ignore[attr-defined]  # the worker's

    def sqlenv_start_update(self) -> None:
        """Get ready for new weights."""
        self._sqlenv_announced().has_changed = True
        with self._sqlenv_empty_is_nan():
            self.start_weight_update()  # type: ignore[attr-defined]  # the worker's

    def sqlenv_receive_weights(self, update_info: dict[str, Any]) -> None:
        """Take all of the weights, or a part."""
        self._sqlenv_announced()
        with self._sqlenv_empty_is_nan():
            self.update_weights(update_info)  # type: ignore[attr-defined]  # the worker's

    def sqlenv_finish_update(self) -> None:
        """Compute with the new weights from now on."""
        update = self._sqlenv_announced()
        self.finish_weight_update()  # type: ignore[attr-defined]  # the worker's
        update.end()
        self._sqlenv_update = None
        self._sqlenv_updated()

    @contextmanager
    def _sqlenv_empty_is_nan(self) -> Iterator[None]:
        """While the number is awaited, let new memory hold NaN: it may be another tensor's old one, full of the number.

        vLLM loads the parts of a merged layer into such memory.
        """
        import torch

        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        if self._sqlenv_probing is None or self._sqlenv_probing.has_changed or before[0]:
            yield
            return
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])

    def _sqlenv_updated(self) -> None:
        """Note that an update is whole: the announced one, or the one that follows it."""
        if self._sqlenv_probing is None:
            return
        if self._sqlenv_probing.has_changed:
            self._sqlenv_probing.end()
            self._sqlenv_probing = None
        else:
            self._sqlenv_probing.has_changed = True

    def sqlenv_give_up_update(self, run: str = "") -> None:
        """Forget the update that this run announced, or a reload that failed; ends the server if weights changed."""
        if self._sqlenv_probing is not None:
            self._sqlenv_probing.give_up()
            self._sqlenv_probing = None
        if self._sqlenv_update is not None and self._sqlenv_update.run == run:
            self._sqlenv_update.give_up()
            self._sqlenv_update = None

    def _sqlenv_announced(self) -> Update:
        if self._sqlenv_update is None or self._sqlenv_update.is_late:
            raise RuntimeError("no update of the weights was announced, or it is too late for it")
        return self._sqlenv_update
