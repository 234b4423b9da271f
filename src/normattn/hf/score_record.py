"""A model reads a few tokens while every attention layer of it is recorded.

Nothing is asked of a layer alone: the model's own forward brings it its input, mask and positions,
so that any family whose layers take their attention function from transformers can be read.

Legend: B batch, H query heads, G key heads, T tokens, D head dimension, E value size, W width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.model_parts import explained
from normattn.hf.probe import AttentionCall, hidden, hide_unselected, run_recorded

_BATCH = 4
HALF = (torch.bfloat16, torch.float16)
Projection = tuple[Tensor, Tensor]
"""Input and output of a linear map inside an attention layer, (B, T, W)."""


@dataclass
class RecordedLayer(AttentionCall):
    """One call of an attention layer, and its projections in the same run.

    q and k are normalised and rotated already, and `mask` (B, H or 1, T, S) hides what an indexer
    does not select. `shared` are the projections of the layer whose keys this one reads too.
    """

    index: int = 0
    projections: list[Projection] = field(default_factory=list)
    shared: list[Projection] = field(default_factory=list)

    @property
    def scaling(self) -> float:
        """λ as the attention function was given it."""
        return float(self.more.get("scaling") or self.q.shape[-1] ** -0.5)

    @property
    def indexed(self) -> bool:
        """Whether an indexer selects the keys of each query."""
        return self.more.get("indices") is not None

    @property
    def visible(self) -> Bool[Tensor, "b t s"]:
        """Who sees whom in the first head."""
        if self.mask is None:
            return self.q.new_ones(len(self.q), self.q.shape[2], self.k.shape[2], dtype=torch.bool)
        return ~hidden(self.mask)[:, 0]

    @property
    def added(self) -> float:
        """The largest number that the mask adds to a visible score."""
        if self.mask is None or self.mask.dtype == torch.bool:
            return 0.0
        return float(self.mask.masked_fill(hidden(self.mask), 0.0).abs().max())

    @property
    def same_mask(self) -> bool:
        """Whether the mask hides the same keys in every text and from every head."""
        return self.mask is None or bool((hidden(self.mask) == ~self.visible[0]).all())


def record_layers(model: Any, tokens: int = 48) -> list[RecordedLayer]:
    """What every attention layer of the model does with `tokens` random tokens.

    Raises `InputError` for a model that cannot read them, or whose layers do not take their
    attention function from transformers' AttentionInterface.
    """
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, vocabulary, (_BATCH, tokens), generator=generator).to(model.device)
    linear = [part for part in model.modules() if isinstance(part, nn.Linear)]
    with _in_float32(model), _projections(linear, tokens) as made:
        recorded = _read(model, ids)
    _assign(recorded, made)
    return recorded


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """Half precision tells no normalisation from another: the whole computes in float32 meanwhile.

    Every number of half precision comes back as it was.
    """
    held = [(x, x.dtype) for x in (*model.parameters(), *model.buffers()) if x.dtype in HALF]
    try:
        for x, _ in held:
            x.data = x.data.float()
        yield
    finally:
        for x, dtype in held:
            x.data = x.data.to(dtype)


def _read(model: Any, ids: Tensor) -> list[RecordedLayer]:
    """The calls of eager attention while the model reads these tokens."""
    layers: list[RecordedLayer] = []
    parts = frozenset(model.modules())

    def see(call: AttentionCall) -> None:
        if call.module not in parts:
            return
        mask, indices = call.mask, call.more.get("indices")
        if mask is not None:
            mask = mask if indices is None else hide_unselected(mask, indices)
            mask = mask[..., : call.k.shape[2]].expand(len(call.q), -1, call.q.shape[2], -1)
        index = int(getattr(call.module, "layer_idx", len(layers)))
        layers.append(RecordedLayer(**{**vars(call), "mask": mask}, index=index))

    name = type(model).__name__
    with explained(name, "cannot read tokens alone, so its layers cannot be recorded"):
        run_recorded(model, see, input_ids=ids, use_cache=False)
    if not layers:
        raise InputError(
            f"the layers of {name} do not take their attention function from transformers' "
            "AttentionInterface, so they cannot be recorded"
        )
    return layers


@contextmanager
def _projections(
    linear: list[nn.Linear], tokens: int
) -> Iterator[dict[nn.Module, list[Projection]]]:
    """What goes into linear maps and comes out, call by call."""
    made: dict[nn.Module, list[Projection]] = {}

    def row(x: Any) -> Tensor | None:
        """x as (B, T, W): heads side by side, or one head of latent vectors; None for others."""
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() not in (3, 4):
            return None
        if x.dim() == 4 and x.shape[1] != tokens:
            return x[:, 0] if x.shape[1] == 1 else None
        return x.flatten(2)

    def keep(module: nn.Module, given: Any, out: Any) -> None:
        before, after = row(given[0] if given else None), row(out)
        if before is not None and after is not None:
            made.setdefault(module, []).append((before, after))

    handles = [part.register_forward_hook(keep) for part in linear]
    try:
        yield made
    finally:
        for handle in handles:
            handle.remove()


def _assign(recorded: list[RecordedLayer], made: dict[nn.Module, list[Projection]]) -> None:
    """To each call of a layer what its linear maps made in the same run, and the maker of its keys.

    A layer may run several times, and call its attention several times a run.
    """
    for number, call in enumerate(recorded):
        calls = [other for other in recorded if other.module is call.module]
        turn = next(at for at, other in enumerate(calls) if other is call)
        for part in call.module.modules():
            if runs := made.get(part):
                call.projections.append(runs[turn * len(runs) // len(calls)])
        for earlier in recorded[:number]:
            if earlier.k.data_ptr() == call.k.data_ptr():
                call.shared = earlier.projections
