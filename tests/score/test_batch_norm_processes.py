"""BatchNorm over two processes is BatchNorm over the whole batch, gradients included."""

from __future__ import annotations

from pathlib import Path

import torch

import apart
from normattn.score.norms import BatchScoreNorm

from .cases import tensors

PROGRAM = """
import sys, torch
import torch.distributed as dist
from normattn.score.norms import BatchScoreNorm
folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
x, padding = torch.load(f"{folder}/in{rank}")
x.requires_grad_()
norm = BatchScoreNorm(2, 4, 1e-5, gain=True).double()
y = norm(x, padding)
y.masked_fill(padding[:, None, :, None], 0.0).pow(3).sum().backward()
torch.save((y.detach(), x.grad, norm.running_mean, norm.running_var), f"{folder}/out{rank}")
dist.barrier()
dist.destroy_process_group()
"""


def test_two_processes_are_one_batch(tmp_path: Path) -> None:
    """The halves differ in size and padding, so plain means of means would be wrong."""
    (x,) = tensors((5, 2, 6, 4))
    padding = torch.arange(6)[None] < torch.tensor([[4], [0], [1], [0], [3]])
    parts = (slice(0, 1), slice(1, 5))
    children = []
    for rank, part in enumerate(parts):
        torch.save((x.detach()[part].clone(), padding[part]), tmp_path / f"in{rank}")
        children.append(apart.Program(PROGRAM, tmp_path, rank))
    for child in children:
        done = child.end()
        assert done.code == 0, done.err[-2000:]

    norm = BatchScoreNorm(2, 4, 1e-5, gain=True).double()
    y = norm(x, padding)
    (grad,) = torch.autograd.grad(y.masked_fill(padding[:, None, :, None], 0.0).pow(3).sum(), x)
    for rank, part in enumerate(parts):
        saved = torch.load(tmp_path / f"out{rank}")
        expected = (y.detach()[part], grad[part], norm.running_mean, norm.running_var)
        for ours, whole in zip(saved, expected, strict=True):
            torch.testing.assert_close(ours, whole)
