"""A model reads a few tokens while every attention layer of it is listened to.

Nothing is asked of a layer alone: the model's own forward brings it its input, mask and positions,
so that any family whose layers take their attention function from transformers can be heard.

Legend: B batch, H query heads, G key heads, T tokens, D head dimension, E value size, W width.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.probe import rotary_buffers

LISTENING = "normattn_listening"
_BATCH = 4
_HALF = (torch.bfloat16, torch.float16)


@dataclass
class Projection:
    """A linear map inside an attention layer, with what went in and came out, (B, T, W)."""

    given: Float[Tensor, "b t w"]
    made: Float[Tensor, "b t w2"]


@dataclass
class Heard:
    """One attention layer: its projections, what reached its attention function, and the result.

    q and k are normalised and turned already; `visible` (B, T, S) says who sees whom; `more` are
    the function's other arguments (scaling, softcap, s_aux, …). `added` is the largest finite
    number that the mask adds, `mask` what it is. `lent` are the projections of the layer whose keys
    this one reads too. `selects`: an indexer chooses the keys of each query.
    """

    index: int
    module: nn.Module
    q: Float[Tensor, "b h t d"]
    k: Float[Tensor, "b g s d"]
    v: Float[Tensor, "b g s e"]
    visible: Bool[Tensor, "b t s"]
    added: float
    more: dict[str, Any]
    out: Float[Tensor, "b t h e"]
    mask: Tensor | None = None
    projections: list[Projection] = field(default_factory=list)
    lent: list[Projection] = field(default_factory=list)
    selects: bool = False

    @property
    def alike(self) -> bool:
        """Whether the mask hides the same keys in every text and from every head."""
        if self.mask is None:
            return True
        return bool((hidden(self.mask[..., : self.k.shape[2]]) == ~self.visible[0]).all())

    @property
    def name(self) -> str:
        """How a sentence calls the layer."""
        return f"layer {self.index} ({type(self.module).__name__})"


@torch.no_grad()
def listen(model: Any, tokens: int = 48) -> list[Heard]:
    """What every attention layer of the model does with `tokens` random tokens.

    Raises `InputError` for a model that cannot read them, or whose layers do not take their
    attention function from transformers' AttentionInterface.
    """
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, vocabulary, (_BATCH, tokens), generator=generator).to(model.device)
    mode = model.training
    model.eval()
    try:
        # Once to know the layers, and once more to keep what is made inside of them, not elsewhere.
        first = _read(model, ids, LISTENING)
        selecting = {call.module for call in first if call.more.get("indices") is not None}
        layers = dict.fromkeys(call.module for call in first)
        with _made(layers, tokens) as ran, in_float32(model, layers):
            # With `eager` alone a layer's own mask hides the keys that its indexer leaves out.
            heard = _read(model, ids, "eager" if selecting else LISTENING)
    finally:
        model.train(mode)
    for call in heard:
        call.selects = call.module in selecting
    _hand_out(heard, ran)
    return heard


def _read(model: Any, ids: Tensor, name: str) -> list[Heard]:
    """The calls of attention while the model reads these tokens by the function of this name."""
    heard: list[Heard] = []
    with _listening(model, heard, name):
        try:
            model(ids, use_cache=False)
        except (TypeError, KeyError, AttributeError, RuntimeError, ValueError) as error:
            sentence = " ".join(str(error).split())[:200]
            raise InputError(
                f"{type(model).__name__} cannot read tokens alone, so its layers cannot be "
                f"listened to: {sentence}"
            ) from error
    if not heard:
        raise InputError(
            f"the layers of {type(model).__name__} do not take their attention function from "
            "transformers' AttentionInterface, so they cannot be listened to"
        )
    return heard


def _hand_out(heard: list[Heard], ran: _Ran) -> None:
    """To each call of a layer what its linear maps made in the same run, and the maker of its keys.

    A layer may run several times, and call its attention several times a run.
    """
    for number, call in enumerate(heard):
        calls = [other for other in heard if other.module is call.module]
        turn = next(at for at, other in enumerate(calls) if other is call)
        for part in call.module.modules():
            runs = ran.get(part)
            if runs:
                call.projections.append(runs[turn * len(runs) // len(calls)])
        for earlier in heard[:number]:
            if earlier.k.data_ptr() == call.k.data_ptr():
                call.lent = earlier.projections


@dataclass
class _Recording:
    """The calls that are kept, and the modules whose calls they are."""

    heard: list[Heard]
    parts: frozenset[nn.Module]


_RECORDING: ContextVar[_Recording] = ContextVar("recording")


@contextmanager
def _listening(model: Any, heard: list[Heard], name: str) -> Iterator[None]:
    """Our function where the attention function is looked up, with the masks of `eager`.

    What is registered with transformers for the whole process holds no model.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    _register()
    standing = ALL_ATTENTION_FUNCTIONS.get(name)
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    token = _RECORDING.set(_Recording(heard, frozenset(model.modules())))
    try:
        ALL_ATTENTION_FUNCTIONS[name] = _recorded_attention
        for config in configs.values():
            config._attn_implementation_internal = name
        yield
    finally:
        _RECORDING.reset(token)
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
        ALL_ATTENTION_FUNCTIONS.pop(name)
        if standing is not None and name != LISTENING:
            ALL_ATTENTION_FUNCTIONS[name] = standing


def _register() -> None:
    """Make the name known to transformers, and to the interface that a family may have."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionMaskInterface.register(LISTENING, eager_mask)
    AttentionInterface.register(LISTENING, _recorded_attention)


def _recorded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """The family's own eager attention; what it is given and makes is kept while recording."""
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    recording = _RECORDING.get()
    index = getattr(module, "layer_idx", len(recording.heard))
    if own is None:
        raise InputError(
            f"layer {index} ({type(module).__name__}) has no eager attention to be held against"
        )
    result: tuple[Tensor, Tensor | None] = own(module, query, key, value, attention_mask, **more)
    if module in recording.parts:
        visible, added = _seen(query, key, attention_mask)
        call = (int(index), module, query, key, value, visible, added, dict(more))
        recording.heard.append(Heard(*call, result[0], attention_mask))
    return result


def _seen(query: Tensor, key: Tensor, mask: Tensor | None) -> tuple[Tensor, float]:
    """Who sees whom, (B, T, S), and the largest number that is added to a visible score."""
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    if mask is None:
        return query.new_ones(batch, queries, keys, dtype=torch.bool), 0.0
    mask = mask[..., :keys].expand(batch, -1, queries, keys)
    visible = ~hidden(mask)
    added = 0.0 if mask.dtype == torch.bool else float(torch.where(visible, mask, 0.0).abs().max())
    return visible[:, 0], added


def hidden(mask: Tensor) -> Tensor:
    """Where a mask, boolean or added to scores, hides a key."""
    return ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2


_Ran = dict[nn.Module, list[Projection]]


@contextmanager
def _made(layers: Iterable[nn.Module], tokens: int) -> Iterator[_Ran]:
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


@contextmanager
def in_float32(model: nn.Module, layers: Iterable[nn.Module]) -> Iterator[None]:
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


def _row(x: Any, tokens: int) -> Tensor | None:
    """x as (B, T, W): heads side by side, or one head of latent vectors; None for what is not."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() not in (3, 4):
        return None
    if x.dim() == 3:
        return x
    if x.shape[1] == tokens:
        return x.flatten(2)
    return x[:, 0] if x.shape[1] == 1 else None
