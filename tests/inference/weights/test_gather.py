"""Gathering, in one process and on two real ranks: this file is the ranks' program too (see `_rank_main`)."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from inference.weights.gather import (
    GatherError,
    adapter_weights,
    full_weights,
    write_adapter,
    write_checkpoint,
)
from tests.fork_server import ForkServer
from tests.logprobs import logprobs_of

VOCAB = 61
PROMPT, TOKENS = tuple(range(2, 20)), tuple(range(20, 32))
LIMIT_S = 240
"""For both ranks and all wrappers: far beyond what it takes, on a crowded machine too."""


def tiny_policy(*, tied: bool = False) -> PreTrainedModel:
    torch.manual_seed(11)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=96,
            tie_word_embeddings=tied,
        )
    )


def with_lora(model: PreTrainedModel, **options: Any) -> PeftModel:
    """Put an adapter on the model that has learnt something: B is not zero."""
    settings: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    peft = get_peft_model(model, LoraConfig(**settings))
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in peft.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return peft


def bits(model: nn.Module) -> dict[str, Tensor]:
    """Copy what this process holds of the parameters."""
    held = {}
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        held[name] = local.detach().clone()
    return held


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def checkpoint_of(model: PreTrainedModel | PeftModel) -> dict[str, Tensor]:
    """Return what transformers would save, adapters merged by PEFT itself."""
    plain = copy.deepcopy(model)
    if isinstance(plain, PeftModel):
        plain = plain.merge_and_unload()
    state = {name: tensor.detach().clone() for name, tensor in plain.state_dict().items()}
    if plain.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


LORAS: dict[str, Callable[[], PeftModel]] = {
    "lora": lambda: with_lora(tiny_policy()),
    "lora, tied": lambda: with_lora(tiny_policy(tied=True)),
    "rslora": lambda: with_lora(tiny_policy(), use_rslora=True, lora_alpha=3),
    "dora": lambda: with_lora(tiny_policy(), use_dora=True),
    "embeddings and head": lambda: with_lora(tiny_policy(), target_modules=["embed_tokens", "lm_head", "q_proj"]),
    "modules to save": lambda: with_lora(tiny_policy(), modules_to_save=["embed_tokens", "lm_head"]),
}


@pytest.fixture(scope="module")
def alone() -> Accelerator:
    return Accelerator(cpu=True)


@pytest.mark.parametrize("tied", [False, True])
def test_a_plain_model_is_its_checkpoint_without_a_copy(alone: Accelerator, tied: bool, tmp_path: Path) -> None:
    model = tiny_policy(tied=tied)
    weights = full_weights(model, alone)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert same_bits(weights, saved)
    parameters = dict(model.named_parameters())
    assert all(weights[name].data_ptr() == parameters[name].data_ptr() for name in weights)
    assert not any(tensor.requires_grad for tensor in weights.values())


@pytest.mark.parametrize("kind", LORAS)
def test_adapters_are_merged_and_the_model_keeps_its_bits(alone: Accelerator, kind: str) -> None:
    peft = LORAS[kind]()
    before, expected = bits(peft), checkpoint_of(peft)
    weights = full_weights(peft, alone)
    assert same_bits(bits(peft), before)
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-6)
    # What PEFT did not touch is passed on, not copied.
    norm = peft.get_parameter("base_model.model.model.norm.weight")
    assert weights["model.norm.weight"].data_ptr() == norm.data_ptr()


def test_merging_in_bfloat16_rounds_once(alone: Accelerator) -> None:
    peft = with_lora(tiny_policy())
    merged = full_weights(peft.to(torch.bfloat16), alone)
    exact = full_weights(peft.float(), alone)
    assert all(torch.equal(merged[name], exact[name].to(torch.bfloat16)) for name in exact)


def test_a_disabled_adapter_is_not_merged(alone: Accelerator) -> None:
    base = checkpoint_of(tiny_policy())
    peft = with_lora(tiny_policy())
    with peft.disable_adapter():
        assert same_bits(full_weights(peft, alone), base)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_wrappers_around_modules_leave_no_trace_in_the_names(alone: Accelerator) -> None:
    model = tiny_policy()
    expected = checkpoint_of(model)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Qwen3DecoderLayer))
    compiled = torch.compile(model)
    assert isinstance(compiled, nn.Module)
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_parameters())
    assert same_bits(full_weights(compiled, alone), expected)
    peft = with_lora(tiny_policy())
    expected, adapter = checkpoint_of(peft), adapter_weights(peft, alone)[0]
    apply_activation_checkpointing(peft, check_fn=lambda module: isinstance(module, Qwen3DecoderLayer))
    assert full_weights(peft, alone).keys() == expected.keys()
    assert len(adapter) == 2 * 7 * 2
    assert same_bits(adapter_weights(peft, alone)[0], adapter)


def quantised() -> PreTrainedModel:
    model = tiny_policy()
    packed = torch.zeros(64, 1, dtype=torch.uint8)
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(packed, requires_grad=False)
    return model


def merged_already() -> PeftModel:
    peft = with_lora(tiny_policy())
    peft.merge_adapter()
    return peft


def two_adapters() -> PeftModel:
    peft = with_lora(tiny_policy())
    peft.add_adapter("other", LoraConfig(r=2, target_modules="all-linear"))
    peft.base_model.set_adapter(["default", "other"])
    return peft


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (quantised, "quantised"),
        (merged_already, "merged into the model already"),
        (two_adapters, "exactly one adapter"),
        (lambda: with_lora(tiny_policy(), target_modules=["embed_tokens"], use_dora=True), "only DoRA of linear"),
        (lambda: with_lora(tiny_policy(), trainable_token_indices=[3]), "TrainableTokensWrapper"),
        (lambda: with_lora(tiny_policy(tied=True), target_modules=["embed_tokens"]), "ties lm_head"),
        (lambda: with_lora(tiny_policy(tied=True), modules_to_save=["lm_head"]), "ties lm_head"),
    ],
)
def test_what_no_checkpoint_can_hold_is_refused(alone: Accelerator, make: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(GatherError, match=reason):
        full_weights(make(), alone)


@pytest.mark.parametrize("kind", LORAS)
def test_an_adapter_is_what_peft_saves(alone: Accelerator, kind: str, tmp_path: Path) -> None:
    peft = LORAS[kind]()
    weights, config = adapter_weights(peft, alone)
    write_adapter(tmp_path / "ours", weights, config)
    peft.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    ours, theirs = (load_file(tmp_path / side / "adapter_model.safetensors") for side in ("ours", "theirs"))
    assert same_bits(ours, theirs)
    written = [json.loads((tmp_path / side / "adapter_config.json").read_text()) for side in ("ours", "theirs")]
    for adapter_config in written:  # sets, in an order of their own
        adapter_config["target_modules"].sort()
    assert written[0] == written[1]
    assert not peft.peft_config["default"].inference_mode


def test_an_adapter_on_a_quantised_model_can_be_pushed_alone(alone: Accelerator) -> None:
    model = quantised()
    targets = ["q_proj", "v_proj"]
    adapter, _ = adapter_weights(with_lora(model, target_modules=targets), alone)
    assert len(adapter) == 2 * 2 * 2


def test_a_model_without_an_adapter_has_none_to_push(alone: Accelerator) -> None:
    with pytest.raises(GatherError, match="not a PEFT model"):
        adapter_weights(tiny_policy(), alone)


def test_a_checkpoint_is_read_by_transformers(alone: Accelerator, tmp_path: Path) -> None:
    model = tiny_policy(tied=True)
    write_checkpoint(tmp_path / "v1", full_weights(model, alone))
    model.config.save_pretrained(tmp_path / "v1")
    read = Qwen3ForCausalLM.from_pretrained(tmp_path / "v1")
    assert same_bits(bits(read), bits(model))


def test_a_large_checkpoint_is_several_files_with_an_index(alone: Accelerator, tmp_path: Path) -> None:
    weights = full_weights(tiny_policy(), alone)
    write_checkpoint(tmp_path / "v1", weights, shard_bytes=100_000)
    index = json.loads((tmp_path / "v1" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "v1").glob("*.safetensors"))
    assert len(files) > 1
    found = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            found.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
            assert all(index["weight_map"][name] == file.name for name in opened.keys())  # noqa: SIM118
    assert same_bits(found, weights)


def test_shared_and_strided_tensors_can_be_written(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    weights = {"a": whole, "again": whole, "turned": whole.T, "part": whole[1:]}
    write_checkpoint(tmp_path / "v1", weights)
    assert same_bits(load_file(tmp_path / "v1" / "model.safetensors"), weights)


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "v1", {"a": torch.ones(2)})
    with pytest.raises(FileExistsError):
        write_checkpoint(tmp_path / "v1", {"a": torch.zeros(2)})
    assert torch.equal(load_file(tmp_path / "v1" / "model.safetensors")["a"], torch.ones(2))

    class Broken(LoraConfig):  # type: ignore[misc]
        def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_adapter(tmp_path / "v2", {"a": torch.ones(2)}, Broken())
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]


# --- two ranks --------------------------------------------------------------------------------------------------


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for module in list(model.modules()):
        if isinstance(module, Qwen3DecoderLayer):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp1(model: nn.Module) -> nn.Module:
    layers = ModuleWrapPolicy({Qwen3DecoderLayer})
    return FullyShardedDataParallel(model, auto_wrap_policy=layers, device_id=torch.device("cpu"), use_orig_params=True)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {"ddp": ddp, "fsdp2": fsdp2, "fsdp1": fsdp1}
POLICIES: dict[str, Callable[[], PreTrainedModel | PeftModel]] = {
    "plain": tiny_policy,
    "tied": lambda: tiny_policy(tied=True),
    "lora": LORAS["lora"],
    "dora": LORAS["dora"],
    "saved": LORAS["modules to save"],
}


def _differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[float]:
    return [(one[name] - other[name]).abs().max().item() for name in one]


def _forward(model: nn.Module) -> None:
    """Run as an evaluation would: FSDP2 keeps some of its parameters gathered after that."""
    with torch.no_grad():
        model(input_ids=torch.tensor([PROMPT]))


def _examine(wrapper: str, policy: str, accelerator: Accelerator) -> dict[str, Any]:
    """Gather from a model that is sharded over the ranks and has just answered a probe; return what was seen."""
    model = POLICIES[policy]()
    expected = checkpoint_of(model)
    adapter = adapter_weights(model, accelerator)[0] if isinstance(model, PeftModel) else {}
    adapter = {name: tensor.clone() for name, tensor in adapter.items()}
    wrapped = WRAPPERS[wrapper](model)
    logprobs = logprobs_of(wrapped, PROMPT, TOKENS)
    before = bits(wrapped)
    _forward(wrapped)
    weights = full_weights(wrapped, accelerator)
    seen: dict[str, Any] = {"untouched": same_bits(bits(wrapped), before)}
    if isinstance(model, PeftModel):
        found, config = adapter_weights(wrapped, accelerator)
        seen["adapter"] = same_bits(found, adapter) and config.inference_mode
    seen["names"] = weights.keys() == expected.keys()
    if accelerator.is_main_process:
        seen["difference"] = max(_differences(weights, expected))
    reference = tiny_policy(tied=policy == "tied")
    if accelerator.is_main_process:
        reference.load_state_dict(weights, strict=policy != "tied")
        ours = logprobs_of(reference, PROMPT, TOKENS)
        seen["logprobs"] = max(abs(a - b) for a, b in zip(ours, logprobs, strict=True))
    return seen


def _rank_main(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)
    seen = {
        f"{wrapper} {policy}": _examine(wrapper, policy, accelerator) for wrapper in WRAPPERS for policy in POLICIES
    }
    (folder / f"rank{accelerator.process_index}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    root = str(Path(__file__).parents[3])
    run = forks.run(
        [sys.executable, "-m", "tests.forked_ranks", __file__, str(folder)],
        environment={**os.environ, "PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": ""},
        timeout=LIMIT_S,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_two_ranks(ranks: list[dict[str, dict[str, Any]]], wrapper: str, policy: str) -> None:
    main, other = (rank[f"{wrapper} {policy}"] for rank in ranks)
    assert main["untouched"]
    assert other["untouched"]
    assert main["names"]
    assert not other["names"]
    assert main["difference"] <= (0 if policy in ("plain", "tied", "saved") else 2e-6)
    assert main.get("adapter", True)
    assert main["logprobs"] < 1e-5


if __name__ == "__main__":
    _rank_main(Path(sys.argv[1]))
