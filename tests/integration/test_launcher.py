"""`sqlenv inference` over the real vLLM, and the worker extension that it brings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from benchmarks.server_process import ROOT, reserved_ports
from tests.integration.service import until
from tests.integration.vllm_server import PYTHON, START_S, skip_without_vllm, vllm_server

BASE = ROOT / "trainer" / "tiny" / "base"
PROMPT = [5, 6, 7, 8, 20, 21]
EXACT = 1e-4
REPLY_S = 120.0


def post(url: str, path: str, **body: Any) -> dict[str, Any]:
    """POST a JSON body and return the reply's."""
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=REPLY_S) as reply:
        text = reply.read()
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


def complete(url: str, prompt: Sequence[int] = PROMPT) -> dict[str, Any]:
    return post(
        url, "/v1/completions", prompt=list(prompt), max_tokens=16, temperature=1.0, top_p=1.0, top_k=-1, seed=1,
        logprobs=0, return_token_ids=True,
    )  # fmt: skip


def group_of(leader: int) -> list[int]:
    """Return the running processes of a session."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, fields = file.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, _, session = fields.split()[:4]
        if int(session) == leader and state != "Z":
            found.append(int(name.partition(" ")[0]))
    return found


def children_of(launcher: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def engine_of(leader: int) -> int:
    """Return the process that computes."""
    (found,) = (pid for pid in group_of(leader) if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text())
    return found


def launch(folder: Path, errors: IO[bytes], port: int, *flags: str) -> subprocess.Popen[str]:
    """Start `sqlenv inference`, to be ended by the caller."""
    command = [sys.executable, str(ROOT / "sqlenv.py"), "inference", "--model", str(BASE), "--python", str(PYTHON)]
    command += ["--port", str(port), "--log_dir", str(folder), "--cpu_kv_cache_gb", "0.25"]
    command += ["--startup_timeout_s", str(START_S), *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)


def test_two_replicas_serve_and_end_together(tmp_path: Path) -> None:
    skip_without_vllm()
    errors = tmp_path / "stderr"
    with (
        reserved_ports(2) as ports,
        errors.open("wb") as output,
        launch(tmp_path, output, ports[0], "--replicas", "2") as launcher,
    ):
        assert launcher.stdout is not None
        urls = launcher.stdout.readline().strip().split(",")
        assert urls == [f"http://127.0.0.1:{port}" for port in ports], errors.read_text()
        servers = children_of(launcher.pid)
        assert all(len(group_of(server)) > 1 for server in servers)

        replies = [complete(url) for url in urls]
        tokens, again = (reply["choices"][0]["token_ids"] for reply in replies)
        assert tokens == again
        assert len({reply["system_fingerprint"] for reply in replies}) == 2

        os.kill(engine_of(servers[0]), signal.SIGKILL)
        status = launcher.wait(REPLY_S)
    assert status != 0
    assert "stopping" in errors.read_text()
    until(lambda: not any(group_of(server) for server in servers))


def test_a_killed_launcher_leaves_no_server(tmp_path: Path) -> None:
    skip_without_vllm()
    errors = tmp_path / "stderr"
    with (
        reserved_ports() as (port,),
        errors.open("wb") as output,
        launch(tmp_path, output, port) as launcher,
    ):
        assert launcher.stdout is not None
        assert launcher.stdout.readline(), errors.read_text()
        (server,) = children_of(launcher.pid)
        launcher.kill()
    until(lambda: not group_of(server))


@pytest.fixture
def tied(tmp_path: Path) -> Callable[[int], tuple[Qwen3ForCausalLM, Path]]:
    """Makes a random policy with tied embeddings, and its checkpoint."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)

    def make(seed: int) -> tuple[Qwen3ForCausalLM, Path]:
        config = Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=2048,
            initializer_range=0.3,  # far from uniform: a wrong head shows
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            dtype="float32",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Qwen3ForCausalLM(config).eval()
        folder = tmp_path / f"tied-{seed}"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return model, folder

    return make


def gap(url: str, model: Qwen3ForCausalLM) -> float:
    """Return how far the server's logprobs are from the model's, over the tokens that the server drew."""
    post(url, "/reset_prefix_cache")
    choice = complete(url)["choices"][0]
    ids = choice["token_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
    ours = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    return float((ours - torch.tensor(choice["logprobs"]["token_logprobs"])).abs().max())


def test_a_tied_head_follows_a_reload(tied: Callable[[int], tuple[Qwen3ForCausalLM, Path]], tmp_path: Path) -> None:
    first, folder = tied(0)
    second, update = tied(1)
    with vllm_server(folder, tmp_path) as server:
        assert gap(server.url, first) < EXACT

        # The trap that the worker extension is for. When this fails, vLLM has mended it.
        post(server.url, "/collective_rpc", method="reload_weights", kwargs={"weights_path": str(update)})
        assert gap(server.url, second) > 1

        for model, path in ((first, folder), (second, update), (first, folder)):
            post(server.url, "/collective_rpc", method="sqlenv_reload_weights", kwargs={"weights_path": str(path)})
            assert gap(server.url, model) < EXACT


def test_a_crowd_is_served_and_a_restart_shows(tmp_path: Path) -> None:
    with vllm_server(BASE, tmp_path) as server:
        # Together they are longer than a step: one of them would be computed in parts.
        prompts = [[5 + i, *range(100, 500)] for i in range(12)]
        with ThreadPoolExecutor(len(prompts)) as pool:
            together = list(pool.map(lambda prompt: complete(server.url, prompt), prompts))
        alone = [complete(server.url, prompt) for prompt in prompts]
        ids = [[reply["choices"][0]["token_ids"] for reply in replies] for replies in (together, alone)]
        assert ids[0] == ids[1]
        first, second = (
            torch.tensor([value for reply in replies for value in reply["choices"][0]["logprobs"]["token_logprobs"]])
            for replies in (together, alone)
        )
        assert float((first - second).abs().max()) < EXACT

        before = complete(server.url)
        assert before["system_fingerprint"] == server.fingerprint
        server.freeze()
        server.thaw()
        server.kill()
        server.start()
        after = complete(server.url)
        assert after["system_fingerprint"] == server.fingerprint != before["system_fingerprint"]
        assert after["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]
