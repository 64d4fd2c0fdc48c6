"""How much memory a training run needs, from the model's config alone: estimates, and where each figure comes from.

Nothing is loaded: `shape_of` builds the model on torch's meta device, which has shapes and no storage, in about a
second for any size. Everything after that is arithmetic on numbers.

The formulas follow what TRL 1.16, transformers 5 and torch 2.13 do, read in their source;
`benchmarks/memory_estimate.py` measures both sides. An estimate is for the longest rows that the run allows: most
steps need less.

- **Weights, gradients, optimizer**: parameters times bytes. Adam keeps two numbers per trained parameter, in the
  parameter's own dtype (Kingma and Ba, 2015). QLoRA stores the linear layers in 4 bits with one float32 scale per 64
  weights (Dettmers et al., 2023). Adapters are float32; on a quantised base TRL makes them bfloat16.
- **Activations**: what one decoder layer keeps for its backward pass, per token, as counted in transformers' Llama and
  Qwen layers. Attention through torch's SDPA keeps no matrix of scores, so the term in the square of the length that
  Korthikanti et al. (2022) have is only the mask's. With gradient checkpointing each layer keeps its input, and one
  layer at a time the rest.
- **Logits**: TRL's fused head never holds rows x positions x vocabulary, and is given the trained positions alone, at
  most a whole completion. It computes tiles of at most 4,096 positions and 32,768 words, 8,192 on a CPU, turns
  gradients into float32, and, when the head is trained, collects its gradient in float32.
- **Generation** in the trainer's process: the key-value cache of all episodes in flight, and one pass over their whole
  context, since each turn begins by reading it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from peft import PeftConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from trainer.training.scoring import TILE_WORDS, TILE_WORDS_CPU

GIB = 2**30

RUNTIME = GIB
"""Python with its libraries on a CPU; CUDA's context, the libraries' workspaces and compiled kernels on a GPU."""
FRAGMENTATION = 0.05
"""What torch's allocator holds and cannot use, as a share of what is in use."""

TILE_TOKENS = 4_096
"""Positions of a tile of logits; its words are told to TRL's head in `trainer.training.scoring`."""
CPU_TILES = 6
"""Without Triton, the head's backward pass holds this many float32 tiles at once."""

FLOAT32 = 4
QUANTIZED = {4: 0.5 + 4 / 64, 8: 1.0}
"""Bytes of a weight, by its number of bits."""

OPTIMIZER_BYTES = {
    "sgd": 0.0,
    "adafactor": 0.05,  # a row and a column per matrix
    "paged": 0.0,  # on the host
    "8bit": 2.06,  # two bytes, and a float32 scale per 256 of each
    "bnb": 2.06,
    "torchao": 2.06,
}
"""Bytes of state per trained parameter, by a word in the optimizer's name; all others keep two numbers."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a decoder's config says; widths are in numbers per token."""

    parameters: int
    quantizable: int
    """Parameters of linear layers, the head apart."""
    trained: int
    layers: int
    hidden: int
    intermediate: int
    queries: int
    """Heads x size of a head."""
    keys: int
    """Key-value heads x size of a head; values are as many."""
    vocabulary: int
    normed_heads: bool = False
    """Queries and keys are normalised, as in Qwen3."""
    adapted: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """What a run asks of one device: numbers of rows, lengths in tokens, sizes in bytes."""

    rows: int
    prompt: int
    completion: int
    weight_bytes: int = FLOAT32
    quantized_bits: int | None = None
    autocast: bool = False
    """Layers compute in two bytes, whatever the weights are stored in."""
    gradient_checkpointing: bool = False
    optimizer: str = "adamw_torch"
    generating: int = 0
    """Episodes that generate at once in this process; 0 when servers generate."""
    reference: bool = False
    """A second copy of the model, for --beta on all weights."""
    on_gpu: bool = True
    server_bytes: float = 0.0
    """What a vLLM server on the same device takes."""

    @property
    def width(self) -> int:
        """Tokens of the longest row."""
        return self.prompt + self.completion

    @property
    def compute_bytes(self) -> int:
        """Size of a number in the layers."""
        return 2 if self.autocast else self.weight_bytes


@dataclass(frozen=True, slots=True)
class Part:
    """A share of the memory, and how it was worked out."""

    name: str
    bytes: float
    how: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a device holds: `standing` parts throughout, and the larger of `training` and `generation` on top."""

    standing: tuple[Part, ...]
    training: tuple[Part, ...]
    generation: tuple[Part, ...]
    server: float = 0.0
    """What a vLLM server takes for itself."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """Everything, in the order in which it is explained."""
        return self.standing + self.training + self.generation

    @property
    def total(self) -> float:
        """Bytes at the peak."""
        peak = max(_sum(self.training), _sum(self.generation))
        return (_sum(self.standing) + peak) * (1 + FRAGMENTATION) + self.server


def shape_of(config: PretrainedConfig, adapter: PeftConfig | None, *, trust_remote_code: bool = False) -> ModelShape:
    """Count a model's parameters without making it. Raises ValueError where the config is no causal language model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        parameters, quantizable = model.num_parameters(), _quantizable(model)
        if adapter is not None:
            model = get_peft_model(model, adapter)
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // heads
    return ModelShape(
        parameters=parameters,
        quantizable=quantizable,
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        queries=heads * head,
        keys=(getattr(text, "num_key_value_heads", None) or heads) * head,
        vocabulary=text.vocab_size,
        normed_heads=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        adapted=adapter is not None,
    )


def shapes_of(config: PretrainedConfig, *, trust_remote_code: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors by their names, without making it. Raises ValueError as `shape_of`."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def estimate(shape: ModelShape, load: Load) -> Estimate:
    """What a run of this load needs on one device, at its longest rows."""
    training = (
        Part("activations", activations(shape, load), _how_activations(shape, load)),
        Part("logits", logits(shape, load), "tiles of TRL's fused head, and the gradients that it collects in float32"),
    )
    generation: tuple[Part, ...] = ()
    if load.generating:
        cache = 2 * shape.layers * shape.keys * load.weight_bytes * load.generating * load.width
        pass_bytes = load.weight_bytes * (3 * shape.intermediate + 3 * shape.queries) + 2 * FLOAT32 * shape.hidden
        choice = load.generating * shape.vocabulary * 28  # logits, their softmax and its sum, float32 and float64
        generation = (
            Part(
                "key-value cache", cache, f"{load.generating} episodes x {load.width:,} tokens x {shape.layers} layers"
            ),
            Part("generation", load.generating * load.width * pass_bytes + choice, "one layer over all contexts"),
        )
    return Estimate(_standing(shape, load), training, generation, load.server_bytes)


def optimizer_bytes(name: str, weight_bytes: float) -> float:
    """Bytes of an optimizer's state for each trained parameter of so many bytes."""
    return next((size for word, size in OPTIMIZER_BYTES.items() if word in name), 2.0 * weight_bytes)


def activations(shape: ModelShape, load: Load) -> float:
    """Bytes that the layers keep for the backward pass of one micro-batch."""
    tokens = load.rows * load.width
    residual = load.weight_bytes
    mask = load.rows * load.width**2 * (1 + load.compute_bytes)
    kept = shape.layers * _layer(shape, load)
    if load.gradient_checkpointing:
        kept = shape.layers * residual * shape.hidden + 2 * _layer(shape, load)
    ends = (FLOAT32 + 2 * residual) * shape.hidden
    return float(tokens * (kept + ends) + mask)


def logits(shape: ModelShape, load: Load) -> float:
    """Bytes of the head's pass and its backward pass."""
    positions = load.rows * load.completion
    tile = min(positions, TILE_TOKENS) * min(shape.vocabulary, TILE_WORDS if load.on_gpu else TILE_WORDS_CPU)
    tiles = tile * (load.compute_bytes if load.on_gpu else load.compute_bytes + CPU_TILES * FLOAT32)
    states = positions * shape.hidden * (FLOAT32 + 2 * load.compute_bytes)
    gradient = 0 if shape.adapted else shape.vocabulary * shape.hidden * FLOAT32
    return float(tiles + states + gradient)


def _standing(shape: ModelShape, load: Load) -> tuple[Part, ...]:
    weights = float(shape.parameters * load.weight_bytes)
    how = f"{shape.parameters / 1e6:,.1f} M parameters x {load.weight_bytes} bytes"
    if load.quantized_bits is not None:
        weights -= shape.quantizable * (load.weight_bytes - QUANTIZED[load.quantized_bits])
        how = (
            f"{shape.quantizable / 1e6:,.1f} M of them in {load.quantized_bits} bits, the others x {load.weight_bytes}"
        )
    trained_bytes = load.weight_bytes
    if shape.adapted:
        trained_bytes = FLOAT32 if load.quantized_bits is None else 2
        weights += shape.trained * trained_bytes
    state = optimizer_bytes(load.optimizer, trained_bytes)
    trained = f"{shape.trained / 1e6:,.1f} M trained parameters"
    parts = [
        Part("runtime", RUNTIME, "libraries, and the device's context"),
        Part("weights", weights, how),
        Part("gradients", shape.trained * trained_bytes, f"{trained} x {trained_bytes} bytes"),
        Part("optimizer", shape.trained * state, f"{trained} x {state:g} bytes ({load.optimizer})"),
    ]
    if load.autocast and load.weight_bytes == FLOAT32 and load.quantized_bits is None:
        parts.append(Part("autocast", shape.parameters * 2, "the weights in two bytes, while a pass runs"))
    if load.reference:
        parts.append(Part("reference", shape.parameters * load.weight_bytes, "the policy before training, for --beta"))
    return tuple(parts)


def _layer(shape: ModelShape, load: Load) -> float:
    """Bytes per token that one layer keeps.

    A norm keeps its input in float32, the normalised state when its weight is trained, and what follows keeps its
    output. Attention keeps queries, repeated keys and values, its output, and that once more in the next layer's
    order; where weights are float32 and layers compute in less, also queries and keys before they are rounded. The
    gated layer keeps both halves, the activated one and the product. Adapters are float32 on a base that need not be:
    each converts its input for itself, and autocast rounds it again.
    """
    compute, residual = load.compute_bytes, load.weight_bytes
    trained = 0 if shape.adapted else 1
    norms = 2 * (FLOAT32 + trained * residual + compute) * shape.hidden
    heads = (FLOAT32 + trained * compute) * (shape.queries + shape.keys) if shape.normed_heads else 0
    attention = 5 * compute * shape.queries
    rounded = FLOAT32 * (shape.queries + shape.keys) if residual > compute else 0
    gated = 4 * compute * shape.intermediate
    adapters = 0
    if shape.adapted and load.autocast:
        adapters = compute * 3 * shape.hidden
    elif shape.adapted and compute < FLOAT32:
        adapters = FLOAT32 * (3 * shape.hidden + shape.queries + shape.intermediate)
    return float(norms + heads + attention + rounded + gated + adapters)


def _how_activations(shape: ModelShape, load: Load) -> str:
    kept = "each layer's input" if load.gradient_checkpointing else f"{_layer(shape, load) / 1e3:,.0f} kB a layer"
    return f"{load.rows} rows x {load.width:,} tokens x {shape.layers} layers, {kept}"


def _quantizable(model: nn.Module) -> int:
    """Parameters that bitsandbytes would replace: of linear layers, without the head."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    layers = (module for module in model.modules() if isinstance(module, nn.Linear) and module is not head)
    return sum(layer.weight.numel() for layer in layers)


def _sum(parts: Sequence[Part]) -> float:
    return sum(part.bytes for part in parts)
