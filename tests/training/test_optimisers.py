from __future__ import annotations

import numpy as np
import torch
from torch import nn

from normattn.lab.training.config import AdamWConfig, TigerConfig
from normattn.lab.training.optim import group_parameters, make_optimiser
from normattn.models import CausalLM, CausalLMConfig

from .toy import ToyModel


def test_adamw_matches_its_equation_and_spares_vectors_from_decay() -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 2).double()
    config = AdamWConfig(lr=0.01, betas=(0.9, 0.8), eps=1e-6, weight_decay=0.5)
    optimiser = make_optimiser(net, config)
    assert optimiser.names == ["weight", "bias"]
    named = dict(net.named_parameters())
    expected = {name: p.detach().numpy().copy() for name, p in named.items()}
    first = {name: np.zeros_like(value) for name, value in expected.items()}
    second = {name: np.zeros_like(value) for name, value in expected.items()}
    generator = np.random.default_rng(1)
    for t in range(1, 5):
        for name, p in named.items():
            g = generator.normal(size=tuple(p.shape))
            p.grad = torch.from_numpy(g)
            decay = 0.5 if name == "weight" else 0.0
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.8 * second[name] + 0.2 * g**2
            m, v = first[name] / (1 - 0.9**t), second[name] / (1 - 0.8**t)
            expected[name] = expected[name] * (1 - 0.01 * decay) - 0.01 * m / (np.sqrt(v) + 1e-6)
        optimiser.step(0.01)
    for name, p in named.items():
        np.testing.assert_allclose(p.detach().numpy(), expected[name], rtol=1e-12)


def test_every_parameter_is_in_one_group_and_a_tied_one_once() -> None:
    model = ToyModel()
    groups = group_parameters(model)
    assert list(groups.embeddings) == ["embedding.weight"]
    assert list(groups.matrices) == [f"blocks.{i}.feed_forward.weight" for i in range(2)]
    assert all(name.endswith((".bias", "norm.weight")) for name in groups.vectors)
    names = [name for name, _ in groups.items()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_what_a_score_or_a_unit_learns_is_a_vector() -> None:
    settings = {"vocab_size": 11, "dim": 16, "layers": 1, "train_length": 8}
    unit = CausalLM(CausalLMConfig.model_validate({**settings, "block": "gau", "key_size": 8}))
    groups = group_parameters(unit)
    assert [name for name in groups.vectors if "gamma" in name]
    assert all(name.endswith(".weight") for name in groups.matrices)


def test_frozen_parameters_are_left_out() -> None:
    model = ToyModel()
    model.embedding.weight.requires_grad_(False)
    names = make_optimiser(model, TigerConfig()).names
    assert "embedding.weight" not in names
    assert len(names) == len(list(model.parameters())) - 1
