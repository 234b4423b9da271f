from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from normattn.errors import DivergedError
from normattn.lab.runs import RunDirectory, read_metrics, read_status
from normattn.lab.training.distributed import World
from normattn.lab.training.loop import train

from .toy import Block, ToyTask, config, open_run

BAD_STEP = 7


class BadTask(ToyTask):
    """Goes wrong at one step, in the way that `fault` says."""

    def __init__(self, world: World, fault: str) -> None:
        super().__init__(world)
        self.fault = fault
        self.now = 0
        # What a forward pass changes, as batch norm's running statistics are.
        self.model.register_buffer("passes", torch.zeros(()))

    def batch(self, step: int, share: int, shares: int) -> Tensor:
        self.now = step
        return super().batch(step, share, shares)

    def loss(self, batch: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        self.model.get_buffer("passes").add_(1)
        if self.now != BAD_STEP:
            return super().loss(batch)
        block = self.model.get_submodule("blocks.1")
        assert isinstance(block, Block)
        if self.fault == "parameter":
            with torch.no_grad():
                block.norm.weight[3] = float("inf")
        if self.fault == "module":
            scale = block.feed_forward.register_forward_hook(
                lambda m, i, out: out * float("nan"), prepend=True
            )
            try:
                return super().loss(batch)
            finally:
                scale.remove()
        loss, metrics = super().loss(batch)
        if self.fault == "loss":
            return loss * float("nan"), metrics
        if self.fault == "gradient":
            # √x at 0: a finite value whose derivative is not.
            return loss + (block.feed_forward.bias * 0).sum().sqrt(), metrics
        return loss, metrics


def diverge(path: Path, fault: str) -> DivergedError:
    settings = config()
    with pytest.raises(DivergedError) as caught:
        train(
            lambda world: BadTask(world, fault),
            settings,
            open_run(path, settings),
            show_progress=False,
        )
    return caught.value


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("module", "blocks.1.feed_forward"),
        ("parameter", "blocks.1.norm (its parameter weight was not finite before this step)"),
        ("loss", "the loss, every module's output being finite"),
        ("gradient", "the gradient of blocks.1.feed_forward.bias"),
    ],
)
def test_the_step_the_place_and_the_checkpoint_are_named(
    tmp_path: Path, fault: str, where: str
) -> None:
    error = diverge(tmp_path, fault)
    assert (error.step, error.where) == (BAD_STEP, where)
    status = read_status(tmp_path)
    assert status is not None
    assert (status.state, status.step) == ("diverged", BAD_STEP)
    assert where in status.message
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, BAD_STEP))
    last_good = tmp_path / f"checkpoints/step-{BAD_STEP - 1:08d}"
    # Weights that are not finite are no good checkpoint.
    assert error.checkpoint == (None if fault == "parameter" else str(last_good))
    if error.checkpoint is not None:
        kept = RunDirectory.existing(tmp_path, "toy").checkpoints.load(BAD_STEP - 1).tensors
        assert kept["model/passes"] == BAD_STEP - 1
    # The same command reports the same without training again.
    assert str(diverge(tmp_path, fault)) == str(error)
