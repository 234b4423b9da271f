"""Show what reaches a model's attention function to a recorder, while the model runs.

The configurations of the model's modules name an attention that is registered with transformers. It
computes as the model's own does, and hands each call to the recorder that is set for the moment.
What is registered for the whole process holds no model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from normattn.hf.private_configs import renamed_attention

OURS = "normattn"
AttentionFunction = Callable[..., tuple[Tensor, Any]]


@runtime_checkable
class Recorder(Protocol):
    """What is shown the calls of attention, and the masks that are made for them."""

    def attend(
        self,
        own: AttentionFunction,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **more: Any,
    ) -> tuple[Tensor, Any]:
        """The result of a call; `own` is the model's own attention."""

    def keep_mask(self, mask: Tensor, window: int) -> None:
        """A mask was made that lets a query see `window` keys back, 0 for all."""


_RECORDER: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


@contextmanager
def recording(
    model: nn.Module,
    recorder: Recorder,
    computed_by: Literal["own", "plain", "eager"] = "plain",
) -> Iterator[None]:
    """Show every call of attention in `model` to `recorder` while inside.

    `computed_by`: `own` leaves all to the model's own attention. `plain` computes by plain
    operations what has no masks of every pair (flash, flex), and gives every layer its mask;
    `eager` does so by eager attention alone.
    """

    def name_of(own: str) -> str:
        return _register("eager" if computed_by == "eager" else own, computed_by != "own")

    token = _RECORDER.set(recorder)
    try:
        with renamed_attention(model, name_of):
            yield
    finally:
        _RECORDER.reset(token)


@lru_cache
def _register(own: str, plain: bool) -> str:
    """The name of an attention that computes as `own` does and is recorded; registered once."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    safe = own.replace("/", "_").replace("|", "_")
    # A name with "flash" makes transformers choose flash attention's masks.
    name = f"{OURS}_plain_{safe.replace('flash', 'fl')}" if plain else f"{OURS}_seen_{safe}"
    masks = _plain_masks(own) if plain else ALL_MASK_ATTENTION_FUNCTIONS.get(own, sdpa_mask)
    AttentionInterface.register(name, partial(_attend, own, plain))
    AttentionMaskInterface.register(name, masks)
    return name


def _attend(
    own: str, plain: bool, module: nn.Module, *given: Any, **more: Any
) -> tuple[Tensor, Any]:
    attend = _function_named(own, module, plain)
    if plain and more.get("indices") is not None and not own.startswith(OURS):
        attend = partial(_attend_selected, attend)
    recorder = _RECORDER.get()
    if recorder is None:  # activations that another thread computes once more
        return attend(module, *given, **more)
    return recorder.attend(attend, module, *given, **more)


def _function_named(name: str, module: nn.Module, plain: bool) -> AttentionFunction:
    """The attention of that name; eager attention is that of the model's own file."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if plain and name not in ("eager", "sdpa") and not name.startswith(OURS):
        name = "eager"
    if name == "eager" and eager is None:
        name = "sdpa"
    function: AttentionFunction = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return function


def same_attention(name: str) -> AttentionFunction:
    """A function that computes as the attention of that name does."""

    def attend(module: nn.Module, *given: Any, **more: Any) -> tuple[Tensor, Any]:
        return _function_named(name, module, False)(module, *given, **more)

    return attend


def _attend_selected(
    attend: AttentionFunction,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    **more: Any,
) -> tuple[Tensor, Any]:
    """Attention to the keys that an indexer has selected: plain kinds of attention know no other.

    A layer hides the rest itself only where it sees the name of a plain attention.
    """
    mask = hide_unselected(attention_mask, more.pop("indices"))
    return attend(module, query, key, value, mask, **more)


def hide_unselected(mask: Tensor, indices: Tensor) -> Tensor:
    """The mask of every pair (B, 1, T, S) that also hides keys not among `indices` (B, T, n)."""
    selected = torch.zeros_like(mask[:, 0], dtype=torch.bool).scatter(-1, indices.long(), True)
    if mask.dtype == torch.bool:
        return mask & selected[:, None]
    return mask.masked_fill(~selected[:, None], torch.finfo(mask.dtype).min)


def hidden(mask: Tensor) -> Tensor:
    """Where a mask, boolean or added to scores, hides a key."""
    return ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2


def _plain_masks(own: str) -> Callable[..., Any]:
    """The masks of plain attention, never left out, each shown to the recorder."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask

    if own.startswith(OURS):
        ours: Callable[..., Any] = ALL_MASK_ATTENTION_FUNCTIONS[own]
        return ours
    over: Callable[..., Any] = sdpa_mask if own == "sdpa" else eager_mask

    def make(*sizes: Any, **more: Any) -> Any:
        mask = over(*sizes, **{**more, "allow_is_causal_skip": False})
        recorder = _RECORDER.get()
        if isinstance(mask, Tensor) and recorder is not None:
            recorder.keep_mask(mask, int(more.get("local_size") or 0))
        return mask

    return make


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode and without gradients; as it was afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            for module, _ in modes:
                module.training = False
            yield
    finally:
        for module, mode in modes:
            module.training = mode
