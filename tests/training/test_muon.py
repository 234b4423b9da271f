"""Muon against a plain numpy reading of its equation, and everything else against AdamW's."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from torch import nn

from normattn.errors import InputError
from normattn.lab.training.config import AdamWConfig, MuonConfig
from normattn.lab.training.optim import make_optimiser
from normattn.layers import Attention

CONFIG = MuonConfig(lr=0.02, momentum=0.9, weight_decay=0.1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.linear = nn.Linear(3, 6)
        self.wide = nn.Linear(6, 3)
        self.head = nn.Linear(3, 5)


def orthogonal(update: np.ndarray) -> np.ndarray:
    """Newton-Schulz in float64: five times a·x + (b·xxᵀ + c·(xxᵀ)²)·x from x = u/‖u‖."""
    a, b, c = 3.4445, -4.775, 2.0315
    x = update / np.linalg.norm(update)
    x = x.T if update.shape[0] > update.shape[1] else x
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return np.asarray(x.T if update.shape[0] > update.shape[1] else x)


def gradients(net: nn.Module, source: np.random.Generator) -> dict[str, np.ndarray]:
    found = {}
    for name, p in net.named_parameters():
        found[name] = source.normal(size=tuple(p.shape))
        p.grad = torch.from_numpy(found[name]).to(p.dtype)
    return found


def test_matrices_move_by_the_equation_and_the_rest_by_adamw() -> None:
    torch.manual_seed(0)
    net = Net().double()
    twin = Net().double()
    twin.load_state_dict(net.state_dict())
    optimiser = make_optimiser(net, CONFIG)
    names = optimiser.names
    assert names[:2] == ["linear.weight", "wide.weight"]
    assert sorted(names) == sorted(name for name, _ in net.named_parameters())
    adamw = make_optimiser(twin, AdamWConfig(lr=0.02, weight_decay=0.1))
    weights = {name: dict(net.named_parameters())[name] for name in names[:2]}
    expected = {name: p.detach().numpy().copy() for name, p in weights.items()}
    momenta = {name: np.zeros_like(value) for name, value in expected.items()}
    source, again = np.random.default_rng(1), np.random.default_rng(1)
    for _ in range(4):
        given = gradients(net, source)
        gradients(twin, again)
        optimiser.step(0.02)
        adamw.step(0.02)
        for name, theta in expected.items():
            momenta[name] = 0.9 * momenta[name] + 0.1 * given[name]
            step = orthogonal(0.9 * momenta[name] + 0.1 * given[name])
            size = 0.2 * np.sqrt(max(theta.shape))
            expected[name] = theta - 0.02 * (size * step + 0.1 * theta)
    for name, theta in expected.items():
        # torch's Newton-Schulz is in bf16; four steps move an entry by up to 0.04.
        np.testing.assert_allclose(weights[name].detach().numpy(), theta, rtol=0, atol=1e-3)
    theirs = dict(twin.named_parameters())
    for name, p in net.named_parameters():
        if name not in expected:
            assert torch.equal(p, theirs[name]), name


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_saved_and_loaded_it_goes_on_to_the_bit(steps: int) -> None:
    nets = [Net(), Net()]
    nets[1].load_state_dict(nets[0].state_dict())
    optimisers = [make_optimiser(net, CONFIG) for net in nets]
    source, again = np.random.default_rng(1), np.random.default_rng(1)
    for _ in range(steps):
        gradients(nets[0], source)
        optimisers[0].step(CONFIG.lr)
        gradients(nets[1], again)
    nets[1].load_state_dict(nets[0].state_dict())
    optimisers[1].load_state(optimisers[0].state())
    for _ in range(2):
        for net, each, optimiser in zip(nets, (source, again), optimisers, strict=True):
            gradients(net, each)
            optimiser.step(0.03)
    for (name, p), other in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(p, other), name


def test_it_is_torchs_to_the_bit_where_nothing_is_split() -> None:
    nets = [Net(), Net()]
    nets[1].load_state_dict(nets[0].state_dict())
    optimiser = make_optimiser(nets[0], CONFIG)
    theirs = torch.optim.Muon(
        [nets[1].linear.weight, nets[1].wide.weight],
        lr=0.02,
        weight_decay=0.1,
        momentum=0.9,
        adjust_lr_fn="match_rms_adamw",
    )
    source, again = np.random.default_rng(1), np.random.default_rng(1)
    for _ in range(3):
        gradients(nets[0], source)
        gradients(nets[1], again)
        optimiser.step(0.02)
        theirs.step()  # type: ignore[no-untyped-call]
    assert torch.equal(nets[0].linear.weight, nets[1].linear.weight)
    assert torch.equal(nets[0].wide.weight, nets[1].wide.weight)


@pytest.mark.parametrize(("split", "rows"), [("qkv", [16, 8, 8]), ("heads", [4] * 8), (None, [32])])
def test_projections_that_are_split_move_as_matrices_of_their_own(
    split: Literal["qkv", "heads"] | None, rows: list[int]
) -> None:
    torch.manual_seed(0)
    layer = Attention(16, heads=4, kv_heads=2)
    parts = nn.ParameterList(x.clone() for x in torch.split(layer.qkv.weight, rows))
    own = make_optimiser(layer, CONFIG.model_copy(update={"split": split}))
    apart = make_optimiser(parts, CONFIG)
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


def test_a_split_without_projections_is_refused() -> None:
    with pytest.raises(InputError, match=r"optimiser\.split"):
        make_optimiser(Net(), CONFIG.model_copy(update={"split": "heads"}))
