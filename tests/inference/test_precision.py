"""Which dtype a CPU is faster in: the choice, and the measurement as the launcher makes it, in another interpreter."""

from __future__ import annotations

import platform
import sys

import pytest
import torch

from inference.launch.process import see_precision
from inference.precision import Precision, measure_precision


@pytest.mark.parametrize(
    ("bfloat16", "float32", "expected"),
    [(190, 30, "bfloat16"), (4.3, 30, "float32"), (95, 149, "float32"), (31, 30, "float32")],
)
def test_float32_unless_bfloat16_is_clearly_faster(bfloat16: float, float32: float, expected: str) -> None:
    assert Precision(bfloat16, float32).dtype == expected


@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN's variable is for x86")
@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE_BF16"])
def test_without_amx_a_cpu_is_faster_in_float32(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
    assert see_precision(sys.executable, 576).dtype == "float32"


@pytest.mark.skipif(not torch.cpu.get_capabilities().get("amx_bf16"), reason="this CPU has no AMX")
def test_with_amx_it_is_faster_in_bfloat16_unless_the_model_is_tiny() -> None:
    assert see_precision(sys.executable, 576).dtype == "bfloat16"
    assert see_precision(sys.executable, 128).dtype == "float32"


def test_measuring_leaves_random_numbers_and_threads_as_they_were() -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    measured = measure_precision.__wrapped__(64)
    assert min(measured.bfloat16, measured.float32) > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
