"""The Triton kernel: in the interpreter, in a process of its own; and what it does not serve."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from normattn.kernels import Problem, Visibility
from normattn.kernels.capabilities import why_not
from score.cases import tensors

INTERPRETED = Path(__file__).with_name("interpreted_triton.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_in_the_interpreter() -> None:
    """Outputs and gradients; the import hook of jaxtyping would change the programs' source."""
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=")
    done = subprocess.run(
        (*command, "-p", "no:xdist", str(INTERPRETED)),
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _problem() -> Problem:
    q, k, v = (x.detach().float() for x in tensors((1, 2, 5, 4), (1, 2, 5, 4), (1, 2, 5, 4)))
    key = torch.arange(5)
    return Problem(q, k, v, Visibility(True, key, key, True), q, k, 2)


def test_it_needs_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert why_not("triton", _problem()) == "it runs on a CUDA device, not on a CPU"


def test_it_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "triton is not installed" in str(why_not("triton", _problem()))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"far_q": None, "far_k": None, "window": None}, "there is only one"),
        ({"cap": 5.0}, "it has no cap"),
        ({"sink": torch.zeros(2)}, "it has no sink"),
        ({"bias": torch.zeros(2, 5)}, "no bias"),
        ({"dropout": 0.1}, "drops no weights"),
        (
            {"q": torch.zeros(1, 2, 7, 4), "far_q": torch.zeros(1, 2, 7, 4)},
            "a key at every query's position",
        ),
        ({"q": torch.zeros(1, 2, 5, 4, dtype=torch.float64)}, "float32, float16 or bfloat16"),
        ({"causal": False}, "for causal attention"),
        ({"aligned": False}, "consecutive positions"),
        ({"window_seen": 3}, "plain causality"),
        ({"padding": torch.zeros(1, 5, dtype=torch.bool)}, "no padding"),
    ],
)
def test_what_it_does_not_serve(
    changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    given = _problem()
    assert why_not("triton", given) is None
    seen = {"window" if n == "window_seen" else n: x for n, x in changes.items() if n in SEEN}
    others = {n: x for n, x in changes.items() if n not in SEEN}
    given = replace(given, visibility=replace(given.visibility, **seen), **others)
    assert reason in str(why_not("triton", given))


SEEN = {"causal", "aligned", "window_seen", "padding"}
