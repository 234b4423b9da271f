"""Requests of every study that are small enough for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data.helpers import multi_layout, write_relations
from normattn.lab.sweep.run import Request

LOOP = """
summary = "for tests"
seeds = {seeds}

[training]
steps = {steps}
{batch}
checkpoint_seconds = 0
device = "cpu"
schedule = {{ warmup_steps = 1 }}
model = {{ dim = 8, {model} }}
data = {{ corpus = "{corpus}", {data} }}
"""
QKNORM = """
[evaluation]
max_sentences = 4
beam = 1

[rates]
scores = ["Baseline"]
multiples = [1, 8]
max_sentences = 6
training = { steps = 3, inspect_every = 1 }

[vision]
scores = ["QKBatchNorm"]
rates = { scores = ["QKBatchNorm"], multiples = [2] }

[vision.training]
steps = 2
batch_size = 4
checkpoint_seconds = 0
device = "cpu"
model = { dim = 8, layers = 1, heads = 2, patch = 4, pool = "mean" }
data = { source = "digits", max_images = 60 }
schedule = { warmup_steps = 1 }
"""
REALFORMER = """
[sizes.small]
training = {}

[sizes.large]
rows = ["PostLN", "RealFormer"]
training = { model = { dim = 12 } }

[grid]
size = "small"
rows = ["PostLN"]
rates = [1e-3]
dropouts = [0.0]
steps = 2
warmup_steps = 1

[evaluation]
max_windows = 8
gradient_texts = 4
"""
RMSNORM = "\n[timing]\nrounds = 2\n"


def preset(study: str, tiny: Path, folder: Path) -> str:
    """A preset for the study: `tiny`, or a file in `folder` with what it asks for itself."""
    loop: dict[str, Any] = {"seeds": 1, "batch": "batch_size = 4"}
    first = own = ""
    if study == "qknorm":
        pytest.importorskip("sacrebleu", reason="BLEU needs sacrebleu")
        pytest.importorskip("sklearn", reason="the images are scikit-learn's")
        first, own = 'scores = ["Baseline", "KNA"]', QKNORM
        loop |= {"steps": 6, "batch": "batch_tokens = 1300", "data": "vocab_size = 280"}
        loop |= {"model": "layers = 1, heads = 2", "corpus": multi_layout(folder / "pairs")}
    elif study == "realformer":
        own = REALFORMER
        loop |= {"steps": 4, "data": "vocab_size = 260, test_fraction = 0.3"}
        loop |= {"model": 'layers = 2, heads = 2, norm = "layer", train_length = 8'}
        loop |= {"corpus": tiny.parent / "texts"}
    elif study == "rmsnorm":
        own = RMSNORM
        loop |= {"seeds": 2, "steps": 6, "data": "vocab_size = 120, max_tokens = 16"}
        loop |= {"model": "layers = 1, heads = 1"}
        loop |= {"corpus": write_relations(folder / "documents", count=12)}
    else:
        return str(tiny)
    path = folder / f"{study}.toml"
    path.write_text(first + LOOP.format(**loop) + own)
    return str(path)


LOOPED: dict[str, Any] = {"training.steps": 5, "training.checkpoint_seconds": 0}
FEW: dict[str, Any] = {**LOOPED, "evaluation.max_windows": 3}
CONTINUED: dict[str, Any] = {
    **FEW,
    "continued.steps": 4,
    "continued.keep": [1, 4],
    "continued.warmup_steps": 1,
}
CHANGES: dict[str, dict[str, Any]] = {
    "window": FEW,
    "continue": {**CONTINUED, "continued.read": [1, 4, 8]},
    "retrofit": CONTINUED,
    "mechanism": {**LOOPED, "mechanism.max_windows": 4},
    "realformer": {
        "sizes.small.rows": [
            *("PostLN", "RealFormer", "RealFormer-half", "ReZeroNoNorm", "RealFormer-from-PostLN")
        ]
    },
}
VARIANTS: dict[str, tuple[str, ...]] = {"mechanism": ("Baseline", "KNA", "KNA-NoPE")}


def request(study: str, tiny: Path, folder: Path, out: Path) -> Request:
    changes = CHANGES.get(study, {})
    return Request(preset(study, tiny, folder), VARIANTS.get(study), changes=changes, out=out)
