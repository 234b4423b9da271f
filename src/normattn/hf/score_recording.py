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

LISTENING = "normattn_listening"
_BATCH = 4


@dataclass
class Projection:
    """A linear map inside an attention layer, with what went in and came out, (B, T, W).

    `mixture`: the name of the module in the layer where each token has linear maps of its own.
    """

    given: Float[Tensor, "b t w"]
    made: Float[Tensor, "b t w2"]
    mixture: str | None = None


@dataclass
class Inside:
    """What another module inside an attention layer made, (B, T, W), and its name in the layer.

    `projects`: it has linear maps of its own.
    """

    name: str
    projects: bool
    made: Float[Tensor, "b t w"]


@dataclass
class Heard:
    """One attention layer: its projections, what reached its attention function, and the result.

    q and k are normalised and turned already; `visible` (B, T, S) says who sees whom; `more` are
    the function's other arguments (scaling, softcap, s_aux, …). `added` is the largest finite
    number that the mask adds, `mask` what it is. `lent` are the projections of the layer whose keys
    this one reads too, `twin` a second call with the same queries and keys, for other values.
    `selects`: an indexer chooses the keys of each query.
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
    twin: Heard | None = None
    inside: list[Inside] = field(default_factory=list)
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
        with _made(layers, tokens) as ran:
            # With `eager` alone a layer's own mask hides the keys that its indexer leaves out.
            heard = _read(model, ids, "eager" if selecting else LISTENING)
    finally:
        model.train(mode)
    for call in heard:
        call.selects = call.module in selecting
    _refuse_infinite(heard)
    _hand_out(heard, ran)
    return _with_twins(heard)


def _refuse_infinite(heard: list[Heard]) -> None:
    """Raise `InputError` for a layer whose queries, keys or outputs are no numbers.

    Values of a configuration that are finite may still overflow: a base of 1e-300 does.
    """
    for call in heard:
        for what, x in (("queries", call.q), ("keys", call.k), ("outputs", call.out)):
            if not bool(torch.isfinite(x).all()):
                raise InputError(
                    f"the {what} of {call.name} are not finite: a value of its configuration is "
                    "too large or too small to compute with"
                )


def _with_twins(heard: list[Heard]) -> list[Heard]:
    """The calls without those that a layer makes a second time with the same queries and keys."""
    kept: list[Heard] = []
    for call in heard:
        last = kept[-1] if kept else None
        if last is not None and last.module is call.module and last.q is call.q:
            last.twin = call
        else:
            kept.append(call)
    return kept


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
    """To each call of a layer what its modules made in the same run, and the maker of its keys.

    A layer may run several times, and call its attention several times a run.
    """
    for number, call in enumerate(heard):
        calls = [other for other in heard if other.module is call.module]
        turn = next(at for at, other in enumerate(calls) if other is call)
        for name, part in call.module.named_modules():
            runs = ran.get(part)
            if not runs or part is call.module:
                continue
            run, named = runs[turn * len(runs) // len(calls)], f"{name} ({type(part).__name__})"
            if isinstance(part, nn.Linear) or run.mixed:
                if run.given is not None:
                    mixture = named if run.mixed else None
                    call.projections += [Projection(run.given, x, mixture) for x in run.made]
            else:
                projects = any(isinstance(inner, nn.Linear) for inner in part.modules())
                call.inside += [Inside(named, projects, x) for x in run.made]
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


@dataclass
class _Run:
    """What went into a module and came out; `mixed`: in the order of a mixture of experts."""

    given: Tensor | None
    made: list[Tensor]
    mixed: bool = False


_Ran = dict[nn.Module, list[_Run]]


@contextmanager
def _made(layers: Iterable[nn.Module], tokens: int) -> Iterator[_Ran]:
    """What goes into every module of these layers and what comes out, (B, T, W), call by call."""
    ran: _Ran = {}
    orders: list[Tensor] = []

    def keep(module: nn.Module, given: Any, made: Any) -> None:
        outputs = made if isinstance(made, tuple) else (made,)
        orders.extend(x for x in outputs if _is_order(x, _BATCH * tokens))
        kept = [row for x in outputs if (row := _row(x, tokens)) is not None]
        if kept:
            run = _Run(_row(given[0], tokens) if given else None, kept)
            ran.setdefault(module, []).append(run)
        elif given and orders:
            both = [_put_back(x, orders[-1], tokens) for x in (given[0], outputs[0])]
            if both[0] is not None and both[1] is not None:
                ran.setdefault(module, []).append(_Run(both[0], [both[1]], mixed=True))

    parts = dict.fromkeys(part for layer in layers for part in layer.modules())
    handles = [part.register_forward_hook(keep) for part in parts]
    try:
        yield ran
    finally:
        for handle in handles:
            handle.remove()


def _is_order(x: Any, tokens: int) -> bool:
    """Whether a router says by x in which order the tokens, once or n times, go to experts."""
    if not isinstance(x, Tensor) or x.dtype != torch.int64 or x.dim() != 1:
        return False
    whole = torch.arange(x.numel(), device=x.device)
    return x.numel() > 0 and x.numel() % tokens == 0 and torch.equal(x.sort().values, whole)


def _put_back(x: Any, order: Tensor, tokens: int) -> Float[Tensor, "b t w"] | None:
    """The rows of x in the order of tokens, those of one token side by side; None for what is not.

    The inverse of what a mixture of experts does to its input.
    """
    if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[0] != order.numel():
        return None
    back = torch.empty_like(x)
    back[order] = x
    return back.reshape(_BATCH, tokens, -1)


def _row(x: Any, tokens: int) -> Tensor | None:
    """x as (B, T, W): heads side by side, or one head of latent vectors; None for what is not."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() not in (3, 4):
        return None
    if x.dim() == 3:
        return x
    if x.shape[1] == tokens:
        return x.flatten(2)
    return x[:, 0] if x.shape[1] == 1 else None
