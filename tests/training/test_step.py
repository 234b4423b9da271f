"""One step's arithmetic: accumulation, clipping, precision, against the plain way."""

from __future__ import annotations

import math

import pytest
import torch

from normattn.errors import InputError
from normattn.lab.training.config import AdamWConfig, LoopConfig, ScheduleConfig
from normattn.lab.training.distributed import World
from normattn.lab.training.step import StepValues, TrainStep

from .toy import ToyTask, config

WORLD = World(0, 1, torch.device("cpu"))


def stepper(settings: LoopConfig) -> TrainStep:
    torch.manual_seed(3)
    return TrainStep(ToyTask(WORLD), settings, WORLD, lambda: False)


def curve(settings: LoopConfig, steps: int = 8) -> list[StepValues]:
    taker = stepper(settings)
    return [taker.step(step) for step in range(1, steps + 1)]


def test_accumulation_is_the_same_step_up_to_rounding() -> None:
    whole = curve(config())
    parts = curve(config(accumulate=4))
    for one, four in zip(whole, parts, strict=True):
        assert four.loss == pytest.approx(one.loss, rel=2e-6)
        assert four.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-4)
        assert four.metrics["accuracy"] == pytest.approx(one.metrics["accuracy"], abs=1e-6)


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


def test_bf16_runs_its_matrices_in_bf16_and_keeps_fp32_weights() -> None:
    taker = stepper(config(precision="bf16"))
    seen: list[torch.dtype] = []
    taker.task.model.get_submodule("blocks.0.feed_forward").register_forward_hook(
        lambda m, i, out: seen.append(out.dtype)
    )
    bf16 = [taker.step(step).loss for step in range(1, 9)]
    fp32 = [values.loss for values in curve(config())]
    assert seen == [torch.bfloat16] * 8
    assert {p.dtype for p in taker.task.model.parameters()} == {torch.float32}
    assert bf16 == pytest.approx(fp32, rel=0.02)
    assert bf16 != fp32


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


def test_fp16_computes_in_fp16_and_follows_fp32() -> None:
    taker = stepper(config(precision="fp16"))
    fp16 = [taker.step(step) for step in range(1, 9)]
    fp32 = curve(config())
    assert [v.loss for v in fp16] == pytest.approx([v.loss for v in fp32], rel=0.01)
    norms = [v.gradient_norm for v in fp32]
    assert [v.gradient_norm for v in fp16] == pytest.approx(norms, rel=0.02)
    assert {p.dtype for p in taker.task.model.parameters()} == {torch.float32}


def test_gradients_that_overflow_are_taken_again_with_half_the_scale() -> None:
    taker, plain = stepper(config(precision="fp16")), stepper(config(precision="fp16"))
    taker.scaler.load_state_dict({**taker.scaler.state_dict(), "scale": 2.0**40})
    values, wanted = taker.step(1), plain.step(1)
    assert taker.scaler.get_scale() < 2.0**40
    assert values.finite
    assert values.loss == wanted.loss
    assert values.gradient_norm == pytest.approx(wanted.gradient_norm, rel=5e-3)
