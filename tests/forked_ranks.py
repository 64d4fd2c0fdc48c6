"""torchrun for tests: `python -m tests.forked_ranks SCRIPT arguments...` runs two ranks that share one import.

They are forked from a process that has imported what training needs, which takes each process many seconds of a core.
All else is as under torchrun: its agent watches them, and gives them their environment and their place in the group.
"""

from __future__ import annotations

import runpy
import signal
import sys
import uuid

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import trainer.train  # noqa: F401  # what the ranks share


def run(script: str, *arguments: str) -> None:
    """Be a rank: run the script as if it had been started."""
    # The agent's own are inherited.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(config, run)(*sys.argv[1:])
