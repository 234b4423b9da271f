"""A model reads a few tokens while every attention layer of it is recorded.

Nothing is asked of a layer alone: the model's own forward brings it its input, mask and positions,
so that any family whose layers take their attention function from transformers can be read.

Legend: B batch, H query heads, G key heads, T tokens, D head dimension, E value size, W width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.probe import rotary_buffers, short
from normattn.hf.recorder import (
    AttentionFunction,
    evaluating,
    hidden,
    hide_unselected,
    recording,
)

_BATCH = 4
_HALF = (torch.bfloat16, torch.float16)


@dataclass
class Projection:
    """A linear map inside an attention layer, with its input and output, (B, T, W)."""

    given: Float[Tensor, "b t w"]
    made: Float[Tensor, "b t w2"]


@dataclass
class RecordedLayer:
    """One attention layer: its projections, what reached its attention function, and the result.

    q and k are normalised and rotated already; `more` are the function's other arguments (scaling,
    softcap, s_aux, …). `shared` are the projections of the layer whose keys this one reads too.
    """

    index: int
    module: nn.Module
    q: Float[Tensor, "b h t d"]
    k: Float[Tensor, "b g s d"]
    v: Float[Tensor, "b g s e"]
    mask: Tensor | None
    more: dict[str, Any]
    out: Float[Tensor, "b t h e"]
    projections: list[Projection] = field(default_factory=list)
    shared: list[Projection] = field(default_factory=list)

    @property
    def name(self) -> str:
        """How a sentence calls the layer."""
        return f"layer {self.index} ({type(self.module).__name__})"

    @property
    def indexed(self) -> bool:
        """Whether an indexer chooses the keys of each query."""
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


class _Calls:
    """Records the calls of attention in a model."""

    def __init__(self, model: nn.Module) -> None:
        self._parts = frozenset(model.modules())
        self.layers: list[RecordedLayer] = []

    def keep_mask(self, mask: Tensor, window: int) -> None:
        """Layers are given theirs."""

    def attend(
        self,
        own: AttentionFunction,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **more: Any,
    ) -> tuple[Tensor, Any]:
        """The family's own attention; what it is given and makes is kept."""
        result = own(module, query, key, value, attention_mask, **more)
        if module in self._parts:
            mask = attention_mask
            if mask is not None:
                if more.get("indices") is not None:
                    mask = hide_unselected(mask, more["indices"])
                size = (len(query), -1, query.shape[2], -1)
                mask = mask[..., : key.shape[2]].expand(size)
            index = int(getattr(module, "layer_idx", len(self.layers)))
            call = (index, module, query, key, value, mask, dict(more), result[0])
            self.layers.append(RecordedLayer(*call))
        return result


def record_layers(model: Any, tokens: int = 48) -> list[RecordedLayer]:
    """What every attention layer of the model does with `tokens` random tokens.

    Raises `InputError` for a model that cannot read them, or whose layers do not take their
    attention function from transformers' AttentionInterface.
    """
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, vocabulary, (_BATCH, tokens), generator=generator).to(model.device)
    # Once to know the layers, and once more to keep what is made inside of them, not elsewhere.
    layers = dict.fromkeys(call.module for call in _read(model, ids))
    with _projections(layers, tokens) as ran, _in_float32(model, layers):
        recorded = _read(model, ids)
    _assign_projections(recorded, ran)
    return recorded


def _read(model: Any, ids: Tensor) -> list[RecordedLayer]:
    """The calls of eager attention while the model reads these tokens."""
    calls = _Calls(model)
    try:
        with evaluating(model), recording(model, calls, computed_by="eager"):
            model(ids, use_cache=False)
    except (TypeError, KeyError, AttributeError, RuntimeError, ValueError) as error:
        raise InputError(
            f"{type(model).__name__} cannot read tokens alone, so its layers cannot be recorded: "
            f"{short(error)}"
        ) from error
    if not calls.layers:
        raise InputError(
            f"the layers of {type(model).__name__} do not take their attention function from "
            "transformers' AttentionInterface, so they cannot be recorded"
        )
    return calls.layers


_Ran = dict[nn.Module, list[Projection]]


def _assign_projections(recorded: list[RecordedLayer], ran: _Ran) -> None:
    """To each call of a layer what its linear maps made in the same run, and the maker of its keys.

    A layer may run several times, and call its attention several times a run.
    """
    for number, call in enumerate(recorded):
        calls = [other for other in recorded if other.module is call.module]
        turn = next(at for at, other in enumerate(calls) if other is call)
        for part in call.module.modules():
            if runs := ran.get(part):
                call.projections.append(runs[turn * len(runs) // len(calls)])
        for earlier in recorded[:number]:
            if earlier.k.data_ptr() == call.k.data_ptr():
                call.shared = earlier.projections


@contextmanager
def _projections(layers: Iterable[nn.Module], tokens: int) -> Iterator[_Ran]:
    """What goes into every linear map of these layers and comes out, (B, T, W), call by call."""
    ran: _Ran = {}

    def keep(module: nn.Module, given: Any, made: Any) -> None:
        both = [_row(x, tokens) for x in (given[0], made)] if given else [None]
        if both[0] is not None and both[1] is not None:
            ran.setdefault(module, []).append(Projection(both[0], both[1]))

    parts = dict.fromkeys(part for layer in layers for part in layer.modules())
    linear = [part for part in parts if isinstance(part, nn.Linear)]
    handles = [part.register_forward_hook(keep) for part in linear]
    try:
        yield ran
    finally:
        for handle in handles:
            handle.remove()


def _row(x: Any, tokens: int) -> Tensor | None:
    """x as (B, T, W): heads side by side, or one head of latent vectors; None for what is not."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() not in (3, 4):
        return None
    if x.dim() == 3:
        return x
    if x.shape[1] == tokens:
        return x.flatten(2)
    return x[:, 0] if x.shape[1] == 1 else None


@contextmanager
def _in_float32(model: nn.Module, layers: Iterable[nn.Module]) -> Iterator[None]:
    """Let these layers, and the tables of their positions, compute in float32, one at a time.

    What half precision rounds would tell no normalisation from another. Weights are given back.
    """
    kept: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def widen(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        kept[module] = [(x, x.data) for x in module.parameters() if x.dtype in _HALF]
        for parameter, own in kept[module]:
            parameter.data = own.float()
        return _widened(args), _widened(kwargs)

    def narrow(module: nn.Module, args: Any, kwargs: Any, made: Any) -> Any:
        half = kept[module][0][1].dtype if kept[module] else None
        for parameter, own in kept.pop(module):
            parameter.data = own
        return made if half is None else _narrowed(made, half)

    def widen_tables(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _widened(args), _widened(kwargs)

    rotary = [module for module in model.modules() if rotary_buffers(module)]
    handles = [x.register_forward_pre_hook(widen_tables, with_kwargs=True) for x in rotary]
    for layer in layers:
        handles.append(layer.register_forward_pre_hook(widen, with_kwargs=True))
        handles.append(layer.register_forward_hook(narrow, with_kwargs=True, prepend=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for pairs in kept.values():
            for parameter, own in pairs:
                parameter.data = own


def _widened(value: Any) -> Any:
    """Half precision in what a module is given, as float32."""
    if isinstance(value, Tensor):
        if value.dtype not in _HALF:
            return value
        # The least number of its type says in a mask that a key is hidden.
        least = value == torch.finfo(value.dtype).min
        return value.float().masked_fill(least, torch.finfo(torch.float32).min)
    if isinstance(value, dict):
        return {name: _widened(inner) for name, inner in value.items()}
    return type(value)(map(_widened, value)) if type(value) in (tuple, list) else value


def _narrowed(value: Any, half: torch.dtype) -> Any:
    """float32 in what a module made, in half precision again."""
    if isinstance(value, Tensor):
        return value.to(half) if value.dtype == torch.float32 else value
    if type(value) in (tuple, list):
        return type(value)(_narrowed(inner, half) for inner in value)
    return value
