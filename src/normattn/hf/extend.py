"""`extend`: a transformers model reads past its training length, until the handle is removed.

Nothing global is patched. A frequency method changes the buffers of the rotary modules. A method
that changes attention gives the modules above its layers a private copy of their configuration that
names our attention, and lets the layers hand it queries and keys that are not rotated. So neither
the configuration nor any other model built from it learns of it. Layers that attend within a window
keep all that they have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache
from types import TracebackType
from typing import Any

import torch
from torch import nn

from normattn.errors import InputError
from normattn.hf.adapters import refuse_lost_method, save_with_adapter
from normattn.hf.attention_fn import ATTRIBUTE, ExtendedLayer, ForwardMemory, attention_function
from normattn.hf.checks import verify_extension
from normattn.hf.masks import mask_function
from normattn.hf.model_parts import ModelParts, model_parts
from normattn.hf.native import FIELD, TRAINED, native, put_fields, trained
from normattn.hf.plan import HANDLE, INDICES, Plan, plan, resolved_values
from normattn.hf.private_configs import PrivateConfigs
from normattn.hf.probe import rotary_buffers
from normattn.hf.recorder import same_attention
from normattn.hf.rope_detection import Layer
from normattn.hf.rope_override import (
    KeepMask,
    LayerTables,
    OwnTables,
    frequencies_of,
    override_buffers,
    refuse_images,
)
from normattn.hf.rotated_key_cache import RotatedKeyCache
from normattn.hf.rotation_tables import HeadRotation, MethodTables
from normattn.score import ScoreSpec


def extend(
    model: Any, method: str, *, train_length: int | None = None, **parameters: Any
) -> Extension:
    """Let a trained rotary model read longer texts, without training, until removed.

        with normattn.extend(model, "ReRoPE-logn+", window=2048):
            model.generate(...)

    Args:
        model: a causal language model of transformers with rotary positions, also one that PEFT or
            `torch.compile` has wrapped.
        method: the post-hoc parts of a score by name: PI, ABF, NTK, NTK-mixed, DynamicNTK, YaRN,
            ReRoPE, LeakyReRoPE, SelfExtend or DualChunk, with or without `-logn+`; also `logn+`
            alone.
        train_length: how far the model was trained to read; by default what its configuration says.
        parameters: those of the method, e.g. window=, factor=, s=, group=, base=.

    Returns the extension, switched on: `.remove()` or leaving its `with` block undoes it exactly.
    `.resolved` says every value. What `torch.compile` has made of the model is compiled again at
    the next call, after `remove()` too. YaRN's factor reaches the features that turn, on
    queries and on keys, as in transformers. Raises `InputError` where the model or a value cannot
    serve.
    """
    planned = plan(model, method, train_length, **parameters)
    try:
        return _verified(planned, by_hooks=False)
    except InputError:
        # Some families make their tables of more than the frequencies that their modules hold.
        if not _has_positions(planned):
            raise
    return _verified(planned, by_hooks=True)


def _verified(planned: Plan, by_hooks: bool) -> Extension:
    extension = Extension(planned, by_hooks)
    try:
        verify_extension(planned.parts, planned.layers, planned.spec, planned.probed)
    except BaseException:
        extension.remove()
        raise
    return extension


def _has_positions(planned: Plan) -> bool:
    """Whether every layer can be given tables of its own: it is told where its tokens stand."""
    inside = planned.spec.remapping is not None or planned.spec.blockwise
    turned = [layer for layer in planned.layers if layer.rotation is not None]
    return inside or all(layer.probed.has_ids for layer in turned)


def extension_of(model: Any) -> Extension | None:
    """The extension of a model that is switched on, or None."""
    handle: Extension | None = model_parts(model).decoder.__dict__.get(HANDLE)
    return handle


class Extension:
    """A method that is switched on; `.remove()` or leaving the `with` block switches it off.

    Attributes:
        spec: the method as part of a score.
        resolved: every value.
    """

    def __init__(self, planned: Plan, by_hooks: bool = False) -> None:
        self.spec = planned.spec
        self.resolved = resolved_values(planned.spec, planned.source, planned.layers)
        self._undo: list[Callable[[], object]] = []
        self._memory = ForwardMemory()
        self._configs = PrivateConfigs()
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def __reduce__(self) -> Any:
        raise InputError(
            "an extended model cannot be copied or pickled: remove() the extension first"
        )

    def _switch_on(self, planned: Plan, by_hooks: bool) -> None:
        parts, layers, spec = planned.parts, planned.layers, planned.spec
        inside = spec.remapping is not None or spec.blockwise
        served = [layer for layer in layers if layer.sliding is None]
        choosing = [layer for layer in served if _chooses(layer)]
        name = None
        if inside or spec.logn is not None:
            name = _register_attention(_attention_of(parts), bool(choosing))
            self._serve_by_our_attention(served, spec, inside)
            for start in _CONTINUOUS:
                self._set(parts.model, start, _refuse_continuous_batching)
        but = served if by_hooks else choosing if inside else []
        undo, hooked = override_buffers(layers, spec, but)
        self._undo += undo
        hooked += [layer for layer in but if layer.rotation is not None]
        self._hook_layers(hooked, choosing if name is not None else [])
        if hooked:
            name = self._own_name(name or _attention_of(parts))
        self._rename(parts, layers, name)
        ours = inside or spec.logn is not None
        if ours and any(hasattr(part, "mrope_section") for part in _modules(parts)):
            for module in _modules(parts):
                if rotary_buffers(module):
                    self._hook(module.register_forward_pre_hook(refuse_images, with_kwargs=True))
        if parts.adapted is None:
            self._hook(refuse_lost_method(parts.model, spec.method_text))
        else:
            self._undo.append(save_with_adapter(parts.adapted, _record(spec)))
        self._hook(parts.decoder.register_forward_pre_hook(self._begin_forward))
        self._hook(parts.decoder.register_forward_hook(self._memory.clear, always_call=True))
        self._set(parts.decoder, HANDLE, self)

    def _serve_by_our_attention(self, served: list[Layer], spec: ScoreSpec, inside: bool) -> None:
        """Tell each layer's module how our attention serves it."""
        made: list[MethodTables] = []
        for layer in served:
            rotation = layer.rotation if inside else None
            tables = None if rotation is None else _shared(made, spec, rotation)
            kept = None if tables is None else RotatedKeyCache()
            self._set(layer.module, ATTRIBUTE, ExtendedLayer(spec, tables, self._memory, kept))
            if kept is not None:
                self._hook(layer.module.register_forward_pre_hook(kept, with_kwargs=True))

    def _hook_layers(self, hooked: list[Layer], choosing: list[Layer]) -> None:
        """Give layers tables of their own by hooks, and keep what those that choose keys need."""
        parts = {part for layer in choosing for part in layer.module.modules()}
        for part in parts - {layer.module for layer in choosing}:
            hook = OwnTables(self._memory)
            self._hook(part.register_forward_pre_hook(hook, with_kwargs=True))
        for layer in choosing:
            keep = KeepMask(self._memory)
            self._hook(layer.module.register_forward_pre_hook(keep, with_kwargs=True))
        for layer in hooked:
            other = frequencies_of(layer, self.spec)
            if other is not None:
                tables = LayerTables(layer, other, self._memory)
                self._hook(layer.module.register_forward_pre_hook(tables, with_kwargs=True))

    def _own_name(self, attention: str) -> str:
        """A name of this extension alone for an attention, so that compiled code is made again.

        torch.compile looks for no new hooks on a module, but for the name of its attention.
        """
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        name = f"{attention}_{next(_NUMBERS)}"
        name = name if name.startswith("normattn_") else f"normattn_as_{name}"
        AttentionInterface.register(name, same_attention(attention))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[attention])
        self._undo.append(lambda: ALL_ATTENTION_FUNCTIONS._global_mapping.pop(name))
        self._undo.append(lambda: ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(name))
        return name

    def _begin_forward(self, *_: object) -> None:
        """Forget the forward before; raise `InputError` where another attention has been set."""
        self._memory.clear()
        if self._attention is None or torch.compiler.is_compiling():
            return
        for now in self._configs.attentions() - {self._attention}:
            raise InputError(
                f"the attention implementation was changed to {now} while the model is extended: "
                "remove() the extension first"
            )

    def _rename(self, parts: ModelParts, layers: tuple[Layer, ...], name: str | None) -> None:
        """Private copies of the configurations on the way to the layers, naming our attention.

        Without a name they keep theirs; the model's own tells of the method when it is saved.
        """
        self._attention = name
        self._undo.append(self._configs.restore)
        kept = {layer.module for layer in layers if layer.sliding is not None}
        way = {parts.model, *parts.decoder.modules()} - kept
        way |= {module for module in parts.model.modules() if parts.decoder in module.modules()}

        def tell(config: Any) -> None:
            self._tell(parts, layers, config)

        for module in parts.model.modules():
            if module in way and (name is not None or module is parts.model):
                change = tell if module is parts.model else None
                self._configs.replace(module, lambda own: name or own, change)

    def _tell(self, parts: ModelParts, layers: tuple[Layer, ...], saved: Any) -> None:
        """Write the method into the copy that `save_pretrained` saves.

        In transformers' own words as well, where it has them; what they replace is kept beside.
        """
        record = _record(self.spec)
        fields = native(parts, layers, self.spec)
        if fields is not None:
            record[TRAINED] = trained(parts.config)
            put_fields(saved.get_text_config(), fields)
        setattr(saved, FIELD, record)

    def _hook(self, handle: Any) -> None:
        self._undo.append(handle.remove)

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        """Set a plain attribute, to be set back."""
        had, old = name in module.__dict__, module.__dict__.get(name)

        def back() -> None:
            if had:
                module.__dict__[name] = old
            else:
                module.__dict__.pop(name, None)

        module.__dict__[name] = value
        self._undo.append(back)


@lru_cache
def _register_attention(before: str, pairs: bool) -> str:
    """The name of our attention for a model whose own is `before`; registered once.

    `pairs`: its layers get a mask of every pair, since they choose keys of their own. The name says
    what was there before, since the layers that are left alone still want the masks of that; it
    holds no "flash", which transformers would read as flash attention.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    name = "normattn_pairs_" if pairs else "normattn_"
    name += before.replace("flash", "fl").replace("/", "_").replace("|", "_")
    over = ALL_MASK_ATTENTION_FUNCTIONS.get(before, sdpa_mask)
    AttentionInterface.register(name, attention_function)
    AttentionMaskInterface.register(name, mask_function(over, pairs))
    return name


def _record(spec: ScoreSpec) -> dict[str, Any]:
    """What a saved model tells of a method."""
    return {"method": spec.method_text, "train_length": spec.train_length}


def _modules(parts: ModelParts) -> list[nn.Module]:
    return list(parts.decoder.modules())


_NUMBERS = itertools.count()
_CONTINUOUS = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")


def _refuse_continuous_batching(*_: Any, **__: Any) -> Any:
    raise InputError(
        "continuous batching keeps keys in pages, which a method that changes attention cannot "
        "read: use generate(), or a method that changes frequencies alone (PI, ABF, NTK, YaRN)"
    )


def _shared(made: list[MethodTables], spec: ScoreSpec, rotation: HeadRotation) -> MethodTables:
    """One set of tables for all layers that rotate alike."""
    alike = [tables for tables in made if tables.rotation.alike(rotation)]
    if not alike:
        alike = [MethodTables(spec, rotation)]
        made += alike
    return alike[0]


def _attention_of(parts: ModelParts) -> str:
    return str(parts.config._attn_implementation or "eager")


def _chooses(layer: Layer) -> bool:
    """Whether a layer chooses among the keys that it may see, by an indexer or by a mask."""
    return INDICES in layer.unserved or not layer.masked
