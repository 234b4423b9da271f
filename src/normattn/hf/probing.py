"""A model is asked what its layers do: a few tokens through it, with attention that only listens.

The queries, keys and masks that reach the attention function tell what each layer does, whatever a
family's file writes: each is called by its own model, and once more with position embeddings that
turn nothing. What they do not confirm is refused, so that no family is served wrongly in silence.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.anatomy import Anatomy
from normattn.hf.tables import level, place_of

PROBE = "normattn_probe"
OBSERVED = "normattn_observed_"
"""Before the name of an attention that is observed (`observe`)."""
COUNT = 9
KNOWN = frozenset(
    {
        *("dropout", "scaling", "sliding_window", "softcap", "s_aux", "position_ids", "use_cache"),
        *("cache_position", "is_causal", "output_attentions", "output_hidden_states"),
        *("logits_to_keep", "return_dict", "num_items_in_batch", "output_router_logits"),
    }
)
"""What may reach an attention function beside q, k, v and the mask.

What a model's caller adds (`num_items_in_batch` by the Trainer) passes through the layers too."""


@dataclass
class Heard:
    """One call of the attention function.

    Attributes:
        module: the layer that called it.
        query, key: as they arrived (B, H, T, D).
        window: how far back its mask lets it see, 0 for all; None where transformers made no mask.
        more: the other arguments.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    window: int | None
    more: dict[str, Any]


@dataclass
class Asked:
    """What was heard of one layer: as it is, and with embeddings that turn nothing or double.

    `argument` is where its position embeddings stand among its arguments; None where it takes none.
    """

    as_is: Heard
    argument: str | int | None = None
    tables: Any = None
    has_ids: bool = False
    plain: Heard | None = None
    doubled: Heard | None = None


@dataclass
class _Ear:
    calls: list[Heard] = field(default_factory=list)
    masks: list[Tensor] = field(default_factory=list)
    windows: dict[int, int] = field(default_factory=dict)


_LISTENING: ContextVar[_Ear] = ContextVar("listening")


def probe_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Stands where attention would, and keeps what it is given."""
    ear = _LISTENING.get()
    seen = isinstance(attention_mask, Tensor)
    window = ear.windows.get(attention_mask.data_ptr()) if seen else None
    ear.calls.append(Heard(module, query.detach(), key.detach(), window, more))
    return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


def probe_mask(over: Callable[..., Any]) -> Callable[..., Any]:
    """The masks that `over` makes, written down with how far back they let a layer see."""

    def make(*sizes: Any, **more: Any) -> Any:
        mask = over(*sizes, **{**more, "allow_is_causal_skip": False})
        ear = _LISTENING.get()
        if isinstance(mask, Tensor):
            ear.masks.append(mask)  # so that no other tensor takes its place in memory
            ear.windows[mask.data_ptr()] = int(more.get("local_size") or 0)
        return mask

    return make


def ask(parts: Anatomy) -> dict[nn.Module, Asked]:
    """What each attention layer of the decoder is given and does, in the order of their calls.

    Raises `InputError` where the model cannot be asked.
    """
    asked: dict[nn.Module, Asked] = {}
    for heard in listen(parts):
        asked.setdefault(heard.module, Asked(heard))
    hooks = [
        module.register_forward_pre_hook(_again(one), with_kwargs=True)
        for module, one in asked.items()
    ]
    try:
        listen(parts)
    finally:
        for hook in hooks:
            hook.remove()
    return asked


def _again(one: Asked) -> Callable[..., None]:
    """A pre-hook that calls the layer with other position embeddings before it is called."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        argument = place_of(args, kwargs)
        if one.plain is not None or argument is None:
            return
        given = kwargs[argument] if isinstance(argument, str) else args[argument]
        one.argument, one.tables = argument, given
        one.has_ids = kwargs.get("position_ids") is not None
        heard = []
        for size in (2.0, 1.0):
            before = len(_LISTENING.get().calls)
            other_args, other = put(args, kwargs, argument, level(given, size))
            module.forward(*other_args, **other)
            heard.append(_LISTENING.get().calls[before])
        one.doubled, one.plain = heard

    return hook


def put(
    args: tuple[Any, ...], kwargs: dict[str, Any], argument: str | int, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with this value at that place."""
    if isinstance(argument, str):
        return args, {**kwargs, argument: value}
    return (*args[:argument], value, *args[argument + 1 :]), kwargs


def listen(parts: Anatomy) -> list[Heard]:
    """All calls of the attention function while the model reads `COUNT` tokens."""
    ear = _Ear()
    token = _LISTENING.set(ear)
    try:
        with quiet(parts), _listening(parts):
            try:
                parts.model(input_ids=some_tokens(parts), use_cache=False)
            except InputError:
                raise
            except Exception as error:
                sentence = " ".join(str(error).split())[:200]
                raise InputError(
                    f"{parts.name} cannot be asked what its layers do: its forward fails while its "
                    f"attention only listens ({type(error).__name__}: {sentence})"
                ) from error
    finally:
        _LISTENING.reset(token)
    inside = set(parts.decoder.modules())
    return [call for call in ear.calls if call.module in inside]


def some_tokens(parts: Anatomy, count: int = COUNT) -> Tensor:
    """A few tokens that stand for nothing but themselves, from all over the vocabulary.

    Its first tokens are often reserved and hardly trained, and what a model makes of those is much
    a matter of rounding (SmolLM2 in bf16: logits 3 to 12 % off, of other tokens 1 %).
    """
    size = int(getattr(parts.config, "vocab_size", COUNT + 3))
    return ((torch.arange(count, device=_device(parts)) + 1) * size // (count + 1))[None]


@contextlib.contextmanager
def quiet(parts: Anatomy) -> Iterator[None]:
    """The model in evaluation mode, without gradients, uncompiled; as it was afterwards."""
    modes = [(module, module.training) for module in parts.model.modules()]
    try:
        with torch.no_grad(), _uncompiled():
            for module, _ in modes:
                module.training = False
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: Callable[[str], contextlib.AbstractContextManager[Any]] = torch.compiler.set_stance
    return stance("force_eager")


def _register(own: str) -> None:
    """Make the probe known to transformers, with the kind of masks that the model's `own` wants."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

    AttentionInterface.register(PROBE, probe_function)
    masks = eager_mask if own.endswith("eager") else sdpa_mask
    AttentionMaskInterface.register(PROBE, probe_mask(masks))


@contextlib.contextmanager
def _listening(parts: Anatomy) -> Iterator[None]:
    """Every module of the model has a copy of its configuration that names the probe."""
    _register(str(parts.config._attn_implementation or "eager"))
    copies: dict[int, Any] = {}
    before: list[tuple[nn.Module, Any]] = []
    try:
        for module in parts.model.modules():
            config = module.__dict__.get("config")
            if hasattr(config, "_attn_implementation_internal"):
                before.append((module, config))
                if id(config) not in copies:
                    copies[id(config)] = named(config, PROBE)
                module.__dict__["config"] = copies[id(config)]
        yield
    finally:
        for module, config in before:
            module.__dict__["config"] = config


def named(config: Any, attention: str) -> Any:
    """A copy of a configuration, and of that of its text, that names this attention."""
    private = copy.deepcopy(config)
    for part in {id(part): part for part in (private, private.get_text_config())}.values():
        part._attn_implementation_internal = attention
    return private


def _device(parts: Anatomy) -> torch.device:
    """Where the model takes its tokens."""
    weight = parts.model.get_input_embeddings()
    for module in weight.modules():
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    device = torch.device(parts.model.device)
    if device.type == "meta":
        raise InputError("the weights of this model are on the meta device: load them first")
    return device
