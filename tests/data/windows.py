"""Training windows as they were recorded: `cd tests && python -m data.windows` records them anew.

Published numbers rest on them: a change here is a change of what every preset is trained on.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import tokenizers

from normattn.lab.data.batches import MaskedBatches, Masking, TrainingBatches
from normattn.lab.data.tokens import DataConfig, prepare_tokens

from .helpers import write_folder

RECORD = Path(__file__).with_name("windows.json")
VOCABULARY = 300
STEPS = (0, 1, 7, 1_000_000)


def recorded() -> dict[str, Any]:
    """What `windows` made of this corpus by the code that trained the published models."""
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def windows(folder: Path) -> dict[str, Any]:
    """The fingerprint of the tokens, and batches of plain, tiled and masked windows."""
    config = DataConfig(
        corpus=str(write_folder(folder / "text")),
        vocab_size=VOCABULARY,
        test_fraction=0.3,
        validation_fraction=0.2,
        tiled_fraction=0.3,
    )
    data = prepare_tokens(config, folder / "cache")
    plain = TrainingBatches(data.train, 64, 16, 11)
    tiled = TrainingBatches(data.train, 64, 16, 12, config.tiling)
    masked = MaskedBatches(plain, Masking(VOCABULARY))
    drawn: dict[str, Any] = {
        "plain": {step: plain.batch(step) for step in STEPS},
        "tiled": {step: tiled.batch(step) for step in STEPS},
        "masked": {step: masked.batch(step).ids for step in STEPS},
    }
    return {
        "tokenizers": tokenizers.__version__,
        "fingerprint": data.fingerprint,
        "first": {kind: rows[0][0, :8].tolist() for kind, rows in drawn.items()},
        "sha256": {
            kind: {
                str(step): hashlib.sha256(batch.astype("<i8").tobytes()).hexdigest()
                for step, batch in rows.items()
            }
            for kind, rows in drawn.items()
        },
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        RECORD.write_text(json.dumps(windows(Path(folder)), indent=1) + "\n", encoding="utf-8")
