"""Policies by name: a checkpoint's folder, or a model on the Hub."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl import ModelConfig

from env_server.errors import SQLEnvError


class PolicyError(SQLEnvError):
    """A policy cannot be loaded: no such folder or model, or not a causal language model with a tokenizer."""


def load_tokenizer(model_config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the policy's tokenizer. Raises PolicyError."""
    name = model_config.model_name_or_path
    try:
        return AutoTokenizer.from_pretrained(name, revision=model_config.model_revision)
    except (OSError, ValueError) as error:
        raise PolicyError(f"the policy {name!r} cannot be loaded: {' '.join(str(error).split())}") from error


def load_policy(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer from a folder or the Hub, on the GPU when there is one (then in bfloat16).

    Raises PolicyError.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError) as error:
        where = "is not a checkpoint" if Path(name).is_dir() else "is no folder here, and no model on the Hub"
        raise PolicyError(f"the policy {name!r} {where}: {' '.join(str(error).split())}") from error
    return model.to(device), tokenizer
