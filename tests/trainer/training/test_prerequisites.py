"""What a run needs of the machine and of the servers, and the sentences that say what is missing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from inference.launch.plan import WeightSyncMode
from trainer.training.prerequisites import DryRunError, compiler, unprepared


@pytest.mark.parametrize(
    ("variables", "there", "found"),
    [
        ({}, ["gcc", "clang", "cc"], "/bin/gcc"),
        ({}, ["clang"], "/bin/clang"),
        ({"CC": "ccache-gcc -m64"}, ["gcc", "ccache-gcc"], "/bin/ccache-gcc"),
        ({}, [], "no C compiler was found (gcc and clang)"),
        ({}, ["cc"], "no C compiler was found (gcc and clang)"),  # Triton does not look for it
        ({"CC": "icx"}, ["gcc"], "no C compiler was found (CC=icx)"),
    ],
)
def test_the_compiler_that_the_loss_takes(
    variables: dict[str, str], there: list[str], found: str, tmp_path: Path
) -> None:
    def which(name: str) -> str | None:
        return f"/bin/{name}" if name in there else None

    (tmp_path / "Python.h").touch()
    if found.startswith("/"):
        assert compiler(variables, which, tmp_path) == found
        with pytest.raises(DryRunError, match=r"has no Python\.h.*apt-get install python3-dev$"):
            compiler(variables, which, tmp_path / "elsewhere")
        return
    with pytest.raises(DryRunError, match=f"{re.escape(found)}.*apt-get install gcc libc6-dev$"):
        compiler(variables, which, tmp_path)


@pytest.mark.parametrize(
    ("transport", "settings", "lacking"),
    [
        ("lora", {"lora_config": {"max_lora_rank": 32}}, ""),
        ("lora", {"lora_config": {"max_lora_rank": 16}}, "takes adapters up to rank 16, and this one has rank 32"),
        ("lora", {"lora_config": None}, "takes no adapters"),
        ("ipc", {"weight_transfer_config": {"backend": "ipc"}}, ""),
        (
            "ipc",
            {"weight_transfer_config": {"backend": "nccl"}},
            "takes weights by nccl, and this run sends them by ipc",
        ),
        ("nccl", {"weight_transfer_config": None}, "takes weights neither by nccl nor by ipc"),
        ("disk", {}, ""),
    ],
)
def test_what_a_server_lacks_for_the_weights(transport: str, settings: dict[str, Any], lacking: str) -> None:
    said = unprepared(WeightSyncMode(transport), 32, settings)
    assert said.startswith(lacking)
    assert bool(said) == bool(lacking)
    assert not lacking or f"start it with --weight_sync {transport}" in said
