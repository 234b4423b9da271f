"""Tokens per second of a whole training step, beside peers and the machine's own GEMM peak.

Decoder of 4 layers, width 256, 4 heads, 512 tokens, vocabulary 4096, batch 8; forward, backward
and AdamW; fp32 and bf16 autocast. Everything is interleaved in one run.

    python benchmarks/train_step.py [--rounds 9] [--threads 1] [--out results/train_step.json]
"""

from __future__ import annotations

import argparse
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import x_transformers
from torch import Tensor, nn

import normattn
from interleaved import Step, Timing, gemm, interleave, peak_memory, provenance, save
from normattn.models.accounting import flops_per_token, parameter_count

LAYERS, DIM, HEADS, LENGTH, VOCAB, BATCH, HIDDEN = 4, 256, 4, 512, 4096, 8, 688
VARIANTS = ("Baseline", "KNA", "CosA", "QKRMSNorm", "Baseline-logn", "KNA-logn", "CosA-logn")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Llama(nn.Module):
    """transformers' Llama with sdpa, loss over the vocabulary by its own means."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=DIM,
            intermediate_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=True,
            attn_implementation="sdpa",
            use_cache=False,
        )
        self.model = transformers.LlamaForCausalLM(config)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss of ids[:, 1:]."""
        logits = self.model(input_ids=ids[:, :-1]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class XTransformers(nn.Module):
    """x-transformers' decoder with rotary positions, RMSNorm, SwiGLU and its flash path."""

    def __init__(self) -> None:
        super().__init__()
        decoder = x_transformers.Decoder(
            dim=DIM,
            depth=LAYERS,
            heads=HEADS,
            attn_dim_head=DIM // HEADS,
            rotary_pos_emb=True,
            rotary_emb_dim=DIM // HEADS,
            use_rmsnorm=True,
            ff_swish=True,
            ff_glu=True,
            ff_no_bias=True,
            ff_mult=HIDDEN / DIM,
            attn_flash=True,
        )
        self.model = x_transformers.TransformerWrapper(
            num_tokens=VOCAB,
            max_seq_len=LENGTH,
            attn_layers=decoder,
            use_abs_pos_emb=False,
            tie_embedding=True,
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss of ids[:, 1:]."""
        logits = self.model(ids[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Ours(nn.Module):
    """normattn's CausalLM."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.model = normattn.CausalLM(config(variant))

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss of ids[:, 1:]."""
        return self.model.loss(ids).loss


def config(variant: str) -> normattn.CausalLMConfig:
    """The decoder that is measured, with this score."""
    return normattn.CausalLMConfig(
        vocab_size=VOCAB,
        dim=DIM,
        layers=LAYERS,
        heads=HEADS,
        hidden=HIDDEN,
        train_length=LENGTH,
        score=variant,
    )


def build(name: str) -> nn.Module:
    """The model of an entry."""
    torch.manual_seed(0)
    if name == "x-transformers":
        return XTransformers()
    if name == "transformers Llama":
        return Llama()
    return Ours(name)


def make_step(name: str, precision: str) -> Step:
    """Forward, backward and AdamW on one fixed batch."""
    model = build(name)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ids = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(ids)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step


def measure(precision: str, names: list[str], rounds: int, threads: int) -> dict[str, Any]:
    """One precision: all entries and the GEMM, interleaved; memory in processes of their own."""
    product, product_flops = gemm(DTYPES[precision])
    entries = {name: make_step(name, precision) for name in names}
    timings = interleave({**entries, "GEMM": product}, rounds)
    peak = product_flops / timings["GEMM"].median
    flops = flops_per_token(config("Baseline"), LENGTH).training * BATCH * LENGTH
    rows = {}
    for name in names:
        timing: Timing = timings[name]
        rows[name] = {
            "seconds": timing,
            "tokens_per_second": BATCH * LENGTH / timing.median,
            "against_baseline": timing.median / timings["Baseline"].median,
            "share_of_gemm_peak": flops / timing.median / peak,
            "parameters": sum(p.numel() for p in build(name).parameters()),
            "peak_memory_mib": peak_memory(partial(make_step, name, precision), threads),
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
    names = [*VARIANTS, "x-transformers", "transformers Llama"]
    packages = ("torch", "normattn", "x-transformers", "transformers")
    record: dict[str, Any] = {
        "what": __doc__.splitlines()[0] if __doc__ else "",
        "provenance": provenance(packages, arguments.threads),
        "rounds": arguments.rounds,
        "parameters": parameter_count(config("Baseline")),
    }
    for precision in DTYPES:
        record[precision] = measure(precision, names, arguments.rounds, arguments.threads)
    show(record)
    save(arguments.out, record)


if __name__ == "__main__":
    main()
