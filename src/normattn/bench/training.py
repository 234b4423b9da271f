"""The training step of the main job's presets as an entry, and its operations as products alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from normattn.bench.case import Work
from normattn.lab.runs.timing import Step
from normattn.lab.training.distribution import World
from normattn.lab.training.loop_config import LoopConfig
from normattn.lab.training.pages import keep_pages
from normattn.lab.training.step import Stepper
from normattn.models.causal_lm import CausalLM
from normattn.models.config import CausalLMConfig
from normattn.models.flops import flops_per_token

PresetName = Literal["laptop", "workstation"]
# The models of the presets and their batches; a test holds them to the presets.
MODELS: Final[Mapping[PresetName, CausalLMConfig]] = {
    "laptop": CausalLMConfig(
        vocab_size=1024, dim=128, layers=3, heads=4, block="mha", placement="PreLN", train_length=64
    ),
    "workstation": CausalLMConfig(
        vocab_size=2048,
        dim=128,
        layers=6,
        block="gau",
        key_size=128,
        expansion=2,
        placement="DeepNorm",
        norm="rms",
        norm_gain=False,
        train_length=128,
        embedding_std=0.02,
        gamma_std=1.0,
    ),
}
BATCHES: Final[Mapping[PresetName, int]] = {"laptop": 64, "workstation": 16}
_SIDE = 1024


@dataclass(frozen=True)
class PresetStep:
    """A step of the training loop on random tokens: forward, backward, clipping, AdamW."""

    preset: PresetName
    half: bool = False
    device: str = "cpu"
    batch: int | None = None

    def build(self) -> Step:
        """The loop's own step."""
        torch.manual_seed(0)
        if self.device == "cpu":
            keep_pages()
        config = LoopConfig(steps=10**9, precision="bf16" if self.half else "fp32")
        task = _Random(CausalLM(MODELS[self.preset]).to(self.device), self._rows)
        world = World(0, 1, torch.device(self.device))
        stepper = Stepper(task, config, world, lambda: False)

        def step() -> object:
            return stepper.step(1)

        return step

    def work(self) -> Work:
        """FLOPs by the model's own account; the weights and their two moments, read and written."""
        config = MODELS[self.preset]
        tokens = self._rows * config.train_length
        flops = flops_per_token(config, config.train_length).training * tokens
        parameters = sum(p.numel() for p in CausalLM(config).parameters())
        return Work(flops, 7.0 * 4 * parameters, float(tokens * config.vocab_size))

    def small(self) -> PresetStep:
        """The same with one row."""
        return dataclasses.replace(self, batch=1)

    @property
    def _rows(self) -> int:
        return BATCHES[self.preset] if self.batch is None else self.batch


@dataclass(frozen=True)
class Products:
    """As many operations as a step's, all of them in one product of large square matrices' rate."""

    of: PresetStep

    def build(self) -> Step:
        """(M, 1024) · (1024, 1024) with M as large as the operations ask."""
        dtype = torch.bfloat16 if self.of.half else torch.float32
        a, b = (torch.randn(n, _SIDE, device=self.of.device).to(dtype) for n in (self._rows, _SIDE))
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)

    def work(self) -> Work:
        """The operations of the step; two matrices read and one written."""
        numbers = _SIDE * (2 * self._rows + _SIDE)
        return Work(self.of.work().flops, float(numbers * (2 if self.of.half else 4)))

    def small(self) -> Products:
        """Those of one row."""
        return dataclasses.replace(self, of=self.of.small())

    @property
    def _rows(self) -> int:
        return max(1, round(self.of.work().flops / (2 * _SIDE**2)))


class _Random:
    """A task on one batch of random tokens."""

    def __init__(self, model: CausalLM, rows: int) -> None:
        self.model = model
        tokens = model.config.train_length
        self.tokens_per_step = rows * tokens
        generator = torch.Generator().manual_seed(1)
        shape = (rows, tokens + 1)
        self._ids = torch.randint(model.config.vocab_size, shape, generator=generator)

    def batch(self, step: int, share: int, shares: int) -> Tensor:
        """The same tokens in every step."""
        return self._ids

    def loss(self, batch: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The mean loss of the next token."""
        return self.model.loss(batch).loss, {}
