"""What looking costs: a model's forward and training step observed, and not.

The goal is that looking takes at most a tenth of what is looked at. That nothing is paid while
nobody looks is measured by the other suites, whose goals were set before there were observers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from normattn.bench.case import Case, Entry, Goal, Suite, Work
from normattn.bench.models import SMALL, ModelSize, Ours, TrainingStep
from normattn.bench.settings import Settings
from normattn.lab.diagnostics import collecting
from normattn.lab.runs.timing import Step
from normattn.models.causal_lm import CausalLM

_AT_MOST = 1.1
SCORES = ("Baseline", "KNA-logn", "Baseline-ALiBi", "Baseline-RealFormer")


@dataclass(frozen=True)
class Looked:
    """A forward, or a forward and backward with AdamW, of our decoder; observed if `on`."""

    step: TrainingStep
    on: bool
    training: bool = True

    def build(self) -> Step:
        """The step, with the probe's collector around it where it is on."""
        device, half = self.step.device, self.step.half
        torch.manual_seed(0)
        model = CausalLM(self.step.size.config(self.step.score)).to(device)
        ids = self.step.ids()

        def forward() -> object:
            with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=half):
                return model(ids)

        plain = self.step.step_of(Ours(model), ids) if self.training else forward

        def observed() -> object:
            with collecting(model) as collector:
                plain()
            return collector.lines()

        return observed if self.on else plain

    def work(self) -> Work:
        """That of the training step, or about a third of it."""
        work = self.step.work()
        return work if self.training else dataclasses.replace(work, flops=work.flops / 3)

    def small(self) -> Looked:
        """The same with a tiny model."""
        return dataclasses.replace(self, step=self.step.small())


def cases(settings: Settings) -> list[Case]:
    """Forward and training step of every precision, at a short and a longer length."""
    sizes = [SMALL] if settings.quick else [ModelSize(batch=4), ModelSize(length=2048, batch=1)]
    return [
        _case(precision, size, training, settings)
        for precision in settings.dtypes
        for size in sizes
        for training in (True, False)
    ]


def _case(precision: str, size: ModelSize, training: bool, settings: Settings) -> Case:
    entries: dict[str, Entry] = {}
    goals = []
    for score in SCORES:
        step = TrainingStep("normattn", score, precision == "bf16", size, settings.device)
        looked = f"{score}, observed"
        entries[score], entries[looked] = (
            Looked(step, on=False, training=training),
            Looked(step, on=True, training=training),
        )
        goals.append(Goal(looked, score, at_most=_AT_MOST))
    kind = "training step" if training else "forward"
    return Case(
        f"{kind} observed, {precision}, N {size.length}",
        entries,
        tuple(goals),
        settings.dtypes[precision],
    )


SUITE = Suite("diagnostics", "a model's forward and training step, observed against not", cases)
