"""One attention, forward or forward and backward, compared with torch's own kernels.

Legend: B batch, H heads, T tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import normattn
from benchmarks.harness import DTYPES, Case, Options
from normattn.lab.runs.timing import Step

WINDOW = 512
ABSORBED = (
    "Baseline",
    "KNA",
    "CosA@512",
    "QKRMSNorm",
    "Baseline-logn@512",
    "Baseline-YaRN(factor=8)@512",
)


@dataclass(frozen=True)
class Shape:
    """Shape, precision and pass of one causal attention."""

    length: int
    dtype: torch.dtype
    backward: bool
    device: str
    batch: int = 1
    heads: int = 4
    size: int = 64

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Normal q, k and v (B, H, T, D), the same for every entry."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch, self.heads, self.length, self.size)
        drawn = (torch.randn(shape, generator=generator) for _ in range(3))
        q, k, v = (x.to(self.device, self.dtype).requires_grad_(self.backward) for x in drawn)
        return q, k, v

    def step(self, call: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Step:
        """`call` without gradients, or with the gradients of `inputs`."""
        if not self.backward:
            return torch.no_grad()(call)

        def step() -> object:
            out = call()
            return torch.autograd.grad(out, inputs, torch.ones_like(out))

        return step


class Rotation:
    """RoPE as it is usually written: x·cos + rotate_half(x)·sin, base 10000."""

    def __init__(self, positions: Tensor, shape: Shape) -> None:
        half = shape.size // 2
        frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = positions.double()[:, None] * frequency.repeat(2)
        self.cos, self.sin = (x.to(shape.device, shape.dtype) for x in (angle.cos(), angle.sin()))

    def __call__(self, x: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t d"]:
        """Rotate every token by its position."""
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat((-second, first), -1) * self.sin


def scored(shape: Shape, score: str) -> Step:
    """`normattn.attention` with a score, as a user calls it."""
    q, k, v = shape.tensors()
    spec = normattn.ScoreSpec.parse(score)
    module = normattn.Score(spec, shape.heads, shape.size).to(shape.device)
    inputs = [q, k, v, *module.parameters()]
    return shape.step(lambda: normattn.attention(q, k, v, module), inputs)


def plain_sdpa(shape: Shape) -> Step:
    """Torch's causal kernel without positions."""
    q, k, v = shape.tensors()
    return shape.step(lambda: sdpa(q, k, v, is_causal=True), (q, k, v))


def rope_sdpa(shape: Shape) -> Step:
    """Hand-written RoPE, then torch's causal kernel."""
    q, k, v = shape.tensors()
    turn = Rotation(torch.arange(shape.length), shape)
    return shape.step(lambda: sdpa(turn(q), turn(k), v, is_causal=True), (q, k, v))


def two_matrices(shape: Shape) -> Step:
    """ReRoPE as its author writes it: two full score matrices and a choice between them.

    s(i, j) = ⟨R_i q_i, R_j k_j⟩/√D where i - j < window, else ⟨R_w q_i, k_j⟩/√D
    (kexue.fm/archives/9708).
    """
    q, k, v = shape.tensors()
    positions = torch.arange(shape.length)
    near, far = Rotation(positions, shape), Rotation(torch.full_like(positions, WINDOW), shape)
    distance = (positions[:, None] - positions).to(shape.device)

    def call() -> Tensor:
        close = near(q) @ near(k).transpose(-1, -2)
        distant = far(q) @ k.transpose(-1, -2)
        score = torch.where(distance < WINDOW, close, distant) / shape.size**0.5
        return torch.softmax(score.masked_fill(distance < 0, -torch.inf), -1) @ v

    return shape.step(call, (q, k, v))


def slopes(heads: int) -> Float[Tensor, " h"]:
    """ALiBi's slopes 2^(-8(h + 1)/H), H a power of two (arXiv 2108.12409)."""
    return 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)


def masked_alibi(shape: Shape, learned: bool) -> Step:
    """Torch's kernel with a bias for every pair, recomputed in each call if slopes are learned."""
    q, k, v = shape.tensors()
    slope = slopes(shape.heads).to(q).requires_grad_(learned and shape.backward)
    positions = torch.arange(shape.length, device=shape.device)
    distance = (positions[:, None] - positions).to(q.dtype)

    def mask() -> Tensor:
        bias = -slope[:, None, None] * distance
        return bias.masked_fill(distance < 0, -torch.inf)[None]

    fixed = mask().detach()
    inputs = (q, k, v, slope) if slope.requires_grad else (q, k, v)
    return shape.step(lambda: sdpa(q, k, v, attn_mask=mask() if learned else fixed), inputs)


def flex(shape: Shape, alibi: bool) -> Step:
    """Compiled `flex_attention`, causal, bare or with ALiBi's bias."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = shape.tensors()
    slope = slopes(shape.heads).to(q.device)

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    def bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slope[h] * (i - j)

    blocks = create_block_mask(causal, None, None, *2 * (shape.length,), device=shape.device)
    compiled = torch.compile(flex_attention)
    change = bias if alibi else None
    return shape.step(lambda: compiled(q, k, v, score_mod=change, block_mask=blocks), (q, k, v))


def _shapes(options: Options) -> list[tuple[str, Shape]]:
    lengths = (128,) if options.quick else options.lengths
    return [
        (
            f"{precision} {'forward and backward' if backward else 'forward'}, T {length}",
            Shape(length, DTYPES[precision], backward, options.device),
        )
        for length in lengths
        for precision in options.dtypes
        for backward in (False, True)
    ]


def plain(options: Options) -> list[Case]:
    """Attention without positions relative to torch's kernel: the overhead of a call."""
    return [
        Case(
            f"plain {name}",
            {
                "SDPA": partial(plain_sdpa, shape),
                "NoPE": partial(scored, shape, "Baseline-NoPE"),
            },
            "SDPA",
        )
        for name, shape in _shapes(options)
    ]


def absorbed(options: Options) -> list[Case]:
    """Scores absorbed into queries and keys, relative to hand-written RoPE with torch's kernel."""
    cases = []
    for name, shape in _shapes(options):
        entries: dict[str, Callable[[], Step]] = {"RoPE + SDPA": partial(rope_sdpa, shape)}
        for score in ABSORBED:
            entries[score] = partial(scored, shape, score)
        cases.append(Case(f"absorbed {name}", entries, "RoPE + SDPA"))
    return cases


def two_regime(options: Options) -> list[Case]:
    """ReRoPE relative to RoPE with torch's kernel, and to two full score matrices."""
    cases = []
    for name, shape in _shapes(options):
        score = f"Baseline-ReRoPE(window={WINDOW})@2048"
        entries: dict[str, Callable[[], Step]] = {
            "RoPE + SDPA": partial(rope_sdpa, shape),
            "ReRoPE": partial(scored, shape, score),
            "two matrices": partial(two_matrices, shape),
        }
        cases.append(Case(f"two-regime {name}", entries, "RoPE + SDPA"))
    return cases


def bias(options: Options) -> list[Case]:
    """ALiBi and KERPLE relative to torch's kernel with a full mask; on a GPU to flex_attention."""
    cases = []
    for name, shape in _shapes(options):
        entries: dict[str, Callable[[], Step]] = {
            "SDPA with a mask": partial(masked_alibi, shape, learned=False),
            "SDPA with a learned mask": partial(masked_alibi, shape, learned=True),
            "ALiBi": partial(scored, shape, "Baseline-ALiBi"),
            "KERPLE": partial(scored, shape, "Baseline-KERPLELog"),
        }
        if options.device != "cpu":
            entries["flex_attention"] = partial(flex, shape, alibi=True)
        cases.append(Case(f"bias {name}", entries, "SDPA with a mask"))
    return cases
