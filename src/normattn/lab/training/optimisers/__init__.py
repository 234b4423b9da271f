"""Optimisers as values: AdamW, Tiger and Muon, with parameters grouped by what they are."""

from normattn.lab.training.optimisers.config import (
    AdamWConfig,
    MuonConfig,
    OptimiserConfig,
    TigerConfig,
)
from normattn.lab.training.optimisers.groups import ParameterGroups, group_parameters
from normattn.lab.training.optimisers.make import make_optimiser
from normattn.lab.training.optimisers.muon import Muon
from normattn.lab.training.optimisers.tiger import Tiger

__all__ = [
    "AdamWConfig",
    "Muon",
    "MuonConfig",
    "OptimiserConfig",
    "ParameterGroups",
    "Tiger",
    "TigerConfig",
    "group_parameters",
    "make_optimiser",
]
