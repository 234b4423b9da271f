"""A reader follows q from a model to a kernel by the files that the architecture names."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import normattn
from normattn.kernels import sdpa
from normattn.models import CausalLM, CausalLMConfig
from normattn.score import rotary

ROOT = Path(normattn.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def _files() -> list[str]:
    """Our files in the stack of calls, outermost first."""
    paths = [Path(frame.filename) for frame in traceback.extract_stack()]
    return [str(path.relative_to(ROOT)) for path in paths if path.is_relative_to(ROOT)]


def test_a_query_passes_the_files_that_the_architecture_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met: list[str] = []
    product, turn = F.scaled_dot_product_attention, rotary.Rotation.__call__

    def spy(*args: Tensor, **words: object) -> Tensor:
        met.extend(_files())
        return product(*args, **words)  # type: ignore[arg-type]

    def spied(self: rotary.Rotation, x: Tensor, norm: rotary.NormAfter = None) -> Tensor:
        met.extend(_files())
        return turn(self, x, norm)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(rotary.Rotation, "__call__", spied)
    sizes: dict[str, Any] = {"vocab_size": 7, "dim": 8, "layers": 1, "heads": 2, "train_length": 8}
    passed = set()
    beside = {"layers/residual.py", "layers/plan.py", "score/rotary.py"}
    for score in ("KNA", "QKRMSNorm-RotateFirst"):  # what is absorbed, and what is not
        sizes["score"] = score
        for _ in range(2):  # a plan that is kept is made at the first call
            met.clear()
            CausalLM(CausalLMConfig(**sizes))(torch.zeros(1, 5, dtype=torch.int64))
        passed |= set(met)
        assert len(set(met) - beside) <= 6
    query = PAGE.read_text(encoding="utf-8").split("## One measurement")[0]
    named = re.findall(r"^\| `(\w+/\w+\.py)`", query, re.MULTILINE)
    assert passed - (beside - {"layers/plan.py"}) == set(named)
