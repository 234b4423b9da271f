"""Record the attention calls of a model, and probe each layer with other position embeddings.

While the model runs, its configurations name an attention function that computes the same as their
own and passes each call to a recorder.

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
from normattn.hf.rotations import HeadRotation, Spectrum
from normattn.models.utils import without_dropout

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
ATTENTION_FIELD = "_attn_implementation_internal"
PREFIX = "normattn"
AttentionFunction = Callable[..., tuple[Tensor, Any]]
Recorder = AttentionFunction
"""Called instead of an attention function, with that function as the first argument."""
Masks = dict[int, tuple[int, Tensor]]
"""By its address, the window of each mask in tokens, 0 for none, and the mask, to keep it alive."""

_RECORDING: ContextVar[tuple[Recorder, Masks] | None] = ContextVar("recording", default=None)


@contextmanager
def recording(
    model: nn.Module, recorder: Recorder, keep_implementation: bool = False
) -> Iterator[Masks]:
    """Pass every attention call in `model` to `recorder` while inside; yields the recorded masks.

    Layers compute by their family's `eager_attention_forward` with a mask, but extended ones, or
    all with `keep_implementation`, by their own. A compiled model runs uncompiled.
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
    """Call the recorder with the attention of that name.

    Eager attention takes no indices of selected keys, and a layer hides the other keys itself only
    where it sees the name of a stock implementation.
    """
    stock = attention_implementation(name, module)

    def select_and_attend(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        return stock(
            module, q, k, v, hide_unselected(attention_mask, kwargs.pop("indices")), **kwargs
        )

    selected = not keep and kwargs.get("indices") is not None
    function = select_and_attend if selected else stock
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
    """One call of the attention function of `module`: its arguments and its output."""

    module: nn.Module
    q: Float[Tensor, "b h t d"]
    k: Float[Tensor, "b g s d"]
    v: Float[Tensor, "b g s e"]
    mask: Tensor | None
    kwargs: dict[str, Any]  # scaling, softcap, s_aux, …
    out: Float[Tensor, "b t h e"]
    mask_window: int | None = None  # in tokens, 0 for none; None where transformers made no mask

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
    """Run the model; `on_call` gets every attention call, and may return another output for it."""

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
    """The record of one attention layer, and its rotation, which `plan` detects."""

    module: nn.Module
    index: int
    calls: list[AttentionCall] = field(default_factory=list)  # in one forward
    argument: str | int | None = None  # the name or index of that for position embeddings
    tables: Any = None  # these embeddings
    rotary: tuple[nn.Module, str] | None = None  # the module and layer type that computed them
    unrotated: AttentionCall | None = None  # a call with embeddings that rotate nothing
    doubled: AttentionCall | None = None  # one with those times 2
    rotation: HeadRotation | None = None  # None without rotary positions and within a window

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


class _Probe:
    """Records a forward, and runs each layer again with other position embeddings."""

    def __init__(self, modules: Collection[nn.Module]) -> None:
        self.layers: dict[nn.Module, Layer] = {}
        self._modules = modules
        self._rerun: set[nn.Module] = set()
        # By the address of a table, which is kept alive, what computed it.
        self._rotary: dict[int, tuple[Tensor, nn.Module, str]] = {}
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
            self._rotary[first.data_ptr()] = first, module, layer_types[0] if layer_types else ""

    def rerun_layer(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any
    ) -> None:
        """Forward hook of any module: run a layer again with other position embeddings."""
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
        if (source := self._rotary.get(first.data_ptr())) is not None:
            layer.rotary = source[1:]

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
    """Record each attention layer of the decoder in one forward, in the order of their calls."""
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
    for name, value in sorted(arguments, key=lambda pair: pair[0] != "position_embeddings"):
        if isinstance(value, Tensor) and value.is_complex() and value.dim() == 3:
            return name
        if isinstance(value, tuple | list) and len(value) == 2:
            cos, sin = value
            floating = all(isinstance(x, Tensor) and x.is_floating_point() for x in value)
            if floating and cos.dim() == 3 and cos.shape == sin.shape:
                return name
    return None


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


def spectra_of(model: nn.Module) -> list[Spectrum]:
    """The spectrum of each frequency buffer in a model."""
    return [
        (
            module._buffers[name].detach().double().cpu().flatten(),  # type: ignore[union-attr]
            float(getattr(module, f"{name.removesuffix('inv_freq')}attention_scaling", 1.0)),
        )
        for module in model.modules()
        for name in rotary_buffers(module)
    ]


def probe_tokens(parts: ModelParts) -> Tensor:
    """Tokens spread over the vocabulary.

    Its first tokens are often reserved and hardly trained, so rounding changes their logits more.
    """
    size = int(getattr(parts.config, "vocab_size", PROBE_TOKENS + 3))
    hooks = (getattr(x, "_hf_hook", None) for x in parts.model.get_input_embeddings().modules())
    devices = [getattr(hook, "execution_device", None) for hook in hooks]  # of accelerate
    device = torch.device(next((x for x in devices if x is not None), parts.model.device))
    if device.type == "meta":
        raise InputError("the weights of this model are on the meta device: load them first")
    return ((torch.arange(PROBE_TOKENS, device=device) + 1) * size // (PROBE_TOKENS + 1))[None]
