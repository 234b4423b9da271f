"""Record the attention calls of a model, and probe each layer with other position embeddings.

While the model runs, its configurations name an attention function that computes the same as their
own and passes each call to a recorder. The recorded queries, keys and masks show what a layer does,
whatever its code looks like.

Legend: B batch, H query heads, G key heads, T queries, S keys, D head dimension, E value size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.model_parts import ModelParts, explained
from normattn.hf.rotations import (
    EmbeddingTables,
    HeadRotation,
    Spectrum,
    method_frequencies,
    method_gain,
)
from normattn.models.utils import without_dropout
from normattn.score import ScoreSpec

PROBE_TOKENS = 9
"""The number of tokens in a probe."""
KNOWN_ARGUMENTS = frozenset(
    {
        *("dropout", "scaling", "sliding_window", "softcap", "s_aux", "position_ids", "use_cache"),
        *("cache_position", "is_causal", "output_attentions", "output_hidden_states"),
        *("logits_to_keep", "return_dict", "num_items_in_batch", "output_router_logits"),
    }
)
"""Arguments of attention functions in addition to q, k, v and the mask.

Layers also pass on arguments of the model's caller (`num_items_in_batch` of the Trainer)."""
POSITION_EMBEDDINGS = "position_embeddings"
ATTENTION_FIELD = "_attn_implementation_internal"
PREFIX = "normattn"
AttentionFunction = Callable[..., tuple[Tensor, Any]]
Recorder = Callable[..., tuple[Tensor, Any]]
"""Called instead of an attention function, with that function as the first argument."""
Masks = dict[int, tuple[int, Tensor]]
"""By its address in memory, the window of each mask in tokens, 0 for none, and the mask itself.

Layers pass on views of a mask. It is kept alive, so that its address stays its own.
"""

_RECORDING: ContextVar[tuple[Recorder, Masks] | None] = ContextVar("recording", default=None)


@contextmanager
def recording(
    model: nn.Module, recorder: Recorder, keep_implementation: bool = False
) -> Iterator[Masks]:
    """Pass every attention call in `model` to `recorder` while inside; yields the recorded masks.

    Layers compute by their family's `eager_attention_forward`, and each gets a mask. Extended
    layers keep their own implementation, and so do all with `keep_implementation`. A compiled model
    runs uncompiled.
    """
    masks: Masks = {}
    configs: list[Any] = [module.__dict__.get("config") for module in model.modules()]
    configs = [config for config in configs if hasattr(config, ATTENTION_FIELD)]
    distinct = {id(x): x for config in configs for x in (config, config.get_text_config())}
    saved = [(config, getattr(config, ATTENTION_FIELD)) for config in distinct.values()]
    token = _RECORDING.set((recorder, masks))
    try:
        for config, name in saved:
            setattr(config, ATTENTION_FIELD, _register(str(name or "eager"), keep_implementation))
        compiled = "torch._dynamo" in sys.modules
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            yield masks
    finally:
        for config, name in saved:
            setattr(config, ATTENTION_FIELD, name)
        _RECORDING.reset(token)


@lru_cache
def _register(name: str, keep: bool) -> str:
    """The name of an implementation that records and computes as `name`; registered once."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    keep = keep or name.startswith(PREFIX)
    implementation = name if keep else "eager"
    masks = ALL_MASK_ATTENTION_FUNCTIONS.get(name, sdpa_mask) if keep else _recorded_mask
    # A name with "flash" makes transformers choose flash attention's masks.
    safe = name.replace("/", "_").replace("|", "_")
    recorded = f"{PREFIX}_seen_{safe}" if keep else f"{PREFIX}_eager_{safe.replace('flash', 'fl')}"
    AttentionInterface.register(recorded, partial(_recorded_attention, implementation, keep))
    AttentionMaskInterface.register(recorded, masks)
    return recorded


def _recorded_attention(
    name: str, keep: bool, module: nn.Module, *args: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    function = attention_implementation(name, module)
    if not keep and kwargs.get("indices") is not None:
        function = partial(_attend_selected, function)
    active = _RECORDING.get()
    if active is None:  # another thread recomputes activations
        return function(module, *args, **kwargs)
    return active[0](function, module, *args, **kwargs)


def attention_implementation(name: str, module: nn.Module) -> AttentionFunction:
    """The attention function of that name; for eager, the one in the model's own file."""
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
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Attention to the keys that an indexer selected; eager attention takes no indices.

    A layer hides the other keys itself only where it sees the name of a stock implementation.
    """
    mask = hide_unselected(attention_mask, kwargs.pop("indices"))
    return attend(module, q, k, v, mask, **kwargs)


def hide_unselected(mask: Tensor, indices: Tensor) -> Tensor:
    """The pair mask (B, 1, T, S) with all keys hidden that are not in `indices` (B, T, n)."""
    selected = torch.zeros_like(mask[:, 0], dtype=torch.bool).scatter(-1, indices.long(), True)
    if mask.dtype == torch.bool:
        return mask & selected[:, None]
    return mask.masked_fill(~selected[:, None], torch.finfo(mask.dtype).min)


def hidden_keys(mask: Tensor) -> Tensor:
    """True where a boolean or additive mask hides a key."""
    return ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2


def _recorded_mask(*args: Any, **kwargs: Any) -> Any:
    """Eager attention's mask, never skipped, and recorded."""
    from transformers.masking_utils import eager_mask

    mask = eager_mask(*args, **{**kwargs, "allow_is_causal_skip": False})
    active = _RECORDING.get()
    if isinstance(mask, Tensor) and active is not None:
        active[1][mask.data_ptr()] = int(kwargs.get("local_size") or 0), mask
    return mask


@dataclass
class AttentionCall:
    """One call of the attention function of `module`: its arguments and its output.

    `kwargs` are further arguments (scaling, softcap, s_aux, …). `mask_window` is the window of the
    mask in tokens, 0 for none; None where transformers made no mask.
    """

    module: nn.Module
    q: Float[Tensor, "b h t d"]
    k: Float[Tensor, "b g s d"]
    v: Float[Tensor, "b g s e"]
    mask: Tensor | None
    kwargs: dict[str, Any]
    out: Float[Tensor, "b t h e"]
    mask_window: int | None = None

    @property
    def scaling(self) -> float:
        """The factor λ of the logits."""
        return float(self.kwargs.get("scaling") or self.q.shape[-1] ** -0.5)

    @property
    def sliding_window(self) -> int | None:
        """The layer's sliding window in tokens, or None."""
        size = self.kwargs.get("sliding_window")
        return int(size) if size is not None else self.mask_window or None


def run_recorded(
    model: Any, on_call: Callable[[AttentionCall], Tensor | None], **inputs: Any
) -> Any:
    """Run the model in evaluation mode, and pass every attention call to `on_call`.

    `on_call` may return an output that replaces the call's.
    """

    def attend(
        function: AttentionFunction,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        out, weights = function(module, q, k, v, attention_mask, **kwargs)
        window = None
        if attention_mask is not None and attention_mask.data_ptr() in masks:
            window = masks[attention_mask.data_ptr()][0]
        replacement = on_call(AttentionCall(module, q, k, v, attention_mask, kwargs, out, window))
        return (out if replacement is None else replacement), weights

    with torch.no_grad(), without_dropout(model), recording(model, attend) as masks:
        return model(**inputs)


@dataclass(eq=False)
class Layer:
    """The record of one attention layer, and its rotation, which `rope_detection` detects.

    Attributes:
        module: the attention layer.
        index: its number.
        calls: its attention calls in one forward.
        argument: the name or index of its argument for position embeddings; None if it has none.
        tables: these embeddings.
        rotary: the module and layer type that the embeddings come from.
        unrotated, doubled: its call with embeddings that rotate nothing, and with those times 2.
        rotation: None without rotary positions and within a window.
        table_format: the format of its position embeddings.
        key_source: the layer whose keys it reads, if not its own.
    """

    module: nn.Module
    index: int
    calls: list[AttentionCall] = field(default_factory=list)
    argument: str | int | None = None
    tables: Any = None
    rotary: tuple[nn.Module, str] | None = None
    unrotated: AttentionCall | None = None
    doubled: AttentionCall | None = None
    rotation: HeadRotation | None = None
    table_format: EmbeddingTables | None = None
    key_source: Layer | None = None

    @property
    def call(self) -> AttentionCall:
        """Its first call."""
        return self.calls[0]

    @property
    def sliding_window(self) -> int | None:
        """Its sliding window in tokens, or None."""
        return self.call.sliding_window

    def tables_at(self, ids: Int[Tensor, "b t"]) -> Any:
        """The position embeddings that its rotary module computes at these positions."""
        assert self.rotary is not None
        module, layer_type = self.rotary
        first = self.tables if isinstance(self.tables, Tensor) else self.tables[0]
        return module(first.real, ids.to(first.device), *([layer_type] if layer_type else []))

    def spectrum(self, spec: ScoreSpec) -> Spectrum:
        """Its frequencies under a method, and the factor of cos and sin."""
        assert self.rotation is not None
        assert self.table_format is not None
        theta = method_frequencies(spec, self.rotation)
        return theta.abs(), self.table_format.amplitude * method_gain(spec) ** 0.5

    @property
    def selects(self) -> bool:
        """Whether it selects keys by an indexer or by its own mask."""
        return self.call.kwargs.get("indices") is not None or self.call.mask_window is None

    @property
    def unsupported(self) -> list[str]:
        """Arguments that the layer passes to its attention and normattn does not support."""
        kwargs = self.call.kwargs
        used = [name for name, x in kwargs.items() if x is not None and x is not False]
        names = [name for name in used if name not in KNOWN_ARGUMENTS and name != "indices"]
        # As in transformers, the layer's attribute is the default of the argument.
        causal = kwargs.get("is_causal")
        causal = getattr(self.module, "is_causal", True) if causal is None else causal
        return [*names, *(["is_causal=False"] if causal is False else [])]


class _Probe:
    """Records a forward, and runs each layer again with other position embeddings.

    Tables are recognised by their address in memory, so they are kept alive.
    """

    def __init__(self, modules: Collection[nn.Module]) -> None:
        self.layers: dict[nn.Module, Layer] = {}
        self._modules = modules
        self._rerun: set[nn.Module] = set()
        self._rotary: dict[int, tuple[nn.Module, str]] = {}
        self._alive: list[Tensor] = []
        self._rerun_calls: list[AttentionCall] | None = None

    def record_call(self, call: AttentionCall) -> None:
        """Record a call, separately while a layer runs again."""
        if self._rerun_calls is not None:
            self._rerun_calls.append(call)
        elif call.module in self._modules:
            index = getattr(call.module, "layer_idx", None)
            index = index if isinstance(index, int) else len(self.layers)
            self.layers.setdefault(call.module, Layer(call.module, index)).calls.append(call)

    def record_tables(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tables: Any
    ) -> None:
        """Forward hook of a rotary module: record which tables it computed."""
        first = tables[0] if isinstance(tables, tuple | list) and tables else tables
        layer_types = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
        if isinstance(first, Tensor):
            self._rotary[first.data_ptr()] = module, layer_types[0] if layer_types else ""
            self._alive.append(first)

    def rerun_layer(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any
    ) -> None:
        """Forward hook of any module: run a layer again with other position embeddings.

        The last run uses the layer's own embeddings, so that later layers get the same values.
        """
        layer = self.layers.get(module)
        if layer is None or module in self._rerun or self._rerun_calls is not None:
            return
        self._rerun.add(module)
        argument = find_tables(args, kwargs)
        if argument is None:
            return
        own_tables = kwargs[argument] if isinstance(argument, str) else args[argument]
        layer.argument, layer.tables = argument, own_tables
        first = own_tables if isinstance(own_tables, Tensor) else own_tables[0]
        layer.rotary = self._rotary.get(first.data_ptr())

        def call_with(tables: Any) -> AttentionCall:
            new_args, new_kwargs = replace_argument(args, kwargs, argument, tables)
            calls: list[AttentionCall] = []
            self._rerun_calls = calls
            try:
                module.forward(*new_args, **new_kwargs)
            finally:
                self._rerun_calls = None
            return calls[0]

        layer.doubled = call_with(identity_tables(own_tables, 2.0))
        layer.unrotated = call_with(identity_tables(own_tables))
        call_with(own_tables)


def probe(parts: ModelParts) -> list[Layer]:
    """Record each attention layer of the decoder in one forward, in the order of their calls.

    Raises `InputError` where the forward fails.
    """
    modules = list(parts.decoder.modules())
    recorder = _Probe(frozenset(modules))
    with ExitStack() as hooks:
        for module in modules:
            hook = recorder.record_tables if rotary_buffers(module) else recorder.rerun_layer
            hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        inputs = {"input_ids": probe_tokens(parts), "use_cache": False}
        with explained(parts.name, "cannot be probed: its forward fails while it is recorded"):
            run_recorded(parts.model, recorder.record_call, **inputs)
    return list(recorder.layers.values())


def replay(
    parts: ModelParts, layers: Iterable[Layer], start: int | None = None
) -> tuple[dict[nn.Module, list[AttentionCall]], Any]:
    """Run the probe's tokens again, each layer on its recorded input; return calls and cache.

    Each call returns the output of the probe, so a changed layer does not change the input of later
    ones. `start` is the position of the first token; None passes no position_ids.
    """
    calls: dict[nn.Module, list[AttentionCall]] = {}
    probed = {layer.module: layer.calls for layer in layers}
    ids, kwargs = probe_tokens(parts), dict[str, Any]()
    if start is not None:
        kwargs["position_ids"] = torch.arange(start, start + ids.shape[1], device=ids.device)[None]

    def record(call: AttentionCall) -> Tensor | None:
        recorded = calls.setdefault(call.module, [])
        recorded.append(call)
        before = probed.get(call.module, [])
        return before[len(recorded) - 1].out if len(recorded) <= len(before) else None

    output = run_recorded(parts.model, record, input_ids=ids, use_cache=start is None, **kwargs)
    return calls, getattr(output, "past_key_values", None)


def identity_tables(like: Any, amplitude: float = 1.0) -> Any:
    """Position embeddings in the format of `like` that rotate nothing: cos is the amplitude."""
    if isinstance(like, Tensor):
        return torch.full_like(like, amplitude)
    return torch.full_like(like[0], amplitude), torch.zeros_like(like[1])


def find_tables(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | int | None:
    """The name or index of a layer's argument that holds position embeddings, or None."""
    arguments: list[tuple[str | int, Any]] = [*kwargs.items(), *enumerate(args)]
    arguments.sort(key=lambda pair: pair[0] != POSITION_EMBEDDINGS)
    return next((name for name, value in arguments if _is_table(value)), None)


def _is_table(value: Any) -> bool:
    if isinstance(value, Tensor):
        return bool(value.is_complex()) and value.dim() == 3
    pair = isinstance(value, tuple | list) and len(value) == 2
    if not pair or not all(isinstance(x, Tensor) and x.is_floating_point() for x in value):
        return False
    return bool(value[0].dim() == 3 and value[0].shape == value[1].shape)


def replace_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], argument: str | int, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with another value for one of them."""
    if isinstance(argument, str):
        return args, {**kwargs, argument: value}
    return (*args[:argument], value, *args[argument + 1 :]), kwargs


def rotary_buffers(module: nn.Module) -> list[str]:
    """The names of a module's frequency buffers, without copies of the original ones."""
    names = [name for name, buffer in module._buffers.items() if buffer is not None]
    return [name for name in names if name.endswith("inv_freq") and "original" not in name]


def probe_tokens(parts: ModelParts, count: int = PROBE_TOKENS) -> Tensor:
    """Tokens spread over the vocabulary.

    The first tokens of a vocabulary are often reserved and hardly trained, so rounding changes
    their logits more (SmolLM2 in bf16: by 3 to 12 %, other tokens' by 1 %).
    """
    size = int(getattr(parts.config, "vocab_size", count + 3))
    return ((torch.arange(count, device=_device(parts)) + 1) * size // (count + 1))[None]


def _device(parts: ModelParts) -> torch.device:
    """The device of the model's input ids; with accelerate, its hook's execution device."""
    for module in parts.model.get_input_embeddings().modules():
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    device = torch.device(parts.model.device)
    if device.type == "meta":
        raise InputError("the weights of this model are on the meta device: load them first")
    return device
