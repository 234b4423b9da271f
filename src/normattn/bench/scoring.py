"""The evaluation of the main job's presets as an entry, and training of as many tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch

from normattn.bench.case import Work
from normattn.bench.training import BATCHES, MODELS, PresetName, PresetStep
from normattn.lab.data import TokenSplit
from normattn.lab.data.windows import (
    EvaluationSet,
    last_segment_sets,
    non_repeated_set,
    repeated_set,
    train_length_set,
)
from normattn.lab.evaluation import evaluate_run
from normattn.lab.runs.timing import Step
from normattn.models.causal_lm import CausalLM
from normattn.models.flops import flops_per_token

# What every preset asks for, by the lengths and the protocols of `sweep.settings`; a test holds
# them to those.
MULTIPLES = (1, 2, 4, 8)
# Fewer than a preset's windows, but as many as the model takes at once of the longest.
_WINDOWS = 16
# As many tokens as one training step of either preset, at least.
_LEAST = 2


@dataclass(frozen=True)
class Scoring:
    """A random model evaluated on random tokens by the presets' protocols, under one method."""

    preset: PresetName
    half: bool = False
    method: str = ""
    device: str = "cpu"
    windows: int = _WINDOWS

    def build(self) -> Step:
        """The evaluation stage's own call; nothing is kept on file."""
        torch.manual_seed(0)
        model = CausalLM(MODELS[self.preset]).to(self.device)
        sets, factor = self.sets(), float(MULTIPLES[-1])

        def evaluate() -> object:
            return evaluate_run(
                model,
                sets,
                seed=0,
                methods=(self.method,),
                factor=factor,
                precision="bf16" if self.half else "fp32",
            )

        return evaluate

    def sets(self) -> list[EvaluationSet]:
        """The texts: as many documents as windows, each as long as the longest window."""
        config = MODELS[self.preset]
        length, longest = config.train_length, MULTIPLES[-1]
        tokens = self.windows * (longest * length + 2)
        split = TokenSplit(
            "test",
            np.random.default_rng(0).integers(1, config.vocab_size, tokens).astype(np.uint16),
            np.arange(self.windows + 1) * (longest * length + 2),
            [f"document {number}" for number in range(self.windows)],
        )
        return [
            train_length_set(split, length, self.windows),
            non_repeated_set(split, length, longest, self.windows),
            repeated_set(split, length, longest, self.windows),
            *last_segment_sets(split, length, MULTIPLES, self.windows),
        ]

    @property
    def tokens(self) -> int:
        """Those of all texts that the protocols ask for."""
        return sum(len(chosen) * chosen.length for chosen in self.sets())

    def work(self) -> Work:
        """FLOPs by the model's own account: a window goes through the model once.

        Tokens that no protocol counts go through no head.
        """
        config = MODELS[self.preset]
        # Of sets with the same windows the first, which counts all tokens.
        once = {chosen.windows.tobytes(): chosen for chosen in reversed(self.sets())}.values()
        head = 2 * config.dim * config.vocab_size
        flops, counted = 0.0, 0
        for chosen in once:
            per_token = flops_per_token(config, chosen.length).forward
            flops += len(chosen) * (chosen.length * per_token - chosen.start * head)
            counted += len(chosen) * (chosen.length - chosen.start)
        parameters = sum(p.numel() for p in CausalLM(config).parameters())
        return Work(flops, 4.0 * parameters, float(counted * config.vocab_size))

    def small(self) -> Scoring:
        """The same on as few windows as there can be."""
        return dataclasses.replace(self, windows=_LEAST)


@dataclass(frozen=True)
class Training:
    """Training steps of a preset on as many tokens as `of` scores."""

    of: Scoring

    def build(self) -> Step:
        """One step after another."""
        step, steps = self._step.build(), self.steps

        def train() -> object:
            return [step() for _ in range(steps)][-1]

        return train

    @property
    def steps(self) -> int:
        """How many steps these tokens make."""
        tokens = BATCHES[self.of.preset] * MODELS[self.of.preset].train_length
        return max(1, round(self.of.tokens / tokens))

    def work(self) -> Work:
        """That of the steps."""
        one = dataclasses.astuple(self._step.work())
        return Work(*(self.steps * part for part in one))

    def small(self) -> Training:
        """Those of fewer tokens."""
        return Training(self.of.small())

    @property
    def _step(self) -> PresetStep:
        return PresetStep(self.of.preset, self.of.half, self.of.device)
