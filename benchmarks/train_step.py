"""Tokens per second of a whole training step, beside peers and the machine's own GEMM peak.

Decoder of 4 layers, width 256, 4 heads, 512 tokens, vocabulary 4096, batch 8; forward, backward
and AdamW; fp32 and bf16 autocast. Everything is interleaved in one run. `normattn bench train-step`
measures the ratios alone and keeps what it has measured.

    python benchmarks/train_step.py [--rounds 9] [--threads 1] [--out results/train_step.json]
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch

from normattn.atomic import write_json
from normattn.bench.machine import Machine, provenance
from normattn.bench.memory import peak_memory
from normattn.bench.models import LLAMA, X_TRANSFORMERS, ModelSize, TrainingStep
from normattn.models.accounting import parameter_count
from normattn.runs.timing import interleave

SIZE = ModelSize()
VARIANTS = ("Baseline", "KNA", "CosA", "QKRMSNorm", "Baseline-logn", "KNA-logn", "CosA-logn")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PACKAGES = ("torch", "normattn", "x-transformers", "transformers")


def entries(half: bool) -> dict[str, TrainingStep]:
    """Every variant of ours, and both peers."""
    ours = {name: TrainingStep("normattn", name, half, SIZE) for name in VARIANTS}
    return {
        **ours,
        "x-transformers": TrainingStep(X_TRANSFORMERS, half=half, size=SIZE),
        "transformers Llama": TrainingStep(LLAMA, half=half, size=SIZE),
    }


def measure(precision: str, rounds: int, threads: int) -> dict[str, Any]:
    """One precision: all entries and the GEMM, interleaved; memory in processes of their own."""
    measured = entries(precision == "bf16")
    machine = Machine(DTYPES[precision])
    steps = {name: entry.build() for name, entry in measured.items()}
    timings = interleave({**steps, **machine.entries()}, rounds)
    peak = machine.reached(timings).flops
    tokens, flops = SIZE.batch * SIZE.length, measured["Baseline"].work().flops
    rows = {}
    for name, entry in measured.items():
        timing = timings[name]
        rows[name] = {
            "seconds": timing.summary(),
            "tokens_per_second": tokens / timing.median,
            "against_baseline": timing.median / timings["Baseline"].median,
            "share_of_gemm_peak": flops / timing.median / peak,
            "parameters": sum(p.numel() for p in entry.model().parameters()),
            "peak_memory_mib": peak_memory(entry.build, threads, entry.small().build),
        }
    return {"gemm_gflops": peak / 1e9, "flops_per_step": flops, "rows": rows}


def show(record: dict[str, Any]) -> None:
    """Print the record as a table."""
    for precision in DTYPES:
        part = record[precision]
        print(f"\n{precision}: GEMM {part['gemm_gflops']:.0f} GFLOP/s")
        print(f"{'':20}{'tokens/s':>10}{'× Baseline':>12}{'of peak':>9}{'MiB':>8}{'params':>11}")
        for name, row in part["rows"].items():
            print(
                f"{name:20}{row['tokens_per_second']:10.0f}{row['against_baseline']:12.3f}"
                f"{row['share_of_gemm_peak']:9.1%}{row['peak_memory_mib']:8.0f}"
                f"{row['parameters']:11,d}"
            )


def main() -> None:
    """Measure both precisions and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/train_step.json"))
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(arguments.threads)
    record: dict[str, Any] = {
        "what": __doc__.splitlines()[0] if __doc__ else "",
        "provenance": provenance(PACKAGES, arguments.threads),
        "rounds": arguments.rounds,
        "parameters": parameter_count(SIZE.config("Baseline")),
    }
    for precision in DTYPES:
        record[precision] = measure(precision, arguments.rounds, arguments.threads)
    show(record)
    write_json(arguments.out, record)


if __name__ == "__main__":
    main()
