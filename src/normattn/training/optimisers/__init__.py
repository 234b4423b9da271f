"""Optimisers as values: AdamW and Tiger, with parameters grouped by what they are."""

from normattn.training.optimisers.config import AdamWConfig, OptimiserConfig, TigerConfig
from normattn.training.optimisers.groups import ParameterGroups, group_parameters
from normattn.training.optimisers.make import make_optimiser
from normattn.training.optimisers.tiger import Tiger

__all__ = [
    "AdamWConfig",
    "OptimiserConfig",
    "ParameterGroups",
    "Tiger",
    "TigerConfig",
    "group_parameters",
    "make_optimiser",
]
