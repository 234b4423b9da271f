"""How a model writes the turns of its tokens: the position embeddings that its layers take.

One row a token: cos and sin of its P angles, once, or twice (θ₀ … θ₀ … or θ₀ θ₀ θ₁ θ₁ …), or
cos + i·sin as one complex number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

Layout = Literal["once", "halves", "pairs", "complex"]
_REAL: tuple[Layout, ...] = ("once", "halves", "pairs")
NAME = "position_embeddings"


@dataclass(frozen=True)
class EmbeddingTables:
    """How position embeddings are made of frequencies.

    Attributes:
        layout: how the P angles of a token stand in a row.
        frequencies: θ_m, as trained (P,), in float64.
        amplitude: what cos and sin are multiplied with.
    """

    layout: Layout
    frequencies: Float[Tensor, " p"]
    amplitude: float

    def alike(self, other: EmbeddingTables | None) -> bool:
        """Whether both make the same."""
        if other is None or (self.layout, self.amplitude) != (other.layout, other.amplitude):
            return False
        return torch.equal(self.frequencies, other.frequencies)

    def make(
        self,
        ids: Int[Tensor, "b t"],
        frequencies: Float[Tensor, " p"],
        amplitude: float,
        like: Any,
    ) -> Any:
        """The position embeddings of these positions, of the kind of `like`."""
        first = like if isinstance(like, Tensor) else like[0]
        # In float32 on the device, as transformers does it.
        theta = frequencies.to(first.device, torch.float32)
        angle = ids.to(first.device)[..., None].float() * theta
        if self.layout == "complex":
            return (torch.polar(torch.ones_like(angle), angle) * amplitude).to(first.dtype)
        if self.layout == "halves":
            angle = torch.cat((angle, angle), -1)
        elif self.layout == "pairs":
            angle = angle.repeat_interleave(2, -1)
        return tuple((x * amplitude).to(first.dtype) for x in (angle.cos(), angle.sin()))


def unrotated(like: Any, size: float = 1.0) -> Any:
    """Position embeddings that turn nothing and multiply by `size`, of the kind of `like`."""
    if isinstance(like, Tensor):
        return torch.full_like(like, size)
    return torch.full_like(like[0], size), torch.zeros_like(like[1])


def find_tables(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | int | None:
    """Where the position embeddings stand among a layer's arguments; None where there are none."""
    given: list[tuple[str | int, Any]] = [*kwargs.items(), *enumerate(args)]
    given.sort(key=lambda pair: pair[0] != NAME)
    return next((name for name, value in given if is_table(value)), None)


def is_table(value: Any) -> bool:
    """Whether a value can be position embeddings."""
    if isinstance(value, Tensor):
        return bool(value.is_complex()) and value.dim() == 3
    if not (isinstance(value, tuple | list) and len(value) == 2):
        return False
    if not all(isinstance(table, Tensor) and table.is_floating_point() for table in value):
        return False
    return bool(value[0].dim() == 3 and value[0].shape == value[1].shape)


def read_tables(value: Any, spectra: Iterable[tuple[Tensor, float]]) -> EmbeddingTables | None:
    """How tables of positions 0 … T − 1 were made, of the spectrum that explains them best.

    `spectra` are pairs of frequencies and amplitude. None where none of them explains the tables.
    """
    cos, sin = (value.real, value.imag) if isinstance(value, Tensor) else value
    cos, sin = cos[0].double().cpu(), sin[0].double().cpu()
    close = 1e-4 if value[0].dtype in (torch.float32, torch.complex64, torch.float64) else 2e-2
    layouts = ("complex",) if isinstance(value, Tensor) else _REAL
    best, off = None, close
    for theta, given in spectra:
        size = given if abs(float(cos[0, 0]) - given) <= 1e-2 * given else float(cos[0, 0])
        for layout in layouts:
            tables = EmbeddingTables(layout, theta, size)
            mine = _wide(tables, cos.shape[0])
            if mine.shape[-1] != cos.shape[-1]:
                continue
            error = torch.stack((mine.cos() * size - cos, mine.sin() * size - sin)).abs().max()
            if float(error) < off:
                best, off = tables, float(error)
    return best


def _wide(tables: EmbeddingTables, count: int) -> Float[Tensor, "t w"]:
    angle = torch.arange(count, dtype=torch.float64)[:, None] * tables.frequencies
    if tables.layout == "halves":
        return torch.cat((angle, angle), -1)
    return angle.repeat_interleave(2, -1) if tables.layout == "pairs" else angle


def spectra_of(model: nn.Module) -> list[tuple[Tensor, float]]:
    """The frequencies (P,) that modules hold, and what cos and sin are multiplied with."""
    spectra = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name.endswith("inv_freq") and "original" not in name:
                prefix = name.removesuffix("inv_freq")
                size = getattr(module, f"{prefix}attention_scaling", 1.0)
                spectra.append((buffer.detach().double().cpu().flatten(), float(size)))
    return spectra
