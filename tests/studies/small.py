"""Requests of every study that are small enough for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def qknorm(folder: Path) -> str:
    corpus, first = multi_layout(folder / "pairs"), 'scores = ["Baseline", "KNA"]'
    loop = {"seeds": 1, "steps": 6, "batch": "batch_tokens = 1300", "data": "vocab_size = 280"}
    return _written(folder / "qknorm.toml", QKNORM, first, "layers = 1, heads = 2", corpus, **loop)


def realformer(folder: Path, texts: Path) -> str:
    model = 'layers = 2, heads = 2, norm = "layer", train_length = 8'
    loop = {"seeds": 1, "steps": 4, "data": "vocab_size = 260, test_fraction = 0.3"}
    return _written(folder / "realformer.toml", REALFORMER, "", model, texts, **loop)


def rmsnorm(folder: Path) -> str:
    corpus = write_relations(folder / "documents", count=12)
    loop = {"seeds": 2, "steps": 6, "data": "vocab_size = 120, max_tokens = 16"}
    return _written(folder / "rmsnorm.toml", RMSNORM, "", "layers = 1, heads = 1", corpus, **loop)


def _written(path: Path, own: str, first: str, model: str, corpus: Path, **loop: Any) -> str:
    """Write a preset: `LOOP` filled in, then the study's `own` groups."""
    loop = {"batch": "batch_size = 4", **loop}
    path.write_text(first + LOOP.format(model=model, corpus=corpus, **loop) + own)
    return str(path)


FEW: dict[str, Any] = {
    "training.steps": 5,
    "training.checkpoint_seconds": 0,
    "evaluation.max_windows": 3,
}
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
    "mechanism": {
        "training.steps": 5,
        "training.checkpoint_seconds": 0,
        "mechanism.max_windows": 4,
    },
    "realformer": {
        "sizes.small.rows": [
            *("PostLN", "RealFormer", "RealFormer-half", "ReZeroNoNorm", "RealFormer-from-PostLN")
        ]
    },
}
VARIANTS: dict[str, tuple[str, ...]] = {"mechanism": ("Baseline", "KNA", "KNA-NoPE")}


def request(study: str, tiny: Path, folder: Path, out: Path) -> Request:
    makers = {
        "qknorm": lambda: qknorm(folder),
        "realformer": lambda: realformer(folder, tiny.parent / "texts"),
        "rmsnorm": lambda: rmsnorm(folder),
    }
    preset = makers[study]() if study in makers else str(tiny)
    return Request(preset, VARIANTS.get(study), changes=CHANGES.get(study, {}), out=out)
