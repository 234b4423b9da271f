"""`extend`: a transformers model reads past its training length, until the handle is removed.

Nothing global is patched. A frequency method changes the buffers of the rotary modules. A method
that changes attention gives the modules above its layers a view of their configuration that names
our attention, and lets the layers hand it queries and keys that are not rotated. So neither the
configuration nor any other model built from it learns of it. Layers that attend within a window
keep all that they have. No method is taken that then has no effect, or breaks the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.attention_fn import (
    ATTRIBUTE,
    ExtendedLayer,
    ForwardMemory,
    RotatedKeyCache,
    attention_function,
)
from normattn.hf.masks import mask_function
from normattn.hf.model_parts import explained, model_parts
from normattn.hf.native import save_with_method
from normattn.hf.plan import HANDLE, Plan, plan, replaces_attention, rotates_inside
from normattn.hf.probe import (
    COUNT,
    EXACT,
    INTERNAL,
    AttentionCall,
    attention_named,
    recorded_as,
    replay,
    rotary_buffers,
)
from normattn.hf.rope_detection import Layer, method_frequencies
from normattn.hf.rope_override import (
    layer_hook,
    override_buffers,
    own_tables,
    refuse_images,
    spectrum_of,
)
from normattn.score import ScoreSpec

_NUMBERS = itertools.count()
_CONTINUOUS = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")


def extend(
    model: Any, method: str, *, train_length: int | None = None, **parameters: Any
) -> Extension:
    """Run a trained rotary model on longer texts, without training, until removed.

        with normattn.extend(model, "ReRoPE-logn+", window=2048):
            model.generate(...)

    Args:
        model: a causal language model of transformers with rotary positions, also one that PEFT or
            `torch.compile` has wrapped.
        method: inference-time components by name: PI, ABF, NTK, NTK-mixed, DynamicNTK, YaRN,
            Llama3, ReRoPE, LeakyReRoPE, SelfExtend or DualChunk, with or without `-logn+`; also
            `logn+` alone.
        train_length: the training length of the model; by default that of its configuration.
        parameters: those of the method, e.g. window=, factor=, s=, group=, base=.

    Returns the extension, switched on: `.remove()` or leaving its `with` block undoes it exactly.
    `.resolved` holds every value. A model that `torch.compile` has compiled is compiled again at
    the next call, also after `remove()`. YaRN's factor multiplies the features that rotate, of
    queries and of keys, as in transformers. Raises `InputError` if the model does not support the
    method or a value is not valid.
    """
    planned = plan(model, method, train_length, **parameters)
    try:
        return _checked(planned, by_hooks=False)
    except InputError:
        # Some families make their tables of more than the frequencies that their modules hold.
        with_ids = all(x.has_ids for x in planned.full_layers if x.rotation is not None)
        if not with_ids and not rotates_inside(planned.spec):
            raise
    return _checked(planned, by_hooks=True)


def _checked(planned: Plan, by_hooks: bool) -> Extension:
    extension = Extension(planned, by_hooks)
    try:
        check_extension(planned)
    except BaseException:
        extension.remove()
        raise
    return extension


def extension_of(model: Any) -> Extension | None:
    """The extension of a model that is switched on, or None."""
    handle: Extension | None = model_parts(model).decoder.__dict__.get(HANDLE)
    return handle


class Extension:
    """A method that is switched on; `.remove()` or leaving the `with` block switches it off.

    `spec` is the method as part of a score, `resolved` every value. `by_hooks` gives each layer
    tables of its own where changed frequencies would not reach it.
    """

    def __init__(self, planned: Plan, by_hooks: bool = False) -> None:
        self.spec, self.resolved = planned.spec, planned.resolved
        self._undo: list[Callable[[], object]] = []
        self._memory = ForwardMemory()
        self._views: dict[int, Any] = {}
        self._attention: str | None = None
        try:
            self._switch_on(planned, by_hooks)
        except BaseException:
            self.remove()
            raise

    @property
    def active(self) -> bool:
        """Whether the model is still extended by this."""
        return bool(self._undo)

    def remove(self) -> None:
        """Give the model back everything that it had. Removing twice is harmless."""
        while self._undo:
            self._undo.pop()()
        self._memory.clear()

    def __enter__(self) -> Extension:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __reduce__(self) -> Any:
        raise InputError(
            "an extended model cannot be copied or pickled: remove() the extension first"
        )

    def _switch_on(self, planned: Plan, by_hooks: bool) -> None:
        parts, spec, full = planned.parts, planned.spec, planned.full_layers
        ours = replaces_attention(spec)
        selecting = [layer for layer in full if layer.selects]
        own = str(parts.config._attn_implementation or "eager")
        self._undo.append(save_with_method(parts, planned.layers, spec))
        if ours:
            self._replace_attention(planned)
        apart = full if by_hooks else selecting if rotates_inside(spec) else []
        undo, hooked = override_buffers(planned.layers, spec, apart)
        self._undo += undo
        hooked += [layer for layer in apart if layer.rotation is not None]
        for layer in dict.fromkeys([*hooked, *(selecting if ours else [])]):
            spectrum = spectrum_of(layer, spec) if layer in hooked else None
            keep_mask = ours and layer in selecting
            self._before(layer.module, layer_hook(layer, spectrum, self._memory, keep_mask))
        for part in (part for layer in selecting if ours for part in layer.module.modules()):
            if part not in {layer.module for layer in selecting}:
                self._before(part, own_tables(self._memory))
        if ours or hooked:
            self._attention = self._register(own, bool(selecting), bool(hooked))
            self._rename(planned, self._attention)
        self._hook(parts.decoder.register_forward_pre_hook(self._begin_forward))
        self._hook(parts.decoder.register_forward_hook(self._memory.clear, always_call=True))
        self._set(parts.decoder, HANDLE, self)

    def _replace_attention(self, planned: Plan) -> None:
        """Record in each layer's module how normattn computes its attention; refuse what it cannot.

        Pages of keys, and the places of images, are refused when they come.
        """
        for layer in planned.full_layers:
            kept = None
            if layer.rotation is not None and rotates_inside(self.spec):
                kept = RotatedKeyCache()
                self._before(layer.module, kept)
            how = ExtendedLayer(self.spec, layer, self._memory, kept)
            self._set(layer.module, ATTRIBUTE, how)
        for start in _CONTINUOUS:
            self._set(planned.parts.model, start, _refuse_continuous_batching)
        modules = list(planned.parts.decoder.modules())
        if any(hasattr(part, "mrope_section") for part in modules):
            for module in filter(rotary_buffers, modules):
                self._before(module, refuse_images)

    def _register(self, own: str, pairs: bool, hooked: bool) -> str:
        """The name of our attention, or of the model's `own` under another name; registered once.

        `pairs`: its layers get a mask of every pair, since they select keys of their own. With
        `hooked` the name is this extension's alone: torch.compile looks for no new hooks on a
        module, but for the name of its attention. The name of ours says what was there before,
        since the layers that are left alone still want the masks of that; it holds no "flash",
        which transformers would read as flash attention.
        """
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ours, masks = (
            replaces_attention(self.spec),
            ALL_MASK_ATTENTION_FUNCTIONS.get(own, sdpa_mask),
        )
        attend: Callable[..., Any] = partial(_attend_as, own)
        name = f"normattn_as_{own}"
        if ours:
            name = "normattn_pairs_" if pairs else "normattn_"
            name += own.replace("flash", "fl").replace("/", "_").replace("|", "_")
            attend, masks = attention_function, mask_function(masks, pairs)
        if hooked:
            name += f"_{next(_NUMBERS)}"
            for registered in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
                self._undo.append(partial(registered._global_mapping.pop, name))
        if name not in ALL_ATTENTION_FUNCTIONS:
            AttentionInterface.register(name, attend)
            AttentionMaskInterface.register(name, masks)
        return name

    def _rename(self, planned: Plan, name: str) -> None:
        """Give every module but the layers within a window a configuration that names `name`."""
        parts = planned.parts
        kept = {layer.module for layer in planned.layers if layer.sliding is not None}
        way = {parts.model, *parts.decoder.modules()} - kept
        way |= {module for module in parts.model.modules() if parts.decoder in module.modules()}
        for module in parts.model.modules():
            own = module.__dict__.get("config")
            if module in way and hasattr(own, INTERNAL):
                if id(own) not in self._views:
                    self._views[id(own)] = _view(own, name, self._views)
                self._set(module, "config", self._views[id(own)])

    def _begin_forward(self, *_: object) -> None:
        """Forget the forward before; raise `InputError` where another attention has been set."""
        self._memory.clear()
        if torch.compiler.is_compiling():
            return
        for view in self._views.values():
            now = recorded_as(str(view._attn_implementation))
            if now != self._attention:
                raise InputError(
                    f"the attention implementation was changed to {now} while the model is "
                    "extended: remove() the extension first"
                )

    def _hook(self, handle: Any) -> None:
        self._undo.append(handle.remove)

    def _before(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Call a hook with a module's arguments before its forward."""
        self._hook(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        """Set a plain attribute, to be set back."""
        held = module.__dict__
        if name in held:
            self._undo.append(partial(held.__setitem__, name, held[name]))
        else:
            self._undo.append(partial(held.pop, name, None))
        held[name] = value


def _view(config: Any, name: str, views: dict[int, Any]) -> Any:
    """A configuration that shares every field with another, but names its own attention.

    transformers builds all modules of a model on one configuration object, which a caller may share
    between models: what is edited through the view is edited there, but the name is not.
    """
    kind, attention = type(config), [name]

    class View(kind):  # type: ignore[misc, valid-type]
        _attn_implementation_internal = property(
            lambda self: attention[0], lambda self, value: attention.__setitem__(0, value)
        )

        def get_text_config(self, *given: Any, **more: Any) -> Any:
            found = super().get_text_config(*given, **more)
            return views.get(id(found), found)

    View.__name__, View.__qualname__ = kind.__name__, kind.__qualname__
    made = object.__new__(View)
    object.__setattr__(made, "__dict__", config.__dict__)
    return made


def _attend_as(name: str, module: nn.Module, *given: Any, **more: Any) -> tuple[Tensor, Any]:
    return attention_named(name, module)(module, *given, **more)


def _refuse_continuous_batching(*_: Any, **__: Any) -> Any:
    raise InputError(
        "continuous batching keeps keys in pages, which methods that change attention do not "
        "support: use generate(), or a method that changes only frequencies (PI, ABF, NTK, YaRN)"
    )


_CLOSE, _HALF_CLOSE = 1e-3, 5e-2
"""How far numbers may be off, as a share of the largest: in full precision, and in half."""


def check_extension(plan: Plan) -> None:
    """Raise `InputError` unless every layer of the extended model does what the method means.

    The model reads the tokens of the probe once more, each layer on the input that it had there.
    Every layer must get the queries and keys that are meant, and the cache must keep those keys.
    Where a method promises to leave short texts alone, attention must give what it gave before.
    """
    name, spec = plan.parts.name, plan.spec
    cannot = f"{name} cannot be extended by {spec.method}"
    by_module = {layer.module: layer for layer in plan.layers}
    with explained(cannot, "since its forward then fails"):
        calls, cache = replay(plan.parts, by_module)
    rows = unchanged_rows(spec)
    for layer in plan.layers:
        made = calls.get(layer.module)
        if made is None or not _is_meant(made[0], layer, spec, by_module):
            raise InputError(
                f"layer {layer.index} of {name} ({type(layer.module).__name__}) does not get the "
                f"positions that {spec.method} defines, so it cannot be extended by it"
            )
        if layer.sliding is not None:
            continue
        if replaces_attention(spec) and not _is_cached(made[0], cache):
            raise InputError(
                f"{cannot}: a cache does not keep the keys that layer {layer.index} passes to "
                "its attention"
            )
        pairs = zip(made, layer.calls, strict=True)
        if not all(_alike(one.out[:, :rows], own.out[:, :rows]) for one, own in pairs):
            raise InputError(f"{cannot}: it changes the results of a short text, which it must not")


def unchanged_rows(spec: ScoreSpec) -> int:
    """How many of the probe's tokens a method promises to leave alone; 0 where it promises none."""
    window = None if spec.remapping is None else spec.remapping.window
    near = spec.remapping is None or (window or 2) >= 2
    if not near or (spec.rope_scaling is not None and not spec.blockwise):
        return 0
    chunk = None if spec.chunk_remapping is None else spec.chunk_remapping.reach
    return max(2, min(x for x in (COUNT, window, chunk, spec.train_length) if x is not None))


def _is_meant(
    call: AttentionCall, layer: Layer, spec: ScoreSpec, layers: Mapping[nn.Module, Layer]
) -> bool:
    """Whether a layer passes to its attention the queries and keys that it should."""
    meant = layer.call.q, layer.call.k
    source = layer if layer.keys_of is None else layers[layer.keys_of]
    still, keys = layer.unrotated, source.unrotated
    changed = rotates_inside(spec) or spec.rope_scaling is not None
    if changed and layer.rotation is not None and layer.made_of is not None:
        if still is None or keys is None:
            return False
        meant = still.q, keys.k
        if not rotates_inside(spec):
            own = layer.rotation
            gained = 1.0 if own.normed else layer.spectrum(spec)[1]
            how = replace(own, frequencies=method_frequencies(spec, own), amplitude=gained)
            meant = how.rotated(meant[0], 0), how.rotated(meant[1], 1)
    close = _CLOSE if call.q.dtype in EXACT else _HALF_CLOSE
    return all(
        one.shape == other.shape and bool((one - other).abs().max() <= close * other.abs().max())
        for one, other in zip((call.q, call.k), meant, strict=True)
    )


def _is_cached(call: AttentionCall, cache: Any) -> bool:
    """Whether the cache keeps the keys that attention was given; True where it keeps none such.

    A layer that runs several times in a forward has an entry for each run.
    """
    entries = (getattr(entry, "keys", None) for entry in getattr(cache, "layers", None) or ())
    alike = [keys for keys in entries if isinstance(keys, Tensor) and keys.shape == call.k.shape]
    close = _CLOSE * call.k.abs().max()
    return not alike or any(bool((keys - call.k).abs().max() <= close) for keys in alike)


def _alike(mine: Tensor, own: Tensor) -> bool:
    """Whether each row of attention's output is what it was, up to rounding; True for no rows.

    In half precision the median of the rows, where rounding may move one far.
    """
    if mine.shape != own.shape or not own.numel():
        return mine.shape == own.shape
    off = (mine.double() - own.double()).norm(dim=-1) / own.double().norm(dim=-1).clamp(min=1e-30)
    if own.dtype in EXACT:
        return bool(off.max() <= 10 * _CLOSE)
    return bool(off.median() <= 4 * _HALF_CLOSE)
