"""The settings of each optimiser; a setting of another optimiser is an unknown field."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from normattn.structured import Settings

_Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class AdamWConfig(Settings):
    """AdamW (arXiv 1711.05101). Weight decay acts on matrices and embeddings only.

    `moments`: numbers of state for each weight, at least.
    """

    moments: ClassVar[int] = 2
    name: Literal["adamw"] = "adamw"
    lr: float = Field(default=1e-3, gt=0.0, le=10.0)
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0.0, le=1.0)
    weight_decay: float = Field(default=0.1, ge=0.0, le=10.0)


class TigerConfig(Settings):
    """Tiger (kexue 9512). `lr` is relative: it is multiplied by the size of each parameter."""

    moments: ClassVar[int] = 1
    name: Literal["tiger"] = "tiger"
    lr: float = Field(default=1e-3, gt=0.0, le=10.0)
    beta: _Beta = 0.965
    weight_decay: float = Field(default=0.01, ge=0.0, le=10.0)


class MuonConfig(Settings):
    """Muon (arXiv 2502.16982) for matrices, AdamW with `betas` and `eps` for all else.

    One `lr` for both. Weight decay acts on matrices and embeddings only.
    """

    moments: ClassVar[int] = 1
    name: Literal["muon"] = "muon"
    lr: float = Field(default=1e-3, gt=0.0, le=10.0)
    momentum: _Beta = 0.95
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0.0, le=1.0)
    weight_decay: float = Field(default=0.1, ge=0.0, le=10.0)


OptimiserConfig = Annotated[AdamWConfig | TigerConfig | MuonConfig, Field(discriminator="name")]
