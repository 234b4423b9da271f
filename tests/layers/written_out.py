"""What tests of layers write out by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import torch
from torch import Tensor


def rotate(x: Tensor) -> Tensor:
    """Rotary position by complex numbers, half-split layout; x (…, T, D)."""
    half = x.shape[-1] // 2
    theta = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * theta
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat([turned.real, turned.imag], -1)


def of_program(program: str, cases: object) -> dict[str, Any]:
    """What a Python program makes of `cases`, given as JSON, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found
