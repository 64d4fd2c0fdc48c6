"""`sqlenv mcp`: the tools of one client, which starts the command and speaks over its standard input and output."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from mcp.server.stdio import stdio_server
from rich.console import Console

from env_server.dataset import Dataset
from env_server.service.app import Service
from env_server.service.serve import load_data
from env_server.service.settings import ServiceSettings, add_settings, make_settings
from env_server.test_suites.store import TITLE
from sqlenv.parser import Parser
from sqlenv.progress import reported


def run(argv: Sequence[str]) -> int:
    """Run `sqlenv mcp`; return its exit status. Raises SQLEnvError for what a person has to correct."""
    parser = Parser(
        prog="sqlenv mcp",
        description="The environment's actions as tools of the Model Context Protocol, for a client that starts this "
        "command and speaks over its standard input and output. A server offers the same at /mcp (sqlenv serve).",
        epilog='in a client\'s settings: {"mcpServers": {"sqlenv": {"command": "sqlenv", "args": ["mcp", "--data", '
        '"/path/to/my-shop"]}}}',
    )
    add_settings(parser, ("data", "answer_mode", "step_budget", "cache_dir"))
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    # What variables say of a network is a server's.
    settings = make_settings({**given, "host": "127.0.0.1", "workers": "1"})
    with reported(TITLE, console=Console(stderr=True)) as progress:
        dataset = load_data(settings, progress.update)
    asyncio.run(_over_stdio(settings, dataset))
    return 0


async def _over_stdio(settings: ServiceSettings, dataset: Dataset) -> None:
    service = Service(settings, dataset)
    async with service.playing():
        assert service.mcp is not None
        server = service.mcp.server()
        sys.stderr.write(f"sqlenv mcp: {dataset.name}, {len(dataset.questions):,} questions\n")
        async with stdio_server() as (reading, writing):
            await server.run(reading, writing, server.create_initialization_options())
