"""A reader follows q from a model to a kernel by the files that the architecture names."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

import normattn
from normattn.kernels import sdpa
from normattn.models import CausalLM, CausalLMConfig
from normattn.score.rotary import Rotation

ROOT = Path(normattn.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def test_a_query_passes_the_files_that_the_page_names(monkeypatch: pytest.MonkeyPatch) -> None:
    met, passed = set[str](), set[str]()

    def spied(call: Any) -> Any:
        def spy(*given: Any, **named: Any) -> Any:
            paths = (Path(frame.filename) for frame in traceback.extract_stack())
            met.update(str(path.relative_to(ROOT)) for path in paths if path.is_relative_to(ROOT))
            return call(*given, **named)

        return spy

    kernel = "scaled_dot_product_attention"
    monkeypatch.setattr(sdpa, kernel, spied(getattr(sdpa, kernel)))
    monkeypatch.setattr(Rotation, "__call__", spied(Rotation.__call__))
    sizes: dict[str, Any] = {"vocab_size": 7, "dim": 8, "layers": 1, "heads": 2, "train_length": 8}
    beside = {"layers/residual.py", "layers/plan.py", "score/rotary.py"}
    for score in ("KNA", "QKRMSNorm-RotateFirst"):  # what is absorbed, and what is not
        sizes["score"] = score
        for _ in range(2):  # a plan that is kept is made at the first call
            met.clear()
            CausalLM(CausalLMConfig(**sizes))(torch.zeros(1, 5, dtype=torch.int64))
        passed |= met
        assert len(met - beside) <= 6
    query = PAGE.read_text(encoding="utf-8").split("## One measurement")[0]
    named = re.findall(r"^\| `(\w+/\w+\.py)`", query, re.MULTILINE)
    assert passed - (beside - {"layers/plan.py"}) == set(named)
