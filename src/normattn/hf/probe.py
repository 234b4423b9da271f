"""Ask a model what its attention layers do: a few tokens, with an attention that is recorded.

The queries, keys and masks that reach the attention function tell what each layer does, whatever a
family's file writes. Each layer is called by its own model, and then again with position embeddings
that rotate nothing. What they do not confirm is refused, so that no family is served wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.model_parts import ModelParts
from normattn.hf.recorder import AttentionFunction, evaluating, recording
from normattn.hf.rope_tables import find_tables, unrotated

COUNT = 9
"""How many tokens a model is asked with."""
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
class AttentionCall:
    """One call of the attention function.

    Attributes:
        module: the layer that called it.
        query, key: as they arrived (B, H, T, D).
        window: how far back its mask lets it see, 0 for all; None where transformers made no mask.
        more: the other arguments.
        output: what attention made (B, T, H, E).
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    window: int | None
    more: dict[str, Any]
    output: Tensor


@dataclass
class ProbedLayer:
    """What was seen of one layer: as it is, and with embeddings that rotate nothing or double.

    `argument` is where its position embeddings stand among its arguments, None where it takes none;
    `rotary` the module that made them, and the type of layer that it was asked for.
    """

    call: AttentionCall
    argument: str | int | None = None
    tables: Any = None
    has_ids: bool = False
    rotary: tuple[nn.Module, str] | None = None
    unrotated: AttentionCall | None = None
    doubled: AttentionCall | None = None


@dataclass
class Probed:
    """What one forward showed: its layers in the order of their calls, and every output."""

    layers: dict[nn.Module, ProbedLayer] = field(default_factory=dict)
    outputs: dict[nn.Module, list[Tensor]] = field(default_factory=dict)


class _Probe:
    """Records a forward, and calls each layer again when it has run."""

    def __init__(self) -> None:
        self._windows: dict[int, int] = {}
        self._kept: list[Tensor] = []  # so that no other tensor takes their place in memory
        self.calls: dict[nn.Module, list[AttentionCall]] = {}
        self.layers: dict[nn.Module, ProbedLayer] = {}
        self._made: list[tuple[int, tuple[nn.Module, str]]] = []
        self._again: list[AttentionCall] | None = None

    def keep_mask(self, mask: Tensor, window: int) -> None:
        """How far back this mask lets a layer see."""
        self._kept.append(mask)
        self._windows[mask.data_ptr()] = window

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
        """The layer's own attention, kept; nothing is computed where a layer is called again."""
        seen = isinstance(attention_mask, Tensor)
        window = self._windows.get(attention_mask.data_ptr()) if seen else None
        if self._again is not None:
            out = value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
            self._again.append(AttentionCall(module, query, key, window, more, out))
            return out, None
        result = own(module, query, key, value, attention_mask, **more)
        call = AttentionCall(module, query, key, window, more, result[0])
        self.calls.setdefault(module, []).append(call)
        return result

    def keep_tables(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any
    ) -> None:
        """A hook of a rotary module: which tables it has made."""
        first = made[0] if isinstance(made, tuple | list) and made else made
        kinds = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
        if isinstance(first, Tensor):
            self._made.append((first.data_ptr(), (module, kinds[0] if kinds else "")))
            self._kept.append(first)

    def call_again(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any
    ) -> None:
        """A hook of any module: a layer is called once more with other position embeddings.

        And then as it was, so that what it hands to later layers is its own again.
        """
        if module not in self.calls or module in self.layers or self._again is not None:
            return
        layer = self.layers[module] = ProbedLayer(self.calls[module][0])
        argument = find_tables(args, kwargs)
        if argument is None:
            return
        given = kwargs[argument] if isinstance(argument, str) else args[argument]
        layer.argument, layer.tables = argument, given
        layer.has_ids = kwargs.get("position_ids") is not None
        first = given if isinstance(given, Tensor) else given[0]
        layer.rotary = dict(self._made).get(first.data_ptr())
        found = []
        for size in (2.0, 1.0, None):
            tables = given if size is None else unrotated(given, size)
            other_args, other = with_argument(args, kwargs, argument, tables)
            self._again = []
            try:
                module.forward(*other_args, **other)
                found.append(self._again[0])
            finally:
                self._again = None
        layer.doubled, layer.unrotated, _ = found


class _Replay:
    """Gives every layer the output of an earlier forward, and keeps what it would have made."""

    def __init__(self, outputs: dict[nn.Module, list[Tensor]]) -> None:
        self.calls: dict[nn.Module, list[AttentionCall]] = {}
        self._outputs = outputs

    def keep_mask(self, mask: Tensor, window: int) -> None:
        """Known from the probe."""

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
        """The layer's attention is computed and kept; what it made before is given back."""
        out = own(module, query, key, value, attention_mask, **more)[0]
        calls = self.calls.setdefault(module, [])
        calls.append(AttentionCall(module, query, key, None, more, out))
        before = self._outputs.get(module, [])
        return (before[len(calls) - 1] if len(calls) <= len(before) else out), None


def probe(parts: ModelParts) -> Probed:
    """What each attention layer of the decoder is given and does, from one forward.

    Raises `InputError` where the model cannot be asked.
    """
    recorder = _Probe()
    hooks = []
    for module in parts.decoder.modules():
        kind = recorder.keep_tables if rotary_buffers(module) else recorder.call_again
        hooks.append(module.register_forward_hook(kind, with_kwargs=True))
    try:
        _forward(parts, recorder, use_cache=False)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{parts.name} cannot be asked what its layers do: its forward fails while its "
            f"attention is recorded ({short(error)})"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    inside = set(parts.decoder.modules())
    order = {module: recorder.layers[module] for module in recorder.calls if module in inside}
    outputs = {module: [call.output for call in recorder.calls[module]] for module in order}
    return Probed(order, outputs)


def replay(
    parts: ModelParts, probed: Probed, start: int | None = None
) -> tuple[dict[nn.Module, list[AttentionCall]], Any]:
    """The calls of a forward in which every layer reads what it read in the probe, and its cache.

    Each layer's input is then the same as before, whatever the layers below have become. `start`
    is the position of the first token; None gives the model no position ids.
    """
    recorder = _Replay(probed.outputs)
    cache = _forward(parts, recorder, use_cache=start is None, start=start)
    return recorder.calls, cache


def _forward(
    parts: ModelParts, recorder: _Probe | _Replay, use_cache: bool, start: int | None = None
) -> Any:
    ids, more = probe_tokens(parts), {}
    if start is not None:
        more["position_ids"] = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
    with evaluating(parts.model), recording(parts.model, recorder):
        made = parts.model(input_ids=ids, use_cache=use_cache, **more)
        return getattr(made, "past_key_values", None)


def short(error: Exception) -> str:
    """The kind of an error and the beginning of its text, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


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
    size = int(getattr(parts.config, "vocab_size", COUNT + 3))
    return ((torch.arange(count, device=_device(parts)) + 1) * size // (count + 1))[None]


def _device(parts: ModelParts) -> torch.device:
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
