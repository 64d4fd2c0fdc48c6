"""What dry runs are tested with: checkpoints of true shapes without weights, and a stand-in for a vLLM server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from trainer.tiny import BASE_CHECKPOINT

MODELS = Path(__file__).parent / "trainer" / "training" / "models"


def make_checkpoints(folder: Path) -> Path:
    """Checkpoints of the true shapes, with a tokenizer of ours and without their weights: a dry run loads none."""
    for config in MODELS.glob("*.json"):
        model = folder / config.stem
        shutil.copytree(BASE_CHECKPOINT, model, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        shutil.copyfile(config, model / "config.json")
        (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


class StandIn(BaseHTTPRequestHandler):
    """Answers what a vLLM server is asked at the start."""

    model = ""
    context = 40_960
    settings: dict[str, Any] = {"lora_config": {"max_lora_rank": 32}}  # noqa: RUF012

    def do_GET(self) -> None:
        replies: dict[str, Any] = {
            "/health": {},
            "/v1/models": {"data": [{"id": self.model, "max_model_len": self.context}]},
            "/server_info?config_format=json": {"vllm_config": self.settings},
        }
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(replies[self.path]).encode())

    def log_message(self, *args: object) -> None:
        """Keep quiet."""


@contextmanager
def standing_in() -> Iterator[tuple[str, type[StandIn]]]:
    """A stand-in's URL, and its class, where a test says what it serves."""
    handler = type("Handler", (StandIn,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", handler
        finally:
            server.shutdown()
            thread.join()
