"""Exporting: merged exactly, configs right for generation, a folder that is whole or is not there."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from env_server.errors import SQLEnvError
from env_server.types import AnswerMode
from policies.tiny.tokenizer import build_tokenizer
from sqlenv import cli
from tests.integration.exported import scripts
from trainer.export.checkpoint import ExportError, export
from trainer.export.model_card import CardFacts, model_card
from trainer.policy import SETTINGS_FILE, PlaySettings

PLAY = PlaySettings(data="spider:/home/me/spider", answer_mode=AnswerMode.SQL, max_turn_length=6)

Save = Callable[..., Path]


@pytest.fixture
def checkpoint(tmp_path: Path, random_policy: Callable[..., Qwen3ForCausalLM]) -> Save:
    """Save a random policy as training leaves one, in a dtype, with settings of a tokenizer; returns its folder."""

    def save(dtype: torch.dtype = torch.float32, **tokenizer_settings: Any) -> Path:
        tokenizer = build_tokenizer(["How many singers are there concert"])
        model = random_policy(tokenizer).to(dtype)
        model.config.use_cache = False
        for name, value in tokenizer_settings.items():
            setattr(tokenizer, name, value)
        folder = tmp_path / "checkpoint"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        PLAY.save(folder)
        return folder

    return save


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[[Path], Path]:
    """Save a random adapter on a checkpoint; returns its folder."""

    def save(base: Path) -> Path:
        torch.manual_seed(0)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
        folder = tmp_path / "adapter"
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(base).save_pretrained(folder)
        return folder

    return save


def weights(folder: Path) -> dict[str, Tensor]:
    return dict(load_file(folder / "model.safetensors"))


def config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    return dict(json.loads((folder / name).read_text(encoding="utf-8")))


def test_a_full_checkpoint_keeps_its_weights_and_how_it_is_played(
    checkpoint: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint()
    (tmp_path / "out").mkdir()
    assert cli.main(["export", str(source), "--out", str(tmp_path / "out")]) == 0
    before, after = weights(source), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    parameters = sum(tensor.numel() for tensor in after.values())
    said = capsys.readouterr()
    assert said.out.splitlines()[0] == f"{parameters:,} parameters, float32, in {tmp_path / 'out'}"
    assert f"taken over from {source}: " in said.err
    assert config(tmp_path / "out", SETTINGS_FILE) == config(source, SETTINGS_FILE)


def test_an_adapter_is_merged_into_what_it_computed(
    checkpoint: Save, adapter: Callable[[Path], Path], tmp_path: Path
) -> None:
    base = checkpoint()
    lora = adapter(base)
    export(str(lora), tmp_path / "out")
    ids = torch.arange(4, 20)[None]
    beside = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), lora).eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        expected, found = beside(ids).logits, merged(ids).logits
        assert not torch.allclose(AutoModelForCausalLM.from_pretrained(base)(ids).logits, expected, atol=1e-2)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    assert "- LoRA of rank 4 and alpha 8, merged" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [None, torch.float32, torch.bfloat16])
def test_a_merged_weight_is_rounded_once(
    stored: torch.dtype,
    target: torch.dtype | None,
    checkpoint: Save,
    adapter: Callable[[Path], Path],
    tmp_path: Path,
) -> None:
    base = checkpoint(stored)
    lora = adapter(base)
    export(str(lora), tmp_path / "out", dtype=target)
    factors = load_file(lora / "adapter_model.safetensors")
    name = "model.layers.1.self_attn.q_proj"
    a, b = (factors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    whole = torch.addmm(weights(base)[f"{name}.weight"].float(), b, a, alpha=2.0)
    found = weights(tmp_path / "out")
    torch.testing.assert_close(
        found[f"{name}.weight"],
        whole.to(target or stored),
        atol=1e-7,
        rtol=1e-7 if whole.dtype == (target or stored) else 2**-8,
    )
    assert {tensor.dtype for tensor in found.values()} == {target or stored}
    assert config(tmp_path / "out")["dtype"] == str(target or stored).removeprefix("torch.")


def test_generation_ends_where_a_turn_ends(checkpoint: Save, tmp_path: Path) -> None:
    source = checkpoint(eos_token="<obs>", pad_token=None, clean_up_tokenization_spaces=True, padding_side="right")
    export(str(source), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    end, old = tokenizer.convert_tokens_to_ids(["<end>", "<obs>"])
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<end>", "<obs>")
    assert (tokenizer.clean_up_tokenization_spaces, tokenizer.padding_side) == (False, "left")
    assert tokenizer.model_max_length == 512
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(source).chat_template
    generation = config(tmp_path / "out", "generation_config.json")
    assert (generation["eos_token_id"], generation["pad_token_id"], generation["do_sample"]) == ([end, old], old, False)
    written = config(tmp_path / "out")
    assert (written["use_cache"], written["eos_token_id"], written["pad_token_id"]) == (True, end, old)


def test_what_is_published_names_no_path(checkpoint: Save, tmp_path: Path) -> None:
    export(str(checkpoint()), tmp_path / "out", name="me/policy")
    assert config(tmp_path / "out", SETTINGS_FILE)["data"] == "spider:spider"
    for path in (tmp_path / "out").rglob("*"):
        assert not path.is_file() or (
            b"/home" not in (data := path.read_bytes()) and str(tmp_path).encode() not in data
        )


def test_a_folder_that_holds_something_is_refused(checkpoint: Save, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ExportError, match="out holds something already; name another folder"):
        export(str(checkpoint()), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    with pytest.raises(ExportError, match="is there and is no folder"):
        export(str(checkpoint()), tmp_path / "out" / "mine")


def test_a_full_disk_is_one_line(checkpoint: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = checkpoint()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # The last file of all.
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ExportError, match="out cannot be written: No space left on device"):
        export(str(source), tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint"}, "nothing is left behind"


def test_a_base_that_is_stored_quantised_is_refused(
    checkpoint: Save, adapter: Callable[[Path], Path], tmp_path: Path
) -> None:
    base = checkpoint()
    lora = adapter(base)
    quantised = {**config(base), "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (base / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(ExportError, match=r"stored quantised.*base_model_name_or_path in .*adapter_config.json"):
        export(str(lora), tmp_path / "out")
    with pytest.raises(ExportError, match="stored quantised"):
        export(str(base), tmp_path / "out")


def test_what_is_no_policy_is_named(tmp_path: Path) -> None:
    with pytest.raises(SQLEnvError, match="nothing"):
        export(str(tmp_path / "nothing"), tmp_path / "out")


def test_the_page_shows_the_scripts_of_the_card() -> None:
    card = model_card(CardFacts("exported", PLAY, "float32", 1))
    assert scripts() == [block.partition("```")[0] for block in card.split("```python\n")[1:]]
