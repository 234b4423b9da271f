"""How a benchmark is run: rounds, threads, lengths, device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from normattn.errors import InputError

LEAST_ROUNDS = 9
_WINDOW = 512
_CPU_LENGTHS = (4096, 8192)
_GPU_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class Settings:
    """Everything that a measurement depends on beside the machine and the versions.

    `quick` is a run of seconds with small sizes that only shows that everything runs: it claims
    nothing about goals.
    """

    rounds: int = LEAST_ROUNDS
    threads: int = 1
    lengths: tuple[int, ...] = _CPU_LENGTHS
    device: str = "cpu"
    quick: bool = False

    @classmethod
    def of(
        cls,
        rounds: int | None = None,
        threads: int = 1,
        lengths: tuple[int, ...] | None = None,
        device: str | None = None,
        quick: bool = False,
    ) -> Settings:
        """What was asked for, the rest filled in.

        Raises `InputError` for fewer than 9 rounds (a quick run may have fewer), for lengths that
        the two regimes of window 512 do not fit into, and for a device that is not there.
        """
        device = _device(device)
        rounds = rounds if rounds is not None else (2 if quick else LEAST_ROUNDS)
        if rounds < LEAST_ROUNDS and not quick:
            raise InputError(
                f"--rounds must be at least {LEAST_ROUNDS}, got {rounds}: a median of fewer says "
                "too little (--quick makes a smoke run of any number)"
            )
        if lengths is None:
            known = _CPU_LENGTHS if device == "cpu" else _GPU_LENGTHS
            lengths = (64,) if quick else known
        settings = cls(rounds, threads, tuple(sorted(set(lengths))), device, quick)
        least = settings.window + (0 if device != "cpu" else 1)
        if settings.lengths[0] < least:
            raise InputError(
                f"--lengths must be at least {least}, beyond the window of {settings.window}, "
                f"got {settings.lengths[0]}"
            )
        return settings

    @property
    def on_gpu(self) -> bool:
        """Whether a CUDA device is measured."""
        return self.device != "cpu"

    @property
    def window(self) -> int:
        """The window of two-regime scores."""
        return 16 if self.quick else _WINDOW

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The precisions that are measured; a GPU is measured in bf16 alone."""
        half = {"bf16": torch.bfloat16}
        return half if self.on_gpu else {"fp32": torch.float32, **half}

    def summary(self) -> dict[str, Any]:
        """The settings as JSON values, without the lengths: every case has its own."""
        values = dataclasses.asdict(self)
        del values["lengths"]
        return values


def _device(name: str | None) -> str:
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise InputError(f"--device must be cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no CUDA device here; use --device cpu")
    return name
