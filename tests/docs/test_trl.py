"""docs/trl.md: its scripts run as they are written, but for the first one's model, which is a small one here."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import Qwen3ForCausalLM

from env_server.cache import CACHE_VARIABLE
from env_server.data.loading import load_dataset
from tests.trainer.chat.families import family_tokenizer
from trainer.rollout.trl_environments import TRLEnvironments

PAGE = (Path(__file__).parents[2] / "docs" / "trl.md").read_text(encoding="utf-8")
NAMED = "Qwen/Qwen3-0.6B"
SCRIPTS = [script for script in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S) if "GRPOTrainer" in script]


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, generated_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CACHE_VARIABLE, str(generated_cache))
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture
def model(tmp_path: Path, random_policy: Callable[..., Qwen3ForCausalLM]) -> Path:
    """A small random model with the chat template of the one that the page names."""
    tokenizer = copy.deepcopy(family_tokenizer("qwen3"))
    tokenizer.eos_token = "<|im_end|>"
    folder = tmp_path / "model"
    tokenizer.save_pretrained(folder)
    random_policy(tokenizer, context=4_096, liked={"<|im_end|>": 12.0}).save_pretrained(folder)
    return folder


def test_the_page_has_scripts_for_each_way() -> None:
    assert len(SCRIPTS) == 3
    assert [NAMED in script for script in SCRIPTS] == [True, False, False]


@pytest.mark.parametrize("number", range(3))
def test_a_script_trains(number: int, tmp_path: Path, model: Path) -> None:
    """The first one as it stands; the others go on from its imports, data and config."""
    begin, _, rest = SCRIPTS[0].partition("with TRLEnvironments")
    script = begin + (SCRIPTS[number] if number else f"with TRLEnvironments{rest}")
    script = script.replace(NAMED, str(model)).replace("GRPOConfig(\n", "GRPOConfig(\n    use_cpu=True, bf16=False,\n")
    exec(compile(script, "trl.md", "exec"), {"__name__": "__main__"})
    (output,) = re.findall(r'output_dir="(.*?)"', script)
    (checkpoint,) = (tmp_path / output).glob("checkpoint-*")
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["global_step"] == 2


def test_a_reward_of_your_own_reads_episodes() -> None:
    (function,) = (text for text in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S) if "reward_short" in text)
    names: dict[str, Callable[..., list[float]]] = {}
    exec(compile(function, "trl.md", "exec"), names)
    dataset = load_dataset("synthetic")
    with TRLEnvironments(dataset) as environments:
        environment = environments()
        environment.reset(question_id=dataset.questions[0].question_id)
        assert names["reward_short"](environments=[environment]) == [0.0]
