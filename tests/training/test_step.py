"""One step's arithmetic against the plain way, and where a step is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from normattn.errors import DivergedError, InputError
from normattn.lab.runs import RunDirectory, read_metrics, read_status
from normattn.lab.training.config import AdamWConfig, LoopConfig, ScheduleConfig
from normattn.lab.training.distributed import World
from normattn.lab.training.step import StepValues, TrainStep

from .toy import Block, ToyTask, config, run

WORLD = World(0, 1, torch.device("cpu"))


def stepper(settings: LoopConfig) -> TrainStep:
    torch.manual_seed(3)
    return TrainStep(ToyTask(WORLD), settings, WORLD, lambda: False)


def curve(settings: LoopConfig, steps: int = 8) -> list[StepValues]:
    taker = stepper(settings)
    return [taker.step(step) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("changes", "dtype", "within", "norms_within"),
    [
        ({"accumulate": 4}, torch.float32, 2e-6, 1e-4),
        ({"precision": "bf16"}, torch.bfloat16, 0.02, 0.05),
        ({"precision": "fp16"}, torch.float16, 0.01, 0.02),
    ],
)
def test_steps_are_those_of_fp32_up_to_rounding(
    changes: dict[str, object], dtype: torch.dtype, within: float, norms_within: float
) -> None:
    """Matrices are multiplied in the dtype; weights stay in fp32."""
    taker, seen = stepper(config(**changes)), list[torch.dtype]()
    matrix = taker.task.model.get_submodule("blocks.0.feed_forward")
    matrix.register_forward_hook(lambda m, i, out: seen.append(out.dtype))
    ours, plain = [taker.step(step) for step in range(1, 9)], curve(config())
    assert set(seen) == {dtype}
    assert {p.dtype for p in taker.task.model.parameters()} == {torch.float32}
    assert [v.loss for v in ours] == pytest.approx([v.loss for v in plain], rel=within)
    norms = [v.gradient_norm for v in plain]
    assert [v.gradient_norm for v in ours] == pytest.approx(norms, rel=norms_within)
    if dtype == torch.float32:
        accuracies = [v.metrics["accuracy"] for v in plain]
        assert [v.metrics["accuracy"] for v in ours] == pytest.approx(accuracies, abs=1e-6)


@pytest.mark.parametrize("clip", [None, 1e-3, 1e3])
def test_clipping_and_update_match_torch(clip: float | None) -> None:
    settings = config(
        clip=clip,
        optimiser=AdamWConfig(lr=0.05, weight_decay=0.0, eps=1.0),
        schedule=ScheduleConfig(name="constant", warmup_steps=2),
    )
    taker = stepper(settings)
    torch.manual_seed(3)
    plain = ToyTask(WORLD)
    optimiser = torch.optim.AdamW(
        plain.model.parameters(), betas=(0.9, 0.95), eps=1.0, weight_decay=0.0
    )
    for step in (1, 2, 3):
        values = taker.step(step)
        optimiser.zero_grad()
        loss, _ = plain.loss(plain.batch(step, 0, 1))
        loss.backward()  # type: ignore[no-untyped-call]
        limit = math.inf if clip is None else clip
        norm = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), limit)
        optimiser.param_groups[0]["lr"] = 0.05 * min(1.0, step / 2)
        optimiser.step()
        assert values.loss == pytest.approx(loss.item(), rel=1e-6)
        assert values.gradient_norm == pytest.approx(float(norm), rel=1e-5)
        assert values.learning_rate == pytest.approx(0.05 * min(1.0, step / 2))
    for ours, theirs in zip(taker.task.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_step_that_is_not_finite_updates_nothing() -> None:
    taker = stepper(config())
    taker.step(1)
    weight = taker.task.model.get_parameter("blocks.0.norm.bias")
    before = {n: p.detach().clone() for n, p in taker.task.model.named_parameters()}
    handle = taker.task.model.get_submodule("head").register_forward_hook(
        lambda m, i, out: out * float("nan")
    )
    assert not taker.step(2).finite
    handle.remove()
    assert weight.grad is not None
    for name, p in taker.task.model.named_parameters():
        assert torch.equal(p, before[name])


def test_what_a_task_cannot_have_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match="no-such-compiler"):
        stepper(config(compile=True))
    with pytest.raises(InputError, match="activation checkpointing"):
        stepper(config(activation_checkpointing=True))


def test_gradients_that_overflow_are_taken_again_with_half_the_scale() -> None:
    taker, plain = stepper(config(precision="fp16")), stepper(config(precision="fp16"))
    taker.scaler.load_state_dict({**taker.scaler.state_dict(), "scale": 2.0**40})
    values, wanted = taker.step(1), plain.step(1)
    assert taker.scaler.get_scale() < 2.0**40
    assert values.finite
    assert values.loss == wanted.loss
    assert values.gradient_norm == pytest.approx(wanted.gradient_norm, rel=5e-3)


# Steps that are not finite.
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
    with pytest.raises(DivergedError) as caught:
        run(path, task=lambda world: BadTask(world, fault))
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
