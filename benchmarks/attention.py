"""Tiles (`backend="chunked"`) against the stock kernel (`backend="fused"`), causal, one run.

4 heads of 64, batch × tokens = 4096; seconds of forward, and of forward and backward.

    python benchmarks/attention.py [--rounds 9] [--threads 1] [--out results/attention.json]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from normattn import attention
from normattn.atomic import write_json
from normattn.bench.machine import provenance
from normattn.runs.timing import Step, interleave

HEADS, SIZE, TOKENS = 4, 64, 4096
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make(backend: str, length: int, dtype: torch.dtype, backward: bool) -> Step:
    """One call on fixed tensors, from the fused projection's layout to the output's."""
    shape = (TOKENS // length, length, 3 * HEADS * SIZE)
    qkv = torch.randn(shape).to(dtype).requires_grad_(backward)
    grad = torch.randn(*shape[:2], HEADS * SIZE).to(dtype)

    def step() -> None:
        heads = qkv.unflatten(-1, (-1, SIZE)).transpose(1, 2)
        q, k, v = heads.split((HEADS, HEADS, HEADS), 1)
        out = attention(q, k, v, "Baseline", backend=backend).transpose(1, 2).flatten(2)
        if backward:
            out.backward(grad)
            qkv.grad = None

    return step


def measure(rounds: int) -> list[dict[str, Any]]:
    """A row per precision, length and pass."""
    rows = []
    for precision, dtype in DTYPES.items():
        for length in LENGTHS:
            for backward in (False, True):
                names = ("fused", "chunked")
                steps = {name: make(name, length, dtype, backward) for name in names}
                timings = interleave(steps, rounds)
                row = {
                    "precision": precision,
                    "length": length,
                    "pass": "f+b" if backward else "f",
                    "ratio": timings["chunked"].median / timings["fused"].median,
                    **{name: timing.summary() for name, timing in timings.items()},
                }
                rows.append(row)
                print(f"{precision} {length:5} {row['pass']:4} {row['ratio']:.2f}", flush=True)
    return rows


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/attention.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    record = {
        "what": __doc__.splitlines()[0] if __doc__ else "",
        "provenance": provenance(("torch", "normattn"), arguments.threads),
        "rounds": arguments.rounds,
        "rows": measure(arguments.rounds),
    }
    write_json(arguments.out, record)


if __name__ == "__main__":
    main()
