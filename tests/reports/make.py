"""Records made by hand, for tests of everything that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from normattn.reports.records import Record

L = 8


def make_record(
    correct: Sequence[Sequence[int]],
    *,
    tokens: Sequence[Sequence[int]] | None = None,
    variant: str = "Baseline",
    method: str = "",
    seed: int = 0,
    protocol: str = "non_repeated",
    length: int = 32,
    documents: Sequence[str] | None = None,
    **changes: Any,
) -> Record:
    """A record whose windows have the given correct counts; bins share the length equally."""
    bins = len(correct[0])
    width = length // bins
    counts = tokens or [[width] * bins for _ in correct]
    name = "-".join(filter(None, (variant, method)))
    fields: dict[str, Any] = {
        "key": f"{name}-{seed}-{protocol}-{length}",
        "run": f"{variant}-{seed}",
        "seed": seed,
        "variant": variant,
        "method": method,
        "name": name,
        "spec": f"{name}@{L}",
        "protocol": protocol,
        "length": length,
        "train_length": L,
        "weights": f"{variant}-{seed}",
        "data": f"{protocol}-{length}-{len(correct)}",
        "documents": tuple(documents or (f"d{i}" for i in range(len(correct)))),
        "edges": tuple(range(0, length + 1, width)),
        "tokens": counts,
        "correct": correct,
        "loss": [[0.5 * t for t in row] for row in counts],
    }
    return Record.model_validate(fields | changes)


def random_records(
    variants: Sequence[str] = ("Baseline", "KNA", "KNA-logn"),
    methods: Sequence[str] = ("", "YaRN"),
    seeds: Sequence[int] = (0, 1),
    documents: int = 6,
) -> list[Record]:
    """Every protocol for every row; KNA is better by a fifth of its tokens."""
    generator = np.random.default_rng(7)
    made = []
    for variant in variants:
        chance = 0.55 if variant.startswith("KNA") else 0.35
        for method in methods:
            for seed in seeds:
                for protocol, length in (
                    ("train_length", L),
                    ("non_repeated", 4 * L),
                    ("repeated", 4 * L),
                    ("last_segment", L),
                    ("last_segment", 4 * L),
                ):
                    bins = 4 if protocol == "last_segment" else 4 * length // L
                    width = L // 4
                    correct = generator.binomial(width, chance, (documents, bins))
                    extra: dict[str, Any] = {}
                    if protocol == "repeated":
                        extra["seen_tokens"] = [[width] * bins] * documents
                        extra["seen_correct"] = correct.tolist()
                    start = length - bins * width
                    made.append(
                        make_record(
                            correct.tolist(),
                            tokens=[[width] * bins] * documents,
                            variant=variant,
                            method=method,
                            seed=seed,
                            protocol=protocol,
                            length=length,
                            edges=tuple(range(start, length + 1, width)),
                            **extra,
                        )
                    )
    return made
