"""A harness of verifiers for `play.py`: asks the model, calls the tools that it names, until it names none.

verifiers' own `null` harness does this in a process that it installs from the package index at each start.
"""

from __future__ import annotations

import json

import verifiers.v1 as vf
from mcp.client import Client
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ChatLoop"]


class ChatLoopConfig(vf.HarnessConfig):
    pass


class ChatLoop(vf.Harness[ChatLoopConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, object]] = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        (url,) = mcp_urls.values()
        model = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        async with Client(url) as tools:
            offered = [
                {
                    "type": "function",
                    "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
                }
                for tool in (await tools.list_tools()).tools
            ]
            while True:
                reply = await model.chat.completions.create(model=ctx.model, messages=messages, tools=offered)
                said = reply.choices[0].message
                if not said.tool_calls:
                    return ProgramResult(0, "", "")
                messages.append(said.model_dump(exclude_none=True))
                for call in said.tool_calls:
                    result = await tools.call_tool(call.function.name, json.loads(call.function.arguments))
                    text = "".join(part.text for part in result.content)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
