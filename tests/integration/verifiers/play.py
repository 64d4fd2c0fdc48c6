"""Play episodes through verifiers: its environment, its interception, its tool servers; the model is a script.

Reads {"config": ..., "scripts": {question_id: [[tool, argument name, argument], ...]}} from stdin, and prints what each
question's traces hold. Runs in the virtual environment that `make verifiers` makes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import verifiers.v1 as vf
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.envs.single_agent import SingleAgentEnvConfig
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_environment, taskset_class

TASKSET = "sqlenv-verifiers"


class Model(BaseHTTPRequestHandler):
    """An OpenAI endpoint that says, for each question, what the script has next."""

    scripts: ClassVar[dict[str, list[list[str]]]] = {}
    """By prompt."""

    def do_POST(self) -> None:
        messages = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
        script = self.scripts[next(message["content"] for message in messages if message["role"] == "user")]
        said = sum(message["role"] == "assistant" for message in messages)
        message: dict[str, Any] = {"role": "assistant", "content": "That is all."}
        if said < len(script):
            tool, name, argument = script[said]
            function = {"name": tool, "arguments": json.dumps({name: argument})}
            message = {
                "role": "assistant",
                "tool_calls": [{"id": f"c{said}", "type": "function", "function": function}],
            }
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if said < len(script) else "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        reply = {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def told(episode: vf.Episode) -> dict[str, object]:
    (trace,) = episode.traces
    tools = [message.content for message in trace.branches[-1].messages if message.role == "tool"]
    return {
        "ok": episode.ok,
        "errors": [str(error) for error in (*episode.errors, *trace.errors)],
        "rewards": {name: [reward.value, reward.weight] for name, reward in trace.rewards.items()},
        "reward": trace.reward,
        "metrics": trace.metrics,
        "verdict": trace.state.verdict,
        "stop": trace.stop_condition,
        "turns": trace.num_turns,
        "tools": [part if isinstance(part, str) else part[0].text for part in tools],
    }


async def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["TEST_KEY"] = "any"
    client = EvalClientConfig(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key_var="TEST_KEY")
    print(json.dumps(await play(json.load(sys.stdin), client)))


async def play(given: dict[str, Any], client: EvalClientConfig) -> dict[str, list[object]]:
    """Play each question twice, all at once."""
    config = SingleAgentEnvConfig.model_validate(given["config"])
    environment = load_environment(config)
    assert isinstance(environment.taskset, taskset_class(TASKSET))
    tasks = {task.key: task for task in environment.taskset if task.key in given["scripts"]}
    Model.scripts = {task.data.prompt: given["scripts"][key] for key, task in tasks.items()}
    context = ModelContext(client=client, model="m", sampling=SamplingConfig())
    async with environment.serving():
        slots = [slot for task in tasks.values() for slot in environment.slots(task, 2)]
        episodes = await asyncio.gather(*(environment.run_slot(slot, context) for slot in slots))
    found: dict[str, list[object]] = {}
    for slot, episode in zip(slots, episodes, strict=True):
        found.setdefault(slot.task.key, []).append(told(episode))
    return found


if __name__ == "__main__":
    asyncio.run(main())
