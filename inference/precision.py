"""Whether a CPU computes faster in bfloat16 or in float32, measured with one matrix product of each.

What the hardware says of itself does not tell: with AVX-512's bfloat16 instructions, and no AMX, products in bfloat16
take twice as long as in float32. The launcher runs this file in vLLM's interpreter, so it needs torch alone, and only
where it measures: `python precision.py [WIDTH]` prints the two speeds as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from functools import cache

ROWS = 64
"""Of a product: as many as episodes that are decoded together."""
WIDEST = 1_024
"""The width where the model's is not known, and the largest that is measured: a wider one ranks the two alike."""
REPETITIONS = 5
CLEARLY = 1.25
"""How many times faster bfloat16, which has eight bits, has to be: a tie goes to float32."""


@dataclass(frozen=True, slots=True)
class Precision:
    """What one core computes in each dtype, in GFLOP per second."""

    bfloat16: float
    float32: float

    @property
    def dtype(self) -> str:
        """The faster one."""
        return "bfloat16" if self.bfloat16 > CLEARLY * self.float32 else "float32"

    def __str__(self) -> str:
        return f"a core computes {self.bfloat16:,.0f} GFLOP/s in bfloat16, {self.float32:,.0f} in float32"


@cache
def measure_precision(width: int | None) -> Precision:
    """Measure on this CPU, for a model with hidden states of `width`; takes up to a fifth of a second."""
    import torch

    width = min(width or WIDEST, WIDEST)
    fastest = dict.fromkeys(("bfloat16", "float32"), float("inf"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads would wait for each other where other processes have the cores
    try:
        # Of ones: random numbers would move the generator that training seeds.
        operands = {
            dtype: [torch.ones(n, width, dtype=getattr(torch, dtype)) for n in (ROWS, width)] for dtype in fastest
        }
        for _ in range(REPETITIONS):
            for dtype, (rows, weights) in operands.items():
                began = time.perf_counter()
                torch.nn.functional.linear(rows, weights)
                fastest[dtype] = min(fastest[dtype], time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    return Precision(**{dtype: 2e-9 * ROWS * width**2 / seconds for dtype, seconds in fastest.items()})


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(measure_precision(int(sys.argv[1]) if sys.argv[1:] else None))))
