"""Record what reaches the attention of a model's layers, and probe each layer with other tables.

The configurations of the model's modules name, while it runs, an attention that computes as their
own does and shows each call to a recorder. So the queries, keys and masks that reach the attention
function tell what a layer does, whatever a family's file writes.

Legend: B batch, H query heads, G key heads, T queries, S keys, D head dimension, E value size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.model_parts import ModelParts, explained
from normattn.models.utils import without_dropout

COUNT = 9
"""How many tokens a model is probed with."""
KNOWN = frozenset(
    {
        *("dropout", "scaling", "sliding_window", "softcap", "s_aux", "position_ids", "use_cache"),
        *("cache_position", "is_causal", "output_attentions", "output_hidden_states"),
        *("logits_to_keep", "return_dict", "num_items_in_batch", "output_router_logits"),
    }
)
"""What may reach an attention function beside q, k, v and the mask.

What a model's caller adds (`num_items_in_batch` by the Trainer) passes through the layers too."""
NAME = "position_embeddings"
INTERNAL = "_attn_implementation_internal"
OURS = "normattn"
EXACT = (torch.float32, torch.float64, torch.complex64)
"""Types in which values are compared closely."""
AttentionFunction = Callable[..., tuple[Tensor, Any]]
Recorder = Callable[..., tuple[Tensor, Any]]
"""Called in place of an attention function, with that function before its arguments."""
MaskRecorder = Callable[[Tensor, int], None]
"""Called with each mask that is made, and how many keys it lets a query see, 0 for all."""

_RECORDER: ContextVar[tuple[Recorder, MaskRecorder | None] | None] = ContextVar(
    "recorder", default=None
)
_RECORDED: dict[str, str] = {}
"""The attention that each recorded one computes as."""


@contextmanager
def recording(
    model: nn.Module, recorder: Recorder, masks: MaskRecorder | None = None, own: bool = False
) -> Iterator[None]:
    """Show every call of attention in `model` to `recorder` while inside.

    Attention is that of each family's `eager_attention_forward`, and every layer gets its mask; an
    extended layer, and with `own` every layer, computes as ever. A compiled model runs uncompiled.
    """
    given: list[Any] = [module.__dict__.get("config") for module in model.modules()]
    known = [config for config in given if hasattr(config, INTERNAL)]
    parts = {id(part): part for config in known for part in (config, config.get_text_config())}
    before = [(config, getattr(config, INTERNAL)) for config in parts.values()]
    token = _RECORDER.set((recorder, masks))
    try:
        for config, name in before:
            setattr(config, INTERNAL, _register(str(name or "eager"), own))
        compiled = "torch._dynamo" in sys.modules
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            yield
    finally:
        for config, name in before:
            setattr(config, INTERNAL, name)
        _RECORDER.reset(token)


def recorded_as(name: str) -> str:
    """The attention of that name, or the one that it records."""
    return _RECORDED.get(name, name)


@lru_cache
def _register(name: str, own: bool) -> str:
    """The name of an attention that is recorded and computes as another; registered once."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    own = own or name.startswith(OURS)
    attention = name if own else "eager"
    masks = ALL_MASK_ATTENTION_FUNCTIONS.get(name, sdpa_mask) if own else _shown_mask
    # A name with "flash" makes transformers choose flash attention's masks.
    safe = name.replace("/", "_").replace("|", "_")
    made = f"{OURS}_seen_{safe}" if own else f"{OURS}_eager_{safe.replace('flash', 'fl')}"
    AttentionInterface.register(made, partial(_attend, attention, own))
    AttentionMaskInterface.register(made, masks)
    _RECORDED[made] = name
    return made


def _attend(
    name: str, own: bool, module: nn.Module, *given: Any, **more: Any
) -> tuple[Tensor, Any]:
    function = attention_named(name, module)
    if not own and more.get("indices") is not None:
        function = partial(_attend_selected, function)
    recorder = _RECORDER.get()
    if recorder is None:  # activations that another thread computes once more
        return function(module, *given, **more)
    return recorder[0](function, module, *given, **more)


def attention_named(name: str, module: nn.Module) -> AttentionFunction:
    """The attention of that name; eager attention is that of the model's own file."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if name == "eager" and eager is None:
        name = "sdpa"
    function: AttentionFunction = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return function


def _attend_selected(
    attend: AttentionFunction,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor,
    **more: Any,
) -> tuple[Tensor, Any]:
    """Attention to the keys that an indexer has selected: plain kinds of attention know no other.

    A layer hides the rest itself only where it sees the name of a plain attention.
    """
    mask = hide_unselected(attention_mask, more.pop("indices"))
    return attend(module, q, k, v, mask, **more)


def hide_unselected(mask: Tensor, indices: Tensor) -> Tensor:
    """The mask of every pair (B, 1, T, S) that also hides keys not among `indices` (B, T, n)."""
    selected = torch.zeros_like(mask[:, 0], dtype=torch.bool).scatter(-1, indices.long(), True)
    if mask.dtype == torch.bool:
        return mask & selected[:, None]
    return mask.masked_fill(~selected[:, None], torch.finfo(mask.dtype).min)


def hidden(mask: Tensor) -> Tensor:
    """Where a mask, boolean or added to scores, hides a key."""
    return ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2


def _shown_mask(*sizes: Any, **more: Any) -> Any:
    """The mask of eager attention, never left out, shown to the recorder."""
    from transformers.masking_utils import eager_mask

    mask = eager_mask(*sizes, **{**more, "allow_is_causal_skip": False})
    recorder = _RECORDER.get()
    if isinstance(mask, Tensor) and recorder is not None and recorder[1] is not None:
        recorder[1](mask, int(more.get("local_size") or 0))
    return mask


@dataclass
class AttentionCall:
    """One call of the attention function of `module`: its arguments, and what it made.

    `window` is how far back the mask lets a query see, 0 for all; None where transformers made no
    mask. `more` are the other arguments (scaling, softcap, s_aux, …).
    """

    module: nn.Module
    q: Float[Tensor, "b h t d"]
    k: Float[Tensor, "b g s d"]
    v: Float[Tensor, "b g s e"]
    mask: Tensor | None
    more: dict[str, Any]
    out: Float[Tensor, "b t h e"]
    window: int | None = None

    @property
    def sliding(self) -> int | None:
        """The window outside of which the layer sees nothing, or None."""
        given = self.more.get("sliding_window")
        return int(given) if given is not None else self.window or None


def run_recorded(
    model: Any,
    see: Callable[[AttentionCall], Tensor | None],
    masks: MaskRecorder | None = None,
    **inputs: Any,
) -> Any:
    """What the model gives in evaluation, every call of attention shown to `see`.

    `see` may answer with an output to go on with in place of the call's own.
    """

    def attend(
        own: AttentionFunction,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None = None,
        **more: Any,
    ) -> tuple[Tensor, Any]:
        out, weights = own(module, q, k, v, attention_mask, **more)
        other = see(AttentionCall(module, q, k, v, attention_mask, more, out))
        return (out if other is None else other), weights

    with torch.no_grad(), without_dropout(model), recording(model, attend, masks):
        return model(**inputs)


@dataclass(eq=False)
class ProbedLayer:
    """The record of one layer: its calls unmodified, and with other position embeddings.

    Attributes:
        module: the layer.
        calls: its calls in one forward.
        argument: the place of its position embeddings among its arguments; None if it takes none.
        tables: these embeddings.
        has_ids: whether it is given the tokens' position_ids.
        rotary: the module that made the embeddings, and the type of layer it made them for.
        unrotated, doubled: its call with embeddings that rotate nothing, and that only double.
    """

    module: nn.Module
    calls: list[AttentionCall]
    argument: str | int | None = None
    tables: Any = None
    has_ids: bool = False
    rotary: tuple[nn.Module, str] | None = None
    unrotated: AttentionCall | None = None
    doubled: AttentionCall | None = None

    @property
    def call(self) -> AttentionCall:
        """Its first call."""
        return self.calls[0]


class _Probe:
    """Records a forward, and calls each layer again when it has run."""

    def __init__(self) -> None:
        self.layers: dict[nn.Module, ProbedLayer] = {}
        self._done: set[nn.Module] = set()
        self._windows: dict[int, int] = {}
        self._made: dict[int, tuple[nn.Module, str]] = {}
        self._kept: list[Tensor] = []  # so that no other tensor takes their place in memory
        self._again: list[AttentionCall] | None = None

    def keep_mask(self, mask: Tensor, window: int) -> None:
        """How far back this mask lets a layer see."""
        self._kept.append(mask)
        self._windows[mask.data_ptr()] = window

    def see(self, call: AttentionCall) -> None:
        """Keep a call, apart where a layer is called again."""
        if call.mask is not None:
            call.window = self._windows.get(call.mask.data_ptr())
        if self._again is not None:
            self._again.append(call)
        else:
            self.layers.setdefault(call.module, ProbedLayer(call.module, [])).calls.append(call)

    def keep_tables(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any
    ) -> None:
        """A hook of a rotary module: which tables it has made."""
        first = made[0] if isinstance(made, tuple | list) and made else made
        kinds = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
        if isinstance(first, Tensor):
            self._made[first.data_ptr()] = module, kinds[0] if kinds else ""
            self._kept.append(first)

    def call_again(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any
    ) -> None:
        """A hook of any module: a layer is called once more with other position embeddings.

        And then as it was, so that what it hands to later layers is its own again.
        """
        layer = self.layers.get(module)
        if layer is None or module in self._done or self._again is not None:
            return
        self._done.add(module)
        argument = find_tables(args, kwargs)
        if argument is None:
            return
        given = kwargs[argument] if isinstance(argument, str) else args[argument]
        layer.argument, layer.tables = argument, given
        layer.has_ids = kwargs.get("position_ids") is not None
        first = given if isinstance(given, Tensor) else given[0]
        layer.rotary = self._made.get(first.data_ptr())

        def called_with(tables: Any) -> AttentionCall:
            other_args, other = with_argument(args, kwargs, argument, tables)
            calls: list[AttentionCall] = []
            self._again = calls
            try:
                module.forward(*other_args, **other)
            finally:
                self._again = None
            return calls[0]

        layer.doubled = called_with(unrotated(given, 2.0))
        layer.unrotated = called_with(unrotated(given))
        called_with(given)


def probe(parts: ModelParts) -> dict[nn.Module, ProbedLayer]:
    """What each attention layer of the decoder is given and does, from one forward.

    The layers are in the order of their calls. Raises `InputError` where the forward fails.
    """
    recorder = _Probe()
    hooks = []
    for module in parts.decoder.modules():
        hook = recorder.keep_tables if rotary_buffers(module) else recorder.call_again
        hooks.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        given = {"input_ids": probe_tokens(parts), "use_cache": False}
        with explained(parts.name, "cannot be probed: its forward fails while it is recorded"):
            run_recorded(parts.model, recorder.see, recorder.keep_mask, **given)
    finally:
        for handle in hooks:
            handle.remove()
    inside = set(parts.decoder.modules())
    return {module: layer for module, layer in recorder.layers.items() if module in inside}


def replay(
    parts: ModelParts, probed: Mapping[nn.Module, ProbedLayer], start: int | None = None
) -> tuple[dict[nn.Module, list[AttentionCall]], Any]:
    """The calls of a forward in which every layer reads what it read in the probe, and its cache.

    Each layer's input is then the same as before, whatever the layers below have become. `start`
    is the position of the first token; None gives the model no position ids.
    """
    calls: dict[nn.Module, list[AttentionCall]] = {}
    ids, more = probe_tokens(parts), dict[str, Any]()
    if start is not None:
        more["position_ids"] = torch.arange(start, start + ids.shape[1], device=ids.device)[None]

    def see(call: AttentionCall) -> Tensor | None:
        made = calls.setdefault(call.module, [])
        made.append(call)
        before = probed[call.module].calls if call.module in probed else []
        return before[len(made) - 1].out if len(made) <= len(before) else None

    made = run_recorded(parts.model, see, input_ids=ids, use_cache=start is None, **more)
    return calls, getattr(made, "past_key_values", None)


def unrotated(like: Any, size: float = 1.0) -> Any:
    """Position embeddings that rotate nothing and multiply by `size`, of the kind of `like`."""
    if isinstance(like, Tensor):
        return torch.full_like(like, size)
    return torch.full_like(like[0], size), torch.zeros_like(like[1])


def find_tables(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | int | None:
    """The place of the position embeddings among a layer's arguments, or None."""
    given: list[tuple[str | int, Any]] = [*kwargs.items(), *enumerate(args)]
    given.sort(key=lambda pair: pair[0] != NAME)
    return next((name for name, value in given if _is_table(value)), None)


def _is_table(value: Any) -> bool:
    if isinstance(value, Tensor):
        return bool(value.is_complex()) and value.dim() == 3
    pair = isinstance(value, tuple | list) and len(value) == 2
    if not pair or not all(isinstance(x, Tensor) and x.is_floating_point() for x in value):
        return False
    return bool(value[0].dim() == 3 and value[0].shape == value[1].shape)


def with_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], argument: str | int, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with this value at that place."""
    if isinstance(argument, str):
        return args, {**kwargs, argument: value}
    return (*args[:argument], value, *args[argument + 1 :]), kwargs


def rotary_buffers(module: nn.Module) -> list[str]:
    """The names of the frequencies that a module holds; those it started from are no part."""
    names = [name for name, buffer in module._buffers.items() if buffer is not None]
    return [name for name in names if name.endswith("inv_freq") and "original" not in name]


def probe_tokens(parts: ModelParts, count: int = COUNT) -> Tensor:
    """A few tokens from all over the vocabulary.

    Its first tokens are often reserved and hardly trained, and what a model makes of those is much
    a matter of rounding (SmolLM2 in bf16: logits 3 to 12 % off, of other tokens 1 %).
    """
    size = int(getattr(parts.config, "vocab_size", count + 3))
    return ((torch.arange(count, device=_device(parts)) + 1) * size // (count + 1))[None]


def _device(parts: ModelParts) -> torch.device:
    """Where the model takes its tokens; accelerate moves what lies elsewhere."""
    for module in parts.model.get_input_embeddings().modules():
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    device = torch.device(parts.model.device)
    if device.type == "meta":
        raise InputError("the weights of this model are on the meta device: load them first")
    return device
