"""The flags of `sqlenv evaluate`: none is ignored in silence."""

from __future__ import annotations

import pytest

from trainer.evaluation.arguments import build_parser, without_effect


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--policy random", []),
        ("--policy random --step_budget 4 --seed 3 --env ws://there --env_token x", []),
        ("--policy random --few_shot 2 --temperature 1", ["--few_shot", "--temperature"]),
        ("--policy oracle --max_turn_length 9 --use_vllm", ["--use_vllm", "--max_turn_length"]),
        ("--policy oracle --vllm_server_base_url http://there", ["--vllm_server_base_url"]),
        ("--policy m --few_shot 2 --use_vllm --vllm_server_base_url http://there", []),
        ("--policy m --vllm_server_base_url http://there", ["--vllm_server_base_url"]),
        ("--policy m --env_token x", ["--env_token"]),
        ("--policy m --dtype float32", []),
        ("--policy m --dtype float32 --use_vllm", ["--dtype"]),
        ("--policy oracle --dtype float32", ["--dtype"]),
    ],
)
def test_a_flag_that_does_nothing_is_said(flags: str, said: list[str]) -> None:
    lines = without_effect(build_parser().parse_args(flags.split()))
    assert [line.split()[0] for line in lines] == said
    assert all(" has no effect" in line for line in lines)
