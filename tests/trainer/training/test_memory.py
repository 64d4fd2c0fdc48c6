"""Memory: the estimate's activations against what autograd keeps, its arithmetic, and the probe that a GPU runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, ModelConfig

from tests.integration.training import save_policy, surroundings_in
from trainer.models import load_tokenizer
from trainer.training.dry_run import train_longest
from trainer.training.memory import estimate

MODELS = Path(__file__).parent / "models"
ROWS, WIDTH = 4, 96
LORA = LoraConfig(r=8, target_modules="all-linear")


def grpo(**flags: Any) -> GRPOConfig:
    return GRPOConfig(
        **{
            "per_device_train_batch_size": ROWS,
            "num_generations": 2,
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            **flags,
        }
    )


def parts(
    config: PretrainedConfig,
    adapter: LoraConfig | None = None,
    generating: int = 0,
    dtype: str = "float32",
    **flags: Any,
) -> dict[str, float]:
    model = ModelConfig(dtype=dtype, load_in_4bit=flags.pop("load_in_4bit", False))
    return estimate(
        config, adapter, grpo(**flags), model, prompt=WIDTH // 2, width=WIDTH, generating=generating, on_gpu=False
    )


def small(kind: type[PretrainedConfig], layers: int) -> PretrainedConfig:
    sizes: dict[str, Any] = {"head_dim": 32} if kind is Qwen3Config else {}
    return kind(
        vocab_size=64,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=WIDTH,
        **sizes,
    )


def kept(config: PretrainedConfig, adapter: LoraConfig | None, dtype: str, autocast: bool, checkpointing: bool) -> int:
    """Bytes that autograd keeps of the decoder's pass over one micro-batch, parameters and their copies apart."""
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).train()
    backbone = model.base_model
    if checkpointing:
        model.gradient_checkpointing_enable()
    if adapter is not None:
        model = get_peft_model(model, adapter)
        if checkpointing:
            model.enable_input_require_grads()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shapes = {parameter.numel() for parameter in model.parameters() if parameter.dim() == 2}
    storages: dict[int, int] = {}
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and not (tensor.dim() == 2 and tensor.numel() in shapes):
            storages[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    ids = torch.ones(ROWS, WIDTH, dtype=torch.long)
    mask = ids.clone()
    mask[0, :5] = 0  # as TRL pads: attention then gets a mask
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        output = backbone(input_ids=ids, attention_mask=mask, use_cache=False)
    assert output.last_hidden_state.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("kind", "dtype", "autocast", "checkpointing"),
    [
        (Qwen3Config, "float32", False, False),
        (Qwen3Config, "bfloat16", True, True),
        (LlamaConfig, "float32", True, False),
    ],
)
def test_a_layer_keeps_what_the_estimate_says(
    kind: type[PretrainedConfig], adapter: LoraConfig | None, dtype: str, autocast: bool, checkpointing: bool
) -> None:
    few, many = small(kind, 1), small(kind, 4)
    measured = kept(many, adapter, dtype, autocast, checkpointing) - kept(few, adapter, dtype, autocast, checkpointing)
    flags: dict[str, Any] = {"dtype": dtype, "bf16": autocast, "gradient_checkpointing": checkpointing}
    more, less = (parts(config, adapter, **flags)["activations"] for config in (many, few))
    assert more - less == pytest.approx(measured, rel=0.12)


def test_weights_gradients_and_optimizer_follow_from_the_parameters() -> None:
    config = AutoConfig.from_pretrained(MODELS / "Qwen3-0.6B.json")
    count, trained = 596_049_920, 20_185_088
    adapter = LoraConfig(r=32, target_modules="all-linear")
    full, half = parts(config), parts(config, dtype="bfloat16")
    assert [full[name] for name in ("weights", "gradients", "optimizer")] == [4 * count, 4 * count, 8 * count]
    assert [half[name] for name in ("weights", "gradients", "optimizer")] == [2 * count, 2 * count, 4 * count]
    assert parts(config, bf16=True)["weights"] == 6 * count
    assert parts(config, beta=0.1)["weights"] == 8 * count
    lora = parts(config, adapter, dtype="bfloat16", beta=0.1)
    assert [lora[name] for name in ("weights", "gradients", "optimizer")] == [
        2 * count + 4 * trained, 4 * trained, 8 * trained
    ]  # fmt: skip
    quantized = parts(config, adapter, dtype="bfloat16", load_in_4bit=True)
    assert 0.5625 * count < quantized["weights"] < 1.05 * count
    assert quantized["gradients"] == 2 * trained


@pytest.fixture
def policy(random_policy: Callable[..., Qwen3ForCausalLM], tmp_path: Path) -> ModelConfig:
    folder = save_policy(random_policy, ["How many pets are there"], tmp_path / "policy")
    return ModelConfig(model_name_or_path=str(folder), dtype="float32")


@pytest.mark.parametrize("lora", [False, True])
def test_the_probe_trains_the_longest_rows_and_leaves_the_run_alone(
    policy: ModelConfig, lora: bool, tmp_path: Path
) -> None:
    policy.use_peft, policy.lora_target_modules = lora, ["q_proj", "v_proj"] if lora else None
    args = grpo(output_dir=str(tmp_path / "run"), num_generations=4, gradient_accumulation_steps=8, max_steps=50)
    before = args.to_dict()
    with surroundings_in(tmp_path / "cache"):
        train_longest(args, policy, load_tokenizer(policy), 6, 24, 2)
    assert args.to_dict() == before
    assert not (tmp_path / "run").exists()
