"""Tiger against a plain numpy reading of its equation, one parameter at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from normattn.errors import InputError
from normattn.lab.training.optim import Tiger, group_parameters

LR, BETA, DECAY = 0.01, 0.9, 0.02


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.linear = nn.Linear(3, 4)
        self.gain = nn.Parameter(torch.ones(2, 3))


def step_by_hand(kind: str, theta: np.ndarray, m: np.ndarray, g: np.ndarray) -> np.ndarray:
    """One step in float64; `m` is updated in place."""
    m *= BETA
    m += (1 - BETA) * g
    if kind == "vector":
        return np.asarray(theta - LR / 2 * np.sign(m))
    if kind == "matrix":
        rate = LR * np.sqrt(np.mean(theta**2))
    else:
        rate = LR * np.array([[np.sqrt(np.mean(row**2))] for row in theta])
    return np.asarray(theta - rate * (np.sign(m) + DECAY * theta))


def test_five_steps_match_the_equation() -> None:
    torch.manual_seed(0)
    net = Net().double()
    optimiser = Tiger(group_parameters(net), LR, BETA, DECAY)
    kinds = {
        "embedding.weight": "embedding",
        "linear.weight": "matrix",
        "linear.bias": "vector",
        "gain": "vector",
    }
    named = dict(net.named_parameters())
    expected = {name: p.detach().numpy().copy() for name, p in named.items()}
    momenta = {name: np.zeros_like(value) for name, value in expected.items()}
    generator = np.random.default_rng(1)
    for _ in range(5):
        for name, p in named.items():
            gradient = generator.normal(size=tuple(p.shape))
            p.grad = torch.from_numpy(gradient)
            expected[name] = step_by_hand(kinds[name], expected[name], momenta[name], gradient)
        optimiser.step()
        for name, p in named.items():
            np.testing.assert_allclose(p.detach().numpy(), expected[name], rtol=1e-13, atol=1e-15)


def test_a_zero_gradient_from_the_start_moves_only_by_decay() -> None:
    net = Net().double()
    optimiser = Tiger(group_parameters(net), LR, BETA, DECAY)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimiser.step()
    after = dict(net.named_parameters())
    assert torch.equal(after["gain"], before["gain"])
    assert torch.equal(after["linear.bias"], before["linear.bias"])
    weight = before["linear.weight"]
    shrunk = weight * (1 - LR * weight.square().mean().sqrt() * DECAY)
    torch.testing.assert_close(after["linear.weight"].detach(), shrunk, rtol=1e-14, atol=0)


@pytest.mark.parametrize("wrong", [{"lr": 0.0}, {"beta": 1.0}, {"weight_decay": -0.1}])
def test_values_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match="Tiger needs"):
        Tiger(group_parameters(Net()), **wrong)


def test_a_matrix_that_could_never_move_is_refused() -> None:
    net = Net()
    nn.init.zeros_(net.linear.weight)
    with pytest.raises(InputError, match=r"linear\.weight"):
        Tiger(group_parameters(net))
