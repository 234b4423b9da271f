"""The machine: what it is, and what it can do at best in this very run.

The probes are entries like any other: a square matrix product (operations per second), a copy that
no cache holds (bytes per second) and an exponential within the cache (exponentials per second).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import normattn
from normattn.errors import InputError
from normattn.lab.runs.environment import describe_environment
from normattn.lab.runs.timing import Step, Timing

# The packages of this library whose text decides what is measured.
_MEASURED = ("bench", "kernels", "layers", "models", "score")


@dataclass(frozen=True)
class Probes:
    """What the machine reached beside the entries: operations, bytes, exponentials per second."""

    flops: float
    bytes: float
    exps: float

    def summary(self) -> dict[str, float]:
        """The rates in units that people read."""
        return {
            "gemm_gflops": self.flops / 1e9,
            "bandwidth_gb_per_s": self.bytes / 1e9,
            "gexp_per_s": self.exps / 1e9,
        }


class Machine:
    """The probes for one precision, to be interleaved with what they explain."""

    GEMM, COPY, EXP = "GEMM", "copy", "exp"

    def __init__(self, dtype: torch.dtype, device: str = "cpu", small: bool = False) -> None:
        gpu = device != "cpu"
        self.size = 64 if small else (8192 if gpu else 1024)
        self.copied = 2**16 if small else (2**30 if gpu else 2**26)
        self.raised = 2**12 if small else (2**26 if gpu else 2**17)
        self.dtype, self.device = dtype, device

    def entries(self) -> dict[str, Step]:
        """The three probes by name."""
        a, b = (torch.randn(self.size, self.size, device=self.device) for _ in range(2))
        a, b = a.to(self.dtype), b.to(self.dtype)
        product = torch.empty_like(a)
        source = torch.ones(self.copied // 4, device=self.device)
        target = torch.empty_like(source)
        # Softmax takes exponentials in float32 whatever the precision of the scores.
        x = torch.randn(self.raised, device=self.device)
        y = torch.empty_like(x)
        return {
            self.GEMM: lambda: torch.mm(a, b, out=product),
            self.COPY: lambda: target.copy_(source),
            self.EXP: lambda: torch.exp(x, out=y),
        }

    def reached(self, timings: Mapping[str, Timing]) -> Probes:
        """The rates, from the medians of the probes' rounds; a copy reads and writes."""
        return Probes(
            2.0 * self.size**3 / timings[self.GEMM].median,
            2.0 * self.copied / timings[self.COPY].median,
            self.raised / timings[self.EXP].median,
        )


def provenance(packages: Iterable[str], threads: int, device: str = "cpu") -> dict[str, Any]:
    """Machine, versions and source of a record.

    Raises `InputError` for a package that is not installed, naming the extra that brings it.
    """
    require_packages(packages)
    environment = describe_environment()
    facts = {
        "processor": environment["cpu"],
        "capability": environment["cpu_capability"],
        "features": {name: has for name, has in torch.cpu.get_capabilities().items() if has},
        "threads": threads,
        "python": environment["python"],
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "source": source_digest(),
    }
    if device != "cpu":
        facts["device"] = torch.cuda.get_device_name(device)
    return facts


def require_packages(packages: Iterable[str]) -> None:
    """Raise `InputError` unless every one is installed."""
    missing = [name for name in packages if not _installed(name)]
    if missing:
        raise InputError(
            f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not installed, and "
            "this benchmark measures against it; the extra `bench` brings it: "
            "pip install 'normattn[bench]'"
        )


@cache
def source_digest() -> str:
    """12 digits that change with the text of what is measured: a version is too coarse for that."""
    root = Path(normattn.__file__).parent
    digest = hashlib.sha256()
    for package in _MEASURED:
        for file in sorted((root / package).rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
