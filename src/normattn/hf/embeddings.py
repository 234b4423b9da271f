"""The position embeddings that an extended layer gets instead of the model's: a pre-hook of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.attending import BEFORE, OWN, Memory
from normattn.hf.folding import stretched
from normattn.hf.probing import OBSERVED, PROBE, put
from normattn.hf.tables import place_of, still
from normattn.hf.understanding import Layer
from normattn.score import ScoreSpec

_IDS = "position ids"


class Embeddings:
    """Called before a layer: embeddings that turn nothing where it rotates inside, else others.

    `attention` is the name of our attention where the layer attends by it. `sections`: whether the
    model gives an image's tokens positions of several dimensions, which no method here knows.
    """

    def __init__(
        self,
        layer: Layer,
        spec: ScoreSpec,
        inside: bool,
        attention: str | None,
        memory: Memory,
        sections: bool,
    ) -> None:
        assert layer.turning is not None
        assert layer.tables is not None
        assert layer.heard.argument is not None
        self._attention, self._memory, self._sections = attention, memory, sections
        self._index, self._inside = layer.index, inside
        self._argument, self._tables = layer.heard.argument, layer.tables
        self._other: tuple[Tensor, float] | None = None
        if not inside and spec.spectrum is not None:
            gain = spec.spectrum.gain(spec.train_length)
            self._other = stretched(spec, layer.turning).abs(), gain**0.5 * layer.tables.amplitude

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments with other position embeddings."""
        self._refuse_change(module)
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dtype == torch.bool:
            self._memory.keep(BEFORE, (), mask)
        if not self._inside and self._other is None:
            return None
        argument = self._argument
        before = kwargs.get(argument) if isinstance(argument, str) else args[argument]
        if before is None:
            raise InputError(f"layer {self._index} was called without its position embeddings")
        ids = kwargs.get("position_ids")
        if self._sections:
            self._refuse_images(before, self._ids(ids))
        if self._other is None:
            # Rotating by nothing: the product with cos broadcasts over the tokens.
            self._memory.keep(OWN, (), before)
            return put(args, kwargs, argument, still(before))
        return put(args, kwargs, argument, self._stretched(before, self._ids(ids)))

    def _stretched(self, before: Any, ids: Tensor) -> Any:
        assert self._other is not None
        dtype = before.dtype if isinstance(before, Tensor) else before[0].dtype
        name, given = f"embeddings {id(self._tables)} {dtype}", (ids,)
        embeddings = self._memory.get(name, given)
        if embeddings is None:
            embeddings = self._tables.make(ids, *self._other, before)
            self._memory.keep(name, given, embeddings)
        return embeddings

    def _ids(self, given: Tensor | None) -> Tensor:
        ids = self._memory.get(_IDS, ()) if given is None else given
        if ids is None:
            raise InputError(
                f"layer {self._index} is not told the tokens' position_ids, so its positions cannot"
                " be stretched"
            )
        position_ids: Tensor = ids
        return position_ids

    def _refuse_images(self, before: Any, ids: Tensor) -> None:
        given = (before,) if isinstance(before, Tensor) else tuple(before)
        if torch.compiler.is_compiling() or self._memory.get("text alone", given):
            return
        mine = self._tables.make(ids, self._tables.frequencies, self._tables.amplitude, before)
        pairs = [(mine, before)] if isinstance(mine, Tensor) else zip(mine, before, strict=True)
        if any(bool((one - other).abs().max() > 1e-2) for one, other in pairs):
            raise InputError(
                "an image's tokens have positions of several dimensions in this model: an extended "
                "model reads text alone"
            )
        self._memory.keep("text alone", given, True)

    def _refuse_change(self, module: nn.Module) -> None:
        now = str(module.config._attn_implementation).removeprefix(OBSERVED)  # type: ignore[union-attr]
        if self._attention is not None and now not in (self._attention, PROBE):
            raise InputError(
                f"the attention implementation was changed to {now} while the model is extended: "
                "remove() the extension first"
            )


class OwnEmbeddings:
    """Called before a part of a layer that rotates inside: an indexer keeps the model's turns."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments with the position embeddings that the layer was given."""
        argument, own = place_of(args, kwargs), self._memory.get(OWN, ())
        return None if argument is None or own is None else put(args, kwargs, argument, own)


class PositionIds:
    """Called before a rotary module: keeps the position ids for layers that are not told them."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the first whole numbers (batch, tokens) among the arguments."""
        for value in (*kwargs.values(), *args):
            if isinstance(value, Tensor) and value.dtype == torch.int64:
                if value.dim() == 3:
                    value = value[0]
                self._memory.keep(_IDS, (), value)
                return
