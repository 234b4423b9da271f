"""A model reads a few tokens while every attention layer of it is listened to.

Nothing is asked of a layer alone: the model's own forward brings it its input, mask and positions,
so that any family whose layers take their attention function from transformers can be heard.

Legend: B batch, H query heads, G key heads, T tokens, D head dimension, E value size, W width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """A linear map inside an attention layer, with what went in and came out, (B, T, W)."""

    given: Float[Tensor, "b t w"]
    made: Float[Tensor, "b t w2"]


@dataclass
class Heard:
    """One attention layer: its projections, what reached its attention function, and the result.

    q and k are normalised and turned already; `visible` (B, T, S) says who sees whom; `more` are
    the function's other arguments (scaling, softcap, s_aux, …). `added` is the largest finite
    number that the mask adds.
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
    projections: list[Projection] = field(default_factory=list)

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
    heard: list[Heard] = []
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, vocabulary, (_BATCH, tokens), generator=generator).to(model.device)
    mode = model.training
    model.eval()
    try:
        with _listening(model, heard), _projections(model) as ran:
            try:
                model(ids, use_cache=False)
            except (TypeError, KeyError, AttributeError, RuntimeError, ValueError) as error:
                sentence = " ".join(str(error).split())[:200]
                raise InputError(
                    f"{type(model).__name__} cannot read tokens alone, so its layers cannot be "
                    f"listened to: {sentence}"
                ) from error
    finally:
        model.train(mode)
    if not heard:
        raise InputError(
            f"the layers of {type(model).__name__} do not take their attention function from "
            "transformers' AttentionInterface, so they cannot be listened to"
        )
    for call in heard:
        inside = (ran[part] for part in call.module.modules() if part in ran)
        call.projections = list(inside)
    return heard


@contextmanager
def _listening(model: Any, heard: list[Heard]) -> Iterator[None]:
    """Our function where the attention function is looked up, with the masks of `eager`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(LISTENING, _listener(heard))
    AttentionMaskInterface.register(LISTENING, eager_mask)
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation_internal = LISTENING
    try:
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]


def _listener(heard: list[Heard]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The family's own eager attention, which keeps what it is given and what it returns."""

    def function(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        index = getattr(module, "layer_idx", len(heard))
        if own is None:
            raise InputError(
                f"layer {index} ({type(module).__name__}) has no eager attention to be held against"
            )
        result: tuple[Tensor, Tensor | None] = own(
            module, query, key, value, attention_mask, **more
        )
        visible, added = _seen(query, key, attention_mask)
        heard.append(
            Heard(int(index), module, query, key, value, visible, added, dict(more), result[0])
        )
        return result

    return function


def _seen(query: Tensor, key: Tensor, mask: Tensor | None) -> tuple[Tensor, float]:
    """Who sees whom, (B, T, S), and the largest number that is added to a visible score."""
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    if mask is None:
        return query.new_ones(batch, queries, keys, dtype=torch.bool), 0.0
    mask = mask[..., :keys].expand(batch, -1, queries, keys)
    if mask.dtype == torch.bool:
        return mask[:, 0], 0.0
    visible = mask > torch.finfo(mask.dtype).min / 2
    return visible[:, 0], float(torch.where(visible, mask, 0.0).abs().max())


@contextmanager
def _projections(model: Any) -> Iterator[dict[nn.Module, Projection]]:
    """What goes into every linear map of the model and what comes out, last call."""
    ran: dict[nn.Module, Projection] = {}

    def keep(module: nn.Module, given: Any, made: Any) -> None:
        if given and isinstance(made, Tensor) and made.dim() == 3:
            ran[module] = Projection(given[0], made)

    kinds = (nn.Linear,)
    handles = [
        part.register_forward_hook(keep) for part in model.modules() if isinstance(part, kinds)
    ]
    try:
        yield ran
    finally:
        for handle in handles:
            handle.remove()
