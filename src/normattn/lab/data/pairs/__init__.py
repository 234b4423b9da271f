"""Sentence pairs: `parse_pairs("catalogues")`, two aligned files, JSON lines, a folder by split.

A new kind is one new file in this folder that registers itself.
"""

from __future__ import annotations

import importlib
import pkgutil

from normattn.lab.data.pairs.source import PAIRS, Languages, Pair, PairSource, parse_pairs

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

from normattn.lab.data.pairs.batches import PairBatch, PairBatches  # noqa: E402
from normattn.lab.data.pairs.config import PairsConfig  # noqa: E402
from normattn.lab.data.pairs.pair_data import PairData, PairSplit  # noqa: E402
from normattn.lab.data.pairs.prepare import look_for_pairs, prepare_pairs  # noqa: E402

__all__ = [
    "PAIRS",
    "Languages",
    "Pair",
    "PairBatch",
    "PairBatches",
    "PairData",
    "PairSource",
    "PairSplit",
    "PairsConfig",
    "look_for_pairs",
    "parse_pairs",
    "prepare_pairs",
]
