"""Policies by name: an adapter is loaded on its base, exactly, with the right tokenizer; what is wrong is one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen3ForCausalLM
from trl import ModelConfig, SFTConfig

from inference.launch.plan import LaunchError
from inference.launch.process import see_model
from inference.precision import measure_precision
from inference.weights.gather import adapter_weights, full_weights
from policies.tiny.tokenizer import build_tokenizer
from sqlenv import cli
from tests.integration.training import surroundings_in
from trainer.models import load_policy, load_to_continue, load_tokenizer
from trainer.policy import PolicyError, resolve_policy
from trainer.tiny import BASE_CHECKPOINT

IDS = torch.arange(5, 25)[None]


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, random_policy: Callable[..., Qwen3ForCausalLM]
) -> tuple[Path, Path, PeftModel]:
    """A checkpoint with its tokenizer, a trained adapter on it without one, and the adapted model itself."""
    base, adapter = tmp_path_factory.mktemp("policies") / "base", tmp_path_factory.mktemp("policies") / "adapter"
    tokenizer = build_tokenizer(["How many cats are there"])
    random_policy(tokenizer).save_pretrained(base)
    tokenizer.save_pretrained(base)
    model = get_peft_model(
        Qwen3ForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1, generator=generator)
    model.save_pretrained(adapter)
    return base, adapter, model.eval()


def test_an_adapter_is_loaded_beside_its_base(folders: tuple[Path, Path, PeftModel]) -> None:
    base, adapter, expected = folders
    model, tokenizer = load_policy(str(adapter), dtype=torch.float32)
    assert isinstance(model, PeftModel)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(base).get_vocab()
    ids = IDS.to(model.device)
    with torch.no_grad():
        assert torch.equal(model(ids).logits.cpu(), expected(IDS).logits)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_on_a_cpu_a_policy_is_loaded_in_the_faster_dtype_with_a_line_about_it(
    folders: tuple[Path, Path, PeftModel],
) -> None:
    _, adapter, expected = folders
    said: list[str] = []
    model, _ = load_policy(str(adapter), device="cpu", say=said.append)
    measured = measure_precision(expected.config.hidden_size)
    assert str(model.dtype) == f"torch.{measured.dtype}"
    assert said == [f"--dtype {measured.dtype}: {measured}"]
    model, _ = load_policy(str(adapter), dtype=torch.bfloat16, device="cpu", say=said.append)
    assert model.dtype == torch.bfloat16
    assert len(said) == 1


def test_an_adapter_to_go_on_with_trains_the_adapter_alone(folders: tuple[Path, Path, PeftModel]) -> None:
    _, adapter, _ = folders
    model = load_to_continue(
        resolve_policy(str(adapter)), SFTConfig("nowhere", use_cpu=True, bf16=False), lora_dropout=0.0
    )
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name and ".default." in name for name in trained)


def test_the_adapters_own_tokenizer_comes_before_the_bases(
    folders: tuple[Path, Path, PeftModel], tmp_path: Path
) -> None:
    _, adapter, _ = folders
    own = shutil.copytree(adapter, tmp_path / "own")
    other = build_tokenizer(["words of its own"])
    other.save_pretrained(own)
    assert load_tokenizer(ModelConfig(model_name_or_path=str(own))).get_vocab() == other.get_vocab()


def test_an_adapter_that_cannot_be_loaded_is_one_line(folders: tuple[Path, Path, PeftModel], tmp_path: Path) -> None:
    base, adapter, _ = folders
    broken = shutil.copytree(adapter, tmp_path / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"\0")
    with pytest.raises(PolicyError, match=f"an adapter on '{base}', cannot be loaded") as caught:
        load_policy(str(broken))
    assert "\n" not in str(caught.value)
    config = (broken / "adapter_config.json").read_text()
    (broken / "adapter_config.json").write_text(config.replace(str(base), "/gone"))
    with pytest.raises(PolicyError, match="base_model_name_or_path"):
        load_policy(str(broken))


def test_where_the_base_is_not_to_be_had_a_folder_can_be_named(
    folders: tuple[Path, Path, PeftModel], tmp_path: Path
) -> None:
    base, adapter, _ = folders
    elsewhere = shutil.copytree(adapter, tmp_path / "elsewhere")
    config = elsewhere / "adapter_config.json"
    config.write_text(config.read_text().replace(str(base), "nobody/has-it"))
    with pytest.raises(
        PolicyError, match=rf"\(put a copy of the base into .*, or .* as base_model_name_or_path in {config}\)$"
    ):
        load_policy(str(elsewhere))


def test_code_that_comes_with_a_tokenizer_runs_only_where_it_is_trusted(
    folders: tuple[Path, Path, PeftModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    policy = tmp_path / "policy"
    shutil.copytree(folders[0], policy)
    code = "from transformers import PreTrainedTokenizerFast\n\n\nclass Shouting(PreTrainedTokenizerFast):\n    pass\n"
    (policy / "shouting.py").write_text(code, encoding="utf-8")
    config = json.loads((policy / "tokenizer_config.json").read_text(encoding="utf-8"))
    config |= {"tokenizer_class": "Shouting", "auto_map": {"AutoTokenizer": [None, "shouting.Shouting"]}}
    (policy / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    named = ModelConfig(model_name_or_path=str(policy))
    assert type(load_tokenizer(named, trust_remote_code=True)).__name__ == "Shouting"
    assert type(load_tokenizer(named)).__name__ != "Shouting"


def test_what_is_pushed_and_saved_is_the_adapter_that_is_trained_not_the_kl_terms_copy(
    folders: tuple[Path, Path, PeftModel], tmp_path: Path
) -> None:
    _, adapter, expected = folders
    model = load_to_continue(
        resolve_policy(str(adapter)), SFTConfig("nowhere", use_cpu=True, bf16=False), lora_dropout=0.0
    )
    model.add_adapter("ref", model.peft_config["default"])  # as TRL does for a KL term
    assert not any(parameter.requires_grad for name, parameter in model.named_parameters() if ".ref." in name)
    accelerator = Accelerator(cpu=True)
    weights, config = adapter_weights(model, accelerator)
    assert config.r == 4
    model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "ref").exists()
    for found in (weights, load_file(tmp_path / "saved" / "adapter_model.safetensors")):
        before = load_file(adapter / "adapter_model.safetensors")
        assert found.keys() == before.keys()
        assert all(torch.equal(found[name], before[name]) for name in before)
    merged = full_weights(model, accelerator)
    assert not [name for name in merged if "lora" in name or "ref" in name]
    plain = Qwen3ForCausalLM(model.config)
    plain.load_state_dict(merged)
    with torch.no_grad():
        torch.testing.assert_close(plain.eval()(IDS).logits, expected(IDS).logits, rtol=1e-4, atol=1e-4)


def _pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(POINTER)


def _cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _header_cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:20])


def _too_long(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"0")


def _nothing(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def _shard_missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def _pickle_pointer(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(POINTER)


def _pickle_cut_off(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-100])


def _other_shape(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"][:-2].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123\n"
BROKEN: dict[str, Callable[[Path], None]] = {
    "pointer": _pointer,
    "cut off": _cut_off,
    "header cut off": _header_cut_off,
    "too long": _too_long,
    "empty": _nothing,
    "shard missing": _shard_missing,
    "pickle: pointer": _pickle_pointer,
    "pickle: cut off": _pickle_cut_off,
    "other shape": _other_shape,
}


@pytest.mark.parametrize("kind", BROKEN)
def test_weights_that_are_broken_are_one_line_in_every_command_that_loads_them(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a dry run, which loads none, finds them too."""
    folder = tmp_path / "policy"
    shutil.copytree(BASE_CHECKPOINT, folder)
    BROKEN[kind](folder)
    with pytest.raises(PolicyError) as caught:
        load_policy(str(folder))
    assert "\n" not in str(caught.value)
    if "cut off" not in kind and "other" not in kind:
        assert str(folder) in str(caught.value)
    with surroundings_in(tmp_path):
        flags = ("--config", "configs/tiny.yaml", "--model_name_or_path", str(folder))
        assert cli.main(["train", *flags, "--output_dir", str(tmp_path / "run"), "--dry_run"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert str(folder) in said
    if kind != "other shape":
        with pytest.raises(LaunchError) as refused:
            see_model(str(folder))
        assert str(folder) in str(refused.value)
