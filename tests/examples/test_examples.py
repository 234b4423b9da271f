"""The examples run: each script to its end, the notebook cell by cell."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

import apart
from normattn.score.parts import base as registry

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def own_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that an example registers are forgotten again."""
    registry.parts()
    monkeypatch.setattr(registry, "_PARTS", dict(registry._PARTS))


SCRIPTS = {
    "exploding_logits": "QKRMSNorm",
    "key_shards": "",
    "one_page": "equal to 1e-12",
    "own_score": "kernel:",
    "read_further": "with ReRoPE",
    "rescue_llama": "extended with YaRN",
}
"""The scripts, and what each prints at its end. Each asserts what it shows."""


def test_every_script_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SCRIPTS)


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_a_script_runs(name: str) -> None:
    if name == "rescue_llama":
        pytest.importorskip("transformers")
    path = EXAMPLES / f"{name}.py"
    ended = apart.run(f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')")
    assert ended.code == 0, ended.err
    assert SCRIPTS[name] in ended.out


def test_the_one_page_would_notice_a_difference() -> None:
    import torch

    page = runpy.run_path(str(EXAMPLES / "one_page.py"))
    q, k, v = torch.randn(3, 1, 1, 24, 8, dtype=torch.float64)
    plain = page["attention"](q, k, v)
    for changed in ({"key_norm": True}, {"log_n": 8}, {"rerope": 4}):
        assert (page["attention"](q, k, v, **changed) - plain).abs().max() > 1e-3


def test_the_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((EXAMPLES / "scores.ipynb").read_text("utf-8"))["cells"]
    names: dict[str, Any] = {"__name__": "__main__"}
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for number, source in enumerate(code):
        exec(compile(source, f"scores.ipynb, code cell {number}", "exec"), names)
    assert len(code) >= 4
    assert "trained as CosA-logn and extended with YaRN" in capsys.readouterr().out
    assert all(not cell.get("outputs") for cell in cells)
