"""Normalisation of queries and keys: names mean what they say, and agree with torch's own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import apart
from normattn import Score, attention
from normattn.kernels import AttentionMask
from normattn.score import Positions
from normattn.score.norms import Normalisation

from .cases import tensors

B, H, T, D = 3, 2, 6, 8
PADDING = torch.arange(T)[None] < torch.tensor([[2], [0], [4]])


def norm(kind: Any, heads: int = H, head_dim: int = D, **options: Any) -> nn.Module:
    return Normalisation(kind, **options).build(heads, head_dim)


def test_l2_makes_zero_of_zero() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        zero = torch.zeros(1, 1, 2, D, dtype=dtype, requires_grad=True)
        y = norm("l2")(zero)
        assert (y == 0).all()
        assert torch.autograd.grad(y.sum(), zero)[0].isfinite().all()


@pytest.mark.parametrize("kind", ["layer", "rms", "batch", "instance"])
def test_gains_start_at_1_and_statistics_are_taken_in_float32(kind: str) -> None:
    """Values around 300 have squares that bfloat16 sums would lose."""
    (noise,) = tensors((B, H, T, 256), dtype=torch.float32)
    x = (noise.detach() + 300).bfloat16()
    exact = norm(kind, head_dim=256)(x.double())
    for module in (norm(kind, head_dim=256, gain=True), norm(kind, head_dim=256).bfloat16()):
        y = module(x)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.double(), exact, rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        *(("Baseline", {}), ("KNA-logn@8", {}), ("CosA@8", {}), ("QKNorm2020@8", {"scale": ()})),
        ("QKRMSNorm", {"query_norm.weight": (D,), "key_norm.weight": (D,)}),
        *(("QKRMSNorm(gain=false)", {}), ("KInstanceNorm(gain=false)", {})),
        ("KRMSNorm(across=all)", {"key_norm.weight": (1, D)}),
        ("QLayerNorm(across=all)", {"query_norm.weight": (H, D), "query_norm.bias": (H, D)}),
        ("QBatchNorm", {"query_norm.weight": (1, H, 1, D), "query_norm.bias": (1, H, 1, D)}),
    ],
)
def test_names_and_shapes_of_parameters(text: str, shapes: dict[str, tuple[int, ...]]) -> None:
    score = Score(text, H, D, 1)
    assert {name: tuple(p.shape) for name, p in score.named_parameters()} == shapes


@pytest.mark.parametrize("text", ["QKNorm2020@64", "KNA-NoPE-logn@6", "CosA-NoPE-logn@6"])
def test_a_scale_is_not_rounded_to_half_precision(text: str) -> None:
    """A scale that is itself rounded to bfloat16 is off by up to 0.4 % for a whole row of q."""
    (q,) = tensors((1, 1, 30, 256), dtype=torch.bfloat16)
    score = Score(text, 1, 256)
    for scale in score.parameters():
        nn.init.constant_(scale, 1.7069)
    where = Positions.of(30, 30, True, q.device)
    mask = AttentionMask(True, where.query, where.key, aligned=True)
    low, wide = (score(x, x, x, where, mask).q for x in (q, q.double()))
    ratio = (low.double() * wide).sum(-1) / wide.square().sum(-1)
    assert (ratio[:, :, 1:] - 1).abs().mean() < 5e-4


def flat(x: Tensor, padding: Tensor | None = None) -> Tensor:
    """The tokens that count, as rows of the H·D features that torch's BatchNorm1d takes."""
    rows = x.transpose(1, 2).flatten(2)
    return rows.flatten(0, 1) if padding is None else rows[~padding]


@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
def test_batch_norm_and_its_running_statistics_are_torchs(padding: Tensor | None) -> None:
    ours, theirs = norm("batch", gain=True).double(), nn.BatchNorm1d(H * D).double()
    with torch.no_grad():
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            other.copy_(mine.uniform_(0.5, 2).flatten())
    for step in range(3):
        (x,) = tensors((B, H, T, D), seed=step)
        expected, y = theirs(flat(x * 3 + 1, padding)), flat(ours(x * 3 + 1, padding), padding)
        torch.testing.assert_close(y, expected)
        pulls = [each.square().mul(expected.detach()).sum() for each in (y, expected)]
        torch.testing.assert_close(*(torch.autograd.grad(pull, x)[0] for pull in pulls))
        for name in ("running_mean", "running_var"):
            torch.testing.assert_close(getattr(ours, name).flatten(), getattr(theirs, name))
    before = ours.running_mean.clone()  # type: ignore[operator]
    torch.testing.assert_close(flat(ours.eval()(x)), theirs.eval()(flat(x)))
    assert torch.equal(ours.running_mean, before)  # type: ignore[arg-type]
    alone = norm("batch")
    assert (alone(torch.ones(1, H, 1, D)) == 0).all()
    assert alone.running_var.isfinite().all()  # type: ignore[operator]
    before = alone.running_var.clone()  # type: ignore[operator]
    alone(torch.ones(1, H, 2, D), torch.ones(1, 2, dtype=torch.bool))
    assert torch.equal(alone.running_var, before)  # type: ignore[arg-type]


def test_batch_norm_counts_a_batch_once_where_a_backward_computes_it_again() -> None:
    """Activation checkpointing moves running statistics as a training without it does."""
    found: list[Any] = []
    every: Any = (None, {"use_reentrant": False}, {"use_reentrant": True})
    for options in every:
        score = Score("QKBatchNorm", H, D).double()
        q, k, v = tensors(*[(B, H, T, D)] * 3)
        given: Any = (q, k, v, score, False)
        how = attention if options is None else partial(checkpoint, attention, **options)
        out: Any = how(*given)
        out.square().sum().backward()
        found.append((*score.buffers(), q.grad, k.grad))
    assert found[0][0].abs().max() > 0
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


PROGRAM = """
import sys, torch
import torch.distributed as dist
from normattn.score.norms import Normalisation
folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
x, padding = torch.load(f"{folder}/in{rank}")
x.requires_grad_()
norm = Normalisation("batch", gain=True).build(2, 4).double()
y = norm(x, padding)
y.masked_fill(padding[:, None, :, None], 0.0).pow(3).sum().backward()
torch.save((y.detach(), x.grad, norm.running_mean, norm.running_var), f"{folder}/out{rank}")
dist.barrier()
dist.destroy_process_group()
"""


def test_batch_norm_of_two_processes_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    """The halves differ in size and padding, so plain means of means would be wrong."""
    (x,) = tensors((5, 2, 6, 4))
    padding = torch.arange(6)[None] < torch.tensor([[4], [0], [1], [0], [3]])
    parts, children = (slice(0, 1), slice(1, 5)), []
    for rank, part in enumerate(parts):
        torch.save((x.detach()[part].clone(), padding[part]), tmp_path / f"in{rank}")
        children.append(apart.Program(PROGRAM, tmp_path, rank))
    for child in children:
        done = child.end()
        assert done.code == 0, done.err[-2000:]
    module = norm("batch", 2, 4, gain=True).double()
    y = module(x, padding)
    (grad,) = torch.autograd.grad(y.masked_fill(padding[:, None, :, None], 0.0).pow(3).sum(), x)
    for rank, part in enumerate(parts):
        expected = (y.detach()[part], grad[part], module.running_mean, module.running_var)
        for ours, whole in zip(torch.load(tmp_path / f"out{rank}"), expected, strict=True):
            torch.testing.assert_close(ours, whole)
