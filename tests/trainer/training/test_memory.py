"""The memory estimate: counted parameters, layers' activations against what autograd keeps, and the arithmetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from trainer.training.memory import GIB, Load, ModelShape, activations, estimate, logits, shape_of

MODELS = Path(__file__).parent / "models"
SHAPE = ModelShape(
    parameters=1_000_000, quantizable=800_000, trained=1_000_000, layers=4, hidden=64, intermediate=256, queries=64,
    keys=32, vocabulary=1_000,
)  # fmt: skip
ADAPTED = replace(SHAPE, trained=10_000, adapted=True)
LOAD = Load(rows=4, prompt=100, completion=400)
ROWS, WIDTH = 4, 96


@pytest.mark.parametrize(
    ("name", "parameters", "adapter"),
    [
        ("SmolLM2-135M-Instruct", 134_515_008, 9_768_960),
        ("Qwen2.5-0.5B-Instruct", 494_032_768, 17_596_416),
        ("Qwen3-0.6B", 596_049_920, 20_185_088),
        ("Qwen2.5-Coder-1.5B-Instruct", 1_543_714_304, 36_929_536),
        ("Qwen3-1.7B", 1_720_574_976, 34_865_152),
    ],
)
def test_parameters_are_those_that_the_model_cards_state(name: str, parameters: int, adapter: int) -> None:
    config = AutoConfig.from_pretrained(MODELS / f"{name}.json")
    assert shape_of(config, None).parameters == shape_of(config, None).trained == parameters
    adapted = shape_of(config, LoraConfig(r=32, target_modules="all-linear"))
    assert (adapted.parameters, adapted.trained) == (parameters, adapter)


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


def kept(config: PretrainedConfig, adapter: LoraConfig | None, load: Load) -> int:
    """Bytes that autograd keeps of the decoder's pass over one micro-batch, parameters and their copies apart."""
    dtype = torch.float32 if load.weight_bytes == 4 else torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    backbone = model.base_model
    if load.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if adapter is not None:
        model = get_peft_model(model, adapter)
        if load.gradient_checkpointing:
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
        torch.autocast("cpu", torch.bfloat16, enabled=load.autocast),
    ):
        output = backbone(input_ids=ids, attention_mask=mask, use_cache=False)
    assert output.last_hidden_state.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("kind", "weight_bytes", "autocast", "checkpointing"),
    [
        (Qwen3Config, 4, False, False),
        (Qwen3Config, 4, True, False),
        (Qwen3Config, 2, True, False),
        (Qwen3Config, 2, False, False),
        (Qwen3Config, 4, True, True),
        (LlamaConfig, 4, True, False),
        (LlamaConfig, 2, True, True),
    ],
)
def test_a_layer_keeps_what_the_formula_says(
    kind: type[PretrainedConfig], lora: bool, weight_bytes: int, autocast: bool, checkpointing: bool
) -> None:
    adapter = LoraConfig(r=8, target_modules="all-linear") if lora else None
    load = Load(ROWS, WIDTH // 2, WIDTH // 2, weight_bytes, None, autocast, checkpointing)
    few, many = small(kind, 1), small(kind, 4)
    measured = kept(many, adapter, load) - kept(few, adapter, load)
    expected = activations(shape_of(many, adapter), load) - activations(shape_of(few, adapter), load)
    assert expected == pytest.approx(measured, rel=0.12)


def part(load: Load, name: str, shape: ModelShape = SHAPE) -> float:
    return sum(part.bytes for part in estimate(shape, load).parts if part.name == name)


def test_what_stands_in_memory_throughout() -> None:
    assert (part(LOAD, "weights"), part(LOAD, "gradients"), part(LOAD, "optimizer")) == (4e6, 4e6, 8e6)
    half = replace(LOAD, weight_bytes=2)
    assert (part(half, "weights"), part(half, "gradients"), part(half, "optimizer")) == (2e6, 2e6, 4e6)
    assert part(replace(LOAD, autocast=True), "autocast") == 2e6
    assert part(replace(LOAD, reference=True), "reference") == 4e6
    assert estimate(SHAPE, replace(LOAD, server_bytes=5e9)).total == estimate(SHAPE, LOAD).total + 5e9


def test_an_adapter_is_float32_and_bfloat16_on_a_quantised_base() -> None:
    half, quantised = replace(LOAD, weight_bytes=2), replace(LOAD, weight_bytes=2, quantized_bits=4)
    assert part(half, "weights", ADAPTED) == 2e6 + 40_000
    assert (part(half, "gradients", ADAPTED), part(half, "optimizer", ADAPTED)) == (40_000, 80_000)
    assert part(quantised, "weights", ADAPTED) == pytest.approx(800_000 * 0.5625 + 200_000 * 2 + 20_000)
    assert (part(quantised, "gradients", ADAPTED), part(quantised, "optimizer", ADAPTED)) == (20_000, 40_000)


@pytest.mark.parametrize(
    ("optimizer", "size"),
    [("adamw_torch_fused", 8.0), ("adamw_8bit", 2.06), ("paged_adamw_8bit", 0.0), ("sgd", 0.0), ("lion_32bit", 8.0)],
)
def test_the_optimizers_state(optimizer: str, size: float) -> None:
    assert part(replace(LOAD, optimizer=optimizer), "optimizer") == pytest.approx(size * 1e6)


def test_the_head_is_computed_in_tiles_however_many_rows_there_are() -> None:
    wide = replace(SHAPE, vocabulary=150_000, trained=0, adapted=True)
    tile = 4_096 * 32_768
    one, many = (logits(wide, Load(rows, 0, 4_096, 2)) for rows in (1, 64))
    assert one == tile * 2 + 4_096 * 64 * 8
    assert many - one == 63 * 4_096 * 64 * 8, "states alone grow with the rows"
    assert logits(replace(wide, adapted=False), Load(1, 0, 4_096, 2)) - one == 150_000 * 64 * 4
    on_cpu = logits(wide, Load(1, 0, 4_096, 2, on_gpu=False))
    assert on_cpu - one == 4_096 * 8_192 * (2 + 6 * 4) - tile * 2, "smaller tiles, more of them"
    assert logits(wide, Load(1, 900, 4_096, 2, on_gpu=False)) == on_cpu, "prompts are not scored"


def test_training_and_generation_take_turns() -> None:
    generating = replace(LOAD, generating=32)
    cache = 2 * 4 * 32 * 4 * 32 * 500
    assert part(generating, "key-value cache") == cache
    short, long = estimate(SHAPE, generating), estimate(SHAPE, LOAD)
    taking_turns = max(sum(p.bytes for p in short.training), sum(p.bytes for p in short.generation))
    assert short.total == pytest.approx((sum(p.bytes for p in short.standing) + taking_turns) * 1.05)
    assert long.generation == ()
    assert GIB < long.total < short.total


def test_fewer_rows_and_checkpointing_take_less() -> None:
    assert activations(SHAPE, replace(LOAD, rows=2)) * 2 == activations(SHAPE, LOAD)
    assert activations(SHAPE, replace(LOAD, gradient_checkpointing=True)) < activations(SHAPE, LOAD)
    assert activations(SHAPE, replace(LOAD, autocast=True)) < activations(SHAPE, LOAD)
