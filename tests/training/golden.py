"""The golden run: 100 seeded steps. `cd tests && python -m training.golden` records it anew."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from normattn.lab.runs import describe_environment, read_metrics
from normattn.lab.training import TrainingConfig, train_causal

RECORD = Path(__file__).with_name("golden.json")
CONFIG = TrainingConfig.parse(
    {
        "steps": 100,
        "batch_size": 8,
        "device": "cpu",
        "seed": 20,
        "model": {
            "dim": 32,
            "layers": 2,
            "heads": 2,
            "train_length": 32,
            "dropout": 0.1,
            "score": "KNA-logn",
            "placement": "PreLN",
        },
        "data": {"corpus": "synthetic:copy?low=4&high=8", "vocab_size": 32},
        "optimiser": {"name": "adamw", "lr": 3e-3},
        "schedule": {"name": "cosine", "warmup_steps": 10},
    }
)


def environment() -> dict[str, Any]:
    """What the last digits depend on."""
    described = describe_environment()
    return {key: described[key] for key in ("torch", "cpu", "cpu_capability")}


def losses(out: Path) -> list[float]:
    train_causal(CONFIG, out, show_progress=False)
    return [record["loss"] for record in read_metrics(out / "metrics.jsonl")]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        record = {"environment": environment(), "losses": losses(Path(folder) / "run")}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
