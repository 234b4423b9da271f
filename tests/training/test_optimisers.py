"""Optimisers and schedules against plain numpy readings of their equations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from normattn.errors import InputError
from normattn.lab.training.config import (
    AdamWConfig,
    MuonConfig,
    OptimiserConfig,
    ScheduleConfig,
    TigerConfig,
    lr_multiplier,
)
from normattn.lab.training.optim import group_parameters, make_optimiser
from normattn.layers import Attention
from normattn.models import CausalLM, CausalLMConfig

LR, STEPS = 0.01, 5
KINDS = {
    "embedding.weight": "embedding",
    "linear.weight": "matrix",
    "wide.weight": "matrix",
    "head.weight": "head",
}
"""All else is a vector."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.linear = nn.Linear(3, 6)
        self.wide = nn.Linear(6, 3)
        self.head = nn.Linear(3, 5)
        self.gain = nn.Parameter(torch.ones(2, 3))


class AdamW:
    """θ ← θ − η·wd·θ − η·m̂/(√v̂ + ε), without decay of vectors."""

    def __init__(self, betas: tuple[float, float], eps: float, decay: float) -> None:
        self.betas, self.eps, self.decay = betas, eps, decay
        self.m, self.v, self.t = np.zeros(()), np.zeros(()), 0

    def step(self, kind: str, theta: np.ndarray, g: np.ndarray) -> np.ndarray:
        (a, b), self.t = self.betas, self.t + 1
        self.m, self.v = a * self.m + (1 - a) * g, b * self.v + (1 - b) * g**2
        m, v = self.m / (1 - a**self.t), self.v / (1 - b**self.t)
        decay = 0.0 if kind == "vector" else self.decay
        return np.asarray(theta * (1 - LR * decay) - LR * m / (np.sqrt(v) + self.eps))


class TigerByHand:
    """θ ← θ − η_θ·(sign m + wd·θ)."""

    m = np.zeros(())

    def step(self, kind: str, theta: np.ndarray, g: np.ndarray) -> np.ndarray:
        self.m = 0.9 * self.m + 0.1 * g
        if kind == "vector":
            return np.asarray(theta - LR / 2 * np.sign(self.m))
        rate = LR * np.sqrt(np.mean(theta**2))
        if kind == "embedding":
            rate = LR * np.sqrt(np.mean(theta**2, axis=-1, keepdims=True))
        return np.asarray(theta - rate * (np.sign(self.m) + 0.02 * theta))


class MuonByHand(AdamW):
    """Newton-Schulz in float64: five times a·x + (b·xxᵀ + c·(xxᵀ)²)·x from x = u/‖u‖."""

    def step(self, kind: str, theta: np.ndarray, g: np.ndarray) -> np.ndarray:
        if kind != "matrix":
            return super().step(kind, theta, g)
        self.m = 0.95 * self.m + 0.05 * g
        update = 0.95 * self.m + 0.05 * g
        x = update / np.linalg.norm(update)
        for _ in range(5):
            square = x @ x.T
            x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
        size = 0.2 * np.sqrt(max(theta.shape))
        return np.asarray(theta - LR * (size * x + self.decay * theta))


ADAMW = AdamWConfig(lr=LR, betas=(0.9, 0.8), eps=1e-6, weight_decay=0.5)
MUON = MuonConfig(lr=LR, betas=(0.9, 0.8), eps=1e-6, weight_decay=0.5)


@pytest.mark.parametrize(
    ("config", "by_hand", "within"),
    [
        (ADAMW, lambda: AdamW((0.9, 0.8), 1e-6, 0.5), 1e-12),
        (TigerConfig(lr=LR, beta=0.9, weight_decay=0.02), TigerByHand, 1e-12),
        # torch's Newton-Schulz is in bf16.
        (MUON, lambda: MuonByHand((0.9, 0.8), 1e-6, 0.5), 1e-3),
    ],
    ids=["adamw", "tiger", "muon"],
)
def test_steps_match_the_equation(
    config: OptimiserConfig, by_hand: Callable[[], AdamW | TigerByHand], within: float
) -> None:
    """Saved and loaded into another model after two steps, which goes on alike."""
    torch.manual_seed(0)
    net, generator = Net().double(), np.random.default_rng(1)
    optimiser = make_optimiser(net, config)
    assert sorted(optimiser.names) == sorted(name for name, _ in net.named_parameters())
    expected = {name: p.detach().numpy().copy() for name, p in net.named_parameters()}
    rules = {name: by_hand() for name in expected}
    for step in range(STEPS):
        if step == 2:
            other = Net().double()
            other.load_state_dict(net.state_dict())
            state = optimiser.state()
            net, optimiser = other, make_optimiser(other, config)
            optimiser.load_state(state)
        for name, p in net.named_parameters():
            g = generator.normal(size=tuple(p.shape))
            p.grad = torch.from_numpy(g)
            kind = KINDS.get(name, "vector")
            expected[name] = rules[name].step(kind, expected[name], g)
        optimiser.step(LR)
    for name, p in net.named_parameters():
        atol = within if KINDS.get(name) == "matrix" else 1e-12
        np.testing.assert_allclose(p.detach().numpy(), expected[name], rtol=0, atol=atol)


@pytest.mark.parametrize(("split", "rows"), [("qkv", [16, 8, 8]), ("heads", [4] * 8), (None, [32])])
def test_projections_that_muon_splits_move_as_matrices_of_their_own(
    split: Literal["qkv", "heads"] | None, rows: list[int]
) -> None:
    torch.manual_seed(0)
    layer = Attention(16, heads=4, kv_heads=2)
    parts = nn.ParameterList(x.clone() for x in torch.split(layer.qkv.weight, rows))
    own = make_optimiser(layer, MUON.model_copy(update={"split": split}))
    apart = make_optimiser(parts, MUON)
    for _ in range(2):
        layer.zero_grad()
        layer(torch.randn(2, 5, 16)).square().sum().backward()
        assert layer.qkv.weight.grad is not None
        for part, gradient in zip(parts, torch.split(layer.qkv.weight.grad, rows), strict=True):
            part.grad = gradient.clone()
        own.step(0.02)
        apart.step(0.02)
    # Heads go through Newton-Schulz as one batch, which rounds otherwise in bf16.
    torch.testing.assert_close(layer.qkv.weight, torch.cat([*parts]), rtol=0, atol=2e-3)


def test_what_is_a_matrix_an_embedding_and_a_vector() -> None:
    settings = {"vocab_size": 11, "dim": 16, "layers": 1, "train_length": 8}
    unit = CausalLM(CausalLMConfig.model_validate({**settings, "block": "gau", "key_size": 8}))
    frozen = next(name for name in group_parameters(unit).vectors if "gamma" not in name)
    unit.get_parameter(frozen).requires_grad_(False)
    groups = group_parameters(unit)
    # A tied parameter is there once, a frozen one not at all, a gain per head is a vector.
    assert len(groups.embeddings) == 1
    assert all(name.endswith(".weight") for name in groups.matrices)
    assert [name for name in groups.vectors if "gamma" in name]
    names = [name for name, _ in groups.items()]
    trained = [name for name, p in unit.named_parameters() if p.requires_grad]
    assert sorted(names) == sorted(trained) == sorted(make_optimiser(unit, TigerConfig()).names)


def test_what_cannot_be_trained_is_refused() -> None:
    net = Net()
    nn.init.zeros_(net.linear.weight)
    with pytest.raises(InputError, match=r"linear\.weight"):
        make_optimiser(net, TigerConfig())
    with pytest.raises(InputError, match=r"optimiser\.split"):
        make_optimiser(Net(), MUON.model_copy(update={"split": "heads"}))
    with pytest.raises(InputError, match="no trainable parameter"):
        make_optimiser(nn.Identity(), ADAMW)
    with pytest.raises(InputError, match="parameters that do not exist"):
        make_optimiser(Net(), ADAMW).load_state({"other/exp_avg": torch.zeros(1)})


def test_schedules_pass_their_known_points() -> None:
    constant = ScheduleConfig(name="constant", warmup_steps=4)
    assert [lr_multiplier(constant, step, 6) for step in range(1, 7)] == [0.25, 0.5, 0.75, 1, 1, 1]
    cosine = ScheduleConfig(name="cosine", warmup_steps=10, floor=0.2)
    points = {10: 1.0, 60: 0.6, 35: 0.2 + 0.4 * (1 + math.sqrt(0.5)), 110: 0.2}
    for step, expected in points.items():
        assert lr_multiplier(cosine, step, 110) == pytest.approx(expected, abs=1e-15)
    with pytest.raises(ValidationError, match="floor 0 changes nothing where the learning rate"):
        ScheduleConfig(name="constant", floor=0.0)
