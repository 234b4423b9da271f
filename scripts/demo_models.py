"""Take the two models of `normattn demo` from a finished training, in bfloat16.

    normattn reproduce keynorm --preset base --variants Baseline,KNA \\
        --methods unmodified,YaRN,ReRoPE --seeds 20, --out RUN
    python scripts/demo_models.py RUN

The frozen corpus has only text under the MIT, BSD, Apache and ISC licences.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch

from normattn.lab.demo import FOLDER, MODELS
from normattn.models import CausalLM, load_model
from normattn.models.pretrained import save_model


def with_gains(model: CausalLM) -> CausalLM:
    """An equal model whose norms have gains of one, as models of other libraries do."""
    converted = CausalLM(model.config.model_copy(update={"norm_gain": True}))
    missing = converted.load_state_dict(model.state_dict(), strict=False)
    assert not missing.unexpected_keys
    assert all(bool((converted.state_dict()[name] == 1).all()) for name in missing.missing_keys)
    return converted


def main(run: Path, seed: int = 20) -> None:
    """Copy the tokeniser, and each model rounded to bfloat16."""
    for name in MODELS:
        trained = run / "cells" / name / f"seed{seed}"
        save_model(with_gains(load_model(trained / "model")).to(torch.bfloat16), FOLDER / name)
        shutil.copy(trained / "tokeniser.json", FOLDER / "tokeniser.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
