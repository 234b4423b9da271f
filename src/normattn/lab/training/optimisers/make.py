"""From an optimiser's settings to the optimiser of a model."""

from __future__ import annotations

import torch
from torch import nn

from normattn.errors import InputError
from normattn.lab.training.optimisers.config import (
    AdamWConfig,
    MuonConfig,
    OptimiserConfig,
    TigerConfig,
)
from normattn.lab.training.optimisers.groups import ParameterGroups, group_parameters
from normattn.lab.training.optimisers.muon import Muon
from normattn.lab.training.optimisers.tiger import Tiger


def make_optimiser(
    model: nn.Module, config: OptimiserConfig
) -> tuple[torch.optim.Optimizer, list[str]]:
    """The optimiser over `model`'s trainable parameters and their names in its order."""
    groups = group_parameters(model)
    names = [name for name, _ in groups.items()]
    if not names:
        raise InputError("the model has no trainable parameter")
    if isinstance(config, TigerConfig):
        return Tiger(groups, config.lr, config.beta, config.weight_decay), names
    if isinstance(config, MuonConfig):
        muon = Muon(groups, config)
        return muon, muon.names
    return _adamw(groups, config), names


def _adamw(groups: ParameterGroups, config: AdamWConfig) -> torch.optim.AdamW:
    """torch's AdamW in its fused form where the parameters allow it; no decay on vectors."""
    decayed = [*groups.matrices.values(), *groups.embeddings.values()]
    plain = list(groups.vectors.values())
    members = [(decayed, config.weight_decay), (plain, 0.0)]
    fused = all(p.device.type in ("cpu", "cuda") for p in (*decayed, *plain))
    return torch.optim.AdamW(
        [{"params": params, "weight_decay": decay} for params, decay in members if params],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=fused,
        foreach=None if fused else True,
    )
