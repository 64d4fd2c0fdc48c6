"""What a name stands for: checkpoints, adapters and runs by their files alone, and bases that were moved."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from inference.adapters import ModelRef, PolicyNameError, find_policy, saved_policy, width_of


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "model.safetensors").touch()
    return folder


def adapter(folder: Path, base: object, *, tokenizer: bool = False, **settings: Any) -> Path:
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 8, "base_model_name_or_path": base and str(base), **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").touch()
    if tokenizer:
        (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_a_checkpoint_is_its_own_base(tmp_path: Path) -> None:
    folder = str(checkpoint(tmp_path / "m"))
    found = find_policy(folder, "v2")
    assert found.adapter is None
    assert found.base == found.ref == found.tokenizer == ModelRef(folder, "v2")


def test_a_name_that_nobody_knows_is_left_to_whoever_loads_it() -> None:
    found = find_policy("nobody/nothing")
    assert found.adapter is None
    assert found.base == ModelRef("nobody/nothing")


@pytest.mark.parametrize("own", [True, False])
def test_an_adapter_has_a_base_and_perhaps_a_tokenizer(tmp_path: Path, own: bool) -> None:
    base = checkpoint(tmp_path / "base")
    found = find_policy(str(adapter(tmp_path / "a", base, tokenizer=own)))
    assert found.adapter is not None
    assert found.adapter.rank == 8
    assert found.base == ModelRef(str(base))
    assert found.ref == ModelRef(str(tmp_path / "a"))
    assert found.tokenizer == (found.ref if own else found.base)


def test_a_run_stands_for_the_policy_that_it_saved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    base = checkpoint(tmp_path / "base")
    run.mkdir()
    (run / "config.json").write_text('{"sqlenv": {}}')  # what the run was started with: no model's config
    adapter(run / "model", base)
    adapter(run / "checkpoint-2", base)
    found = find_policy(str(run))
    assert found.name == str(run)
    assert found.ref == ModelRef(str(run / "model"))


def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # it cannot be imported
    assert saved_policy(Path("runs/nowhere")) is None


def test_a_run_that_has_saved_no_policy_names_its_last_checkpoint(tmp_path: Path) -> None:
    for step, at in ((9, 1.0), (10, 2.0)):
        folder = adapter(tmp_path / f"checkpoint-{step}", "b/b")
        os.utime(folder, (at, at))
    with pytest.raises(PolicyNameError, match="checkpoint-10"):
        find_policy(str(tmp_path))


def test_a_run_of_stages_stands_for_the_policy_of_its_last(tmp_path: Path) -> None:
    progress = {"stages": ["1-warmup", "2-grpo"], "finished": [{}]}
    checkpoint(tmp_path / "1-warmup")
    checkpoint(tmp_path / "2-grpo" / "model")
    (tmp_path / "stages.json").write_text(json.dumps(progress))
    with pytest.raises(PolicyNameError, match=r"of which 1 of 2 stages are finished; name one of those: .*/1-warmup$"):
        find_policy(str(tmp_path))
    (tmp_path / "stages.json").write_text(json.dumps({**progress, "finished": []}))
    with pytest.raises(PolicyNameError, match="0 of 2 stages are finished; go on with it first"):
        find_policy(str(tmp_path))
    (tmp_path / "stages.json").write_text(json.dumps({**progress, "finished": [{}, {}]}))
    assert find_policy(str(tmp_path)).ref == ModelRef(str(tmp_path / "2-grpo" / "model"))


def test_a_relative_base_is_found_from_here_and_beside_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path / "models" / "base")
    folder = adapter(tmp_path / "runs" / "a", "models/base")
    monkeypatch.chdir(tmp_path)
    assert find_policy(str(folder)).base == ModelRef("models/base")
    monkeypatch.chdir(tmp_path / "runs")
    assert Path(find_policy("a").base.location) == tmp_path / "models" / "base"


def test_a_base_on_the_hub_comes_with_its_revision(tmp_path: Path) -> None:
    found = find_policy(str(adapter(tmp_path / "a", "someone/base", revision="abc")), "mine")
    assert found.base == ModelRef("someone/base", "abc")
    assert found.ref.revision == "mine"


def test_a_base_on_the_hub_is_read_from_a_copy_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQLENV_CACHE_DIR", str(tmp_path / "cache"))
    folder = adapter(tmp_path / "a", "Some-One/Base-7M", revision="abc")
    missing = find_policy(str(folder))
    assert missing.base == ModelRef("Some-One/Base-7M", "abc")
    assert missing.base_line == ""
    assert missing.adapter is not None
    assert str(tmp_path / "cache" / "models" / "base-7m") in missing.adapter.remedy
    copy = checkpoint(tmp_path / "cache" / "models" / "base-7m")
    found = find_policy(str(folder))
    assert found.base == ModelRef(str(copy))
    assert "Some-One/Base-7M" in found.base_line
    assert str(copy) in found.base_line
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: "config.json")
    assert find_policy(str(folder)).base.location == "Some-One/Base-7M", "the Hub's own copy comes first"


@pytest.mark.parametrize("base", ["/gone/base", "./base", "runs/x/model"])
def test_a_base_that_is_gone_is_said_with_the_line_to_mend(tmp_path: Path, base: str) -> None:
    folder = adapter(tmp_path / "a", base)
    with pytest.raises(PolicyNameError, match=r"not there any more.*base_model_name_or_path in .*adapter_config\.json"):
        find_policy(str(folder))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"peft_type": "LORA", "r": 8}', "does not say which model"),
        ('{"peft_type": "IA3"}', "only LoRA"),
        ("{", "cannot be read"),
        ("[]", "no JSON object"),
    ],
)
def test_what_is_no_adapter_of_ours_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(PolicyNameError, match=words):
        find_policy(str(tmp_path))


def test_an_adapter_on_an_adapter_is_refused(tmp_path: Path) -> None:
    first = adapter(tmp_path / "first", checkpoint(tmp_path / "base"))
    with pytest.raises(PolicyNameError, match=f"sqlenv export {first}"):
        find_policy(str(adapter(tmp_path / "second", first)))


def test_the_width_of_a_config_that_cannot_be_read_is_not_known(tmp_path: Path) -> None:
    assert width_of(ModelRef(str(tmp_path))) is None
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    assert width_of(ModelRef(str(tmp_path))) is None
    (tmp_path / "config.json").write_text('{"hidden_size": 64}', encoding="utf-8")
    assert width_of(ModelRef(str(tmp_path))) == 64
