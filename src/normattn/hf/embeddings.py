"""The cos and sin that an extended layer gets instead of the model's: a pre-hook of the layer."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.anatomy import Anatomy
from normattn.hf.attending import Memory
from normattn.hf.folding import amplitude, stretched
from normattn.hf.probing import Layer
from normattn.score import ScoreSpec


class Embeddings:
    """Called before a layer: cos = 1 and sin = 0 where it rotates inside, else other cos and sin.

    The tables are made by the code of the model's own rotary module, with other frequencies.
    """

    def __init__(
        self,
        found: Anatomy,
        layer: Layer,
        spec: ScoreSpec,
        inside: bool,
        attention: str | None,
        memory: Memory,
    ) -> None:
        self._attention, self._memory = attention, memory
        self._index, self._inside = layer.index, inside
        self._rotary: _Rotary | None = None
        if not inside and spec.spectrum is not None:
            self._rotary = _rotary(found, layer, spec)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments with other position embeddings."""
        self._refuse_change(module)
        if not self._inside and self._rotary is None:
            return None
        before = kwargs.get("position_embeddings")
        if before is None:
            raise InputError(f"layer {self._index} was called without position_embeddings")
        if self._rotary is None:
            # Rotating by nothing: the product with cos broadcasts over the tokens.
            cos, sin = (x[:1, :1] for x in before)
            other = torch.ones_like(cos), torch.zeros_like(sin)
        else:
            other = self._stretched(self._rotary, before, kwargs.get("position_ids"))
        return args, {**kwargs, "position_embeddings": other}

    def _stretched(
        self, rotary: _Rotary, before: tuple[Tensor, Tensor], ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if ids is None:
            raise InputError(
                f"layer {self._index} is not told the tokens' position_ids, so its positions cannot"
                " be stretched"
            )
        name, given = f"embeddings {rotary.layer_type} {before[0].dtype}", (ids,)
        found: tuple[Tensor, Tensor] | None = self._memory.get(name, given)
        if found is None:
            found = rotary(before[0], ids.to(before[0].device))
            self._memory.keep(name, given, found)
        return found

    def _refuse_change(self, module: nn.Module) -> None:
        now = module.config._attn_implementation  # type: ignore[union-attr]
        if self._attention is not None and now != self._attention:
            raise InputError(
                f"the attention implementation was changed to {now} while the model is extended: "
                "remove() the extension first"
            )


@dataclass(frozen=True)
class _Rotary:
    """The rotary module's code with other frequencies."""

    copy: nn.Module
    layer_type: tuple[str | None, ...]

    def __call__(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin; of `x` only the type and the device matter."""
        made: tuple[Tensor, Tensor] = type(self.copy).forward(self.copy, x, ids, *self.layer_type)
        return made


def _rotary(found: Anatomy, layer: Layer, spec: ScoreSpec) -> _Rotary:
    turning = layer.turning
    assert turning is not None
    kind = (found.layer_type(layer.module),) if found.per_type else ()
    prefix = f"{kind[0]}_" if kind else ""
    # A shallow copy with buffers of its own; its forward is the class's, whatever hooks there are.
    rotary: Any = copy.copy(found.rotary)
    rotary._buffers = dict(found.rotary._buffers)
    rotary._buffers[f"{prefix}inv_freq"] = stretched(spec, turning).float()
    setattr(rotary, f"{prefix}attention_scaling", amplitude(spec, turning))
    rotary.rope_type = {kind[0]: "default"} if kind else "default"
    return _Rotary(rotary, kind)
