"""The overhead of `normattn.attention`, on tensors too small to hide it.

    OMP_NUM_THREADS=1 python benchmarks/overhead.py

Times B1 H4 T64 D32 in float32, one thread, causal, without gradients: hand-written RoPE with
`scaled_dot_product_attention`, and the same by `attention` with a `Score`, a `ScoreSpec` and a
name. Variants are interleaved in each round, so that other load affects all alike; times are
medians over rounds. It also counts the Python calls between `SelfAttention.forward` and
`scaled_dot_product_attention`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from types import FrameType

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from normattn import Attention, Score, ScoreSpec, attention

BATCH, HEADS, TOKENS, SIZE = 1, 4, 64, 32


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions as models usually write them."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def by_hand(device: str = "cpu") -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """RoPE with precomputed tables, then torch's kernel."""
    theta = 10000.0 ** (-torch.arange(SIZE // 2, dtype=torch.float64) / (SIZE // 2))
    angle = torch.arange(TOKENS, dtype=torch.float64)[:, None] * theta
    cos, sin = (torch.cat((x, x), -1).float().to(device) for x in (angle.cos(), angle.sin()))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    return run


@torch.no_grad()
def times(rounds: int, calls: int, device: str = "cpu") -> dict[str, float]:
    """Microseconds per call of each variant; a GPU is synchronised after each round."""
    shape = (BATCH, HEADS, TOKENS, SIZE)
    drawn = (torch.randn(shape, generator=torch.Generator().manual_seed(n)) for n in range(3))
    q, k, v = (x.to(device) for x in drawn)
    module, spec = Score("Baseline", HEADS, SIZE).to(device), ScoreSpec.parse("Baseline")
    hand = by_hand(device)
    variants: dict[str, Callable[[], Tensor]] = {
        "RoPE + SDPA by hand": lambda: hand(q, k, v),
        "attention, Score": lambda: attention(q, k, v, module),
        "attention, ScoreSpec": lambda: attention(q, k, v, spec),
        "attention, name": lambda: attention(q, k, v, "Baseline"),
    }
    for variant in variants.values():
        torch.testing.assert_close(variant(), hand(q, k, v), rtol=1e-5, atol=1e-5)
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            start = time.perf_counter()
            for _ in range(calls):
                variant()
            if device != "cpu":
                torch.cuda.synchronize()
            samples[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: statistics.median(values) for name, values in samples.items()}


def python_calls(learning: bool) -> int:
    """Calls of Python functions between `SelfAttention.forward` and torch's kernel."""
    layer, x = Attention(HEADS * SIZE, HEADS), torch.randn(BATCH, TOKENS, HEADS * SIZE)
    count, there = 0, False

    def watch(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count, there
        name = getattr(argument, "__name__", "")
        there = there or (event == "c_call" and name == "scaled_dot_product_attention")
        count += event == "call" and not there

    with torch.set_grad_enabled(learning):
        layer(x)
        sys.setprofile(watch)
        try:
            layer.forward(x)
        finally:
            sys.setprofile(None)
    return count - 1  # `forward` itself


def main() -> None:
    """Print times, ratios and counts, or write them as JSON."""
    parser = argparse.ArgumentParser(description="the overhead of normattn.attention")
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--calls", type=int, default=20, help="calls of each variant in a round")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    microseconds = times(args.rounds, args.calls, args.device)
    first = next(iter(microseconds.values()))
    calls = {"without gradients": python_calls(False), "with gradients": python_calls(True)}
    if args.json:
        print(json.dumps({"microseconds": microseconds, "python_calls": calls}))
        return
    for name, value in microseconds.items():
        print(f"{name:24}{value:8.1f} µs{value / first:8.2f} ×")
    for name, value in calls.items():
        print(f"Python calls {name:20}{value:4}")


if __name__ == "__main__":
    main()
