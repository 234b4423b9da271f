"""`extend`: a transformers model reads past its training length, until the handle is removed.

Nothing global is patched. Each extended attention layer gets a pre-hook that hands it other cos and
sin; where attention itself must change, the layer and the models above it get a private copy of
their configuration that names our attention, so that neither the configuration nor any other model
built from it knows. Layers that attend within a window keep all that they have.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from normattn.errors import InputError
from normattn.hf.anatomy import Anatomy, anatomy, known_length, refuse_moving
from normattn.hf.attending import ATTRIBUTE, ExtendedLayer, Memory
from normattn.hf.confirming import confirm, read
from normattn.hf.embeddings import Embeddings, OwnEmbeddings, PositionIds
from normattn.hf.folding import Folding, Turning
from normattn.hf.interface import registered
from normattn.hf.native import native, put_fields, trained
from normattn.hf.probing import ask, named
from normattn.hf.record import FIELD, TRAINED, refuse_applied
from normattn.hf.resolved import Resolved
from normattn.hf.turned_keys import TurnedKeys
from normattn.hf.understanding import Layer, refuse_vectors, understand
from normattn.score import ScoreSpec
from normattn.score.grammar import read as read_method
from normattn.score.parts.pi import PI

HANDLE = "normattn_extension"
INDICES = "indices"


def extend(
    model: Any, method: str, *, train_length: int | None = None, **parameters: Any
) -> Extension:
    """Let a trained rotary model read longer texts, without training, until removed.

        with normattn.extend(model, "ReRoPE-logn+", window=2048):
            model.generate(...)

    Args:
        model: a causal language model of transformers with rotary positions.
        method: the post-hoc parts of a score by name: PI, ABF, NTK, NTK-mixed, DynamicNTK, YaRN,
            ReRoPE, LeakyReRoPE, SelfExtend or DualChunk, with or without `-logn+`; also `logn+`
            alone.
        train_length: how far the model was trained to read; by default what its configuration says.
        parameters: those of the method, e.g. window=, factor=, s=, group=, base=.

    Returns the extension, switched on: `.remove()` or leaving its `with` block undoes it exactly.
    `.resolved` says every value. What `torch.compile` has compiled, here or elsewhere, is compiled
    anew at the next call, after `remove()` too. YaRN's factor reaches the features that turn, on
    queries and on keys, as in transformers. Raises `InputError` where the model or a value cannot
    serve.
    """
    parts, layers, spec, source = plan(model, method, train_length, **parameters)
    before = read(parts, spec)
    extension = Extension(parts, layers, spec, source)
    try:
        confirm(parts, layers, spec, before)
    except BaseException:
        extension.remove()
        raise
    return extension


class Plan(NamedTuple):
    """A method with all its values for a model that was asked, before anything is switched on.

    `source` says where the training length comes from.
    """

    parts: Anatomy
    layers: tuple[Layer, ...]
    spec: ScoreSpec
    source: str


def plan(model: Any, method: str, train_length: int | None = None, **parameters: Any) -> Plan:
    """What `extend` would do; the model is asked and not changed. Raises as `extend` does."""
    parts = anatomy(model)
    _refuse_twice(parts)
    refuse_applied(parts.model.config)
    spec, source = _specified(parts, method, train_length, parameters)
    refuse_vectors(parts)
    layers = understand(parts, ask(parts))
    _check(spec, layers, parts)
    return Plan(parts, layers, spec, source)


def extension_of(model: Any) -> Extension | None:
    """The extension of a model that is switched on, or None."""
    handle: Extension | None = anatomy(model).decoder.__dict__.get(HANDLE)
    return handle


class Extension:
    """A method that is switched on; `.remove()` or leaving the `with` block switches it off.

    Attributes:
        spec: the method as part of a score.
        resolved: every value.
    """

    def __init__(
        self, parts: Anatomy, layers: tuple[Layer, ...], spec: ScoreSpec, source: str
    ) -> None:
        self.spec = spec
        self.resolved = _resolved(spec, source, layers)
        self._undo: list[Callable[[], object]] = []
        self._memory = Memory()
        _compile_anew()
        try:
            self._switch_on(parts, layers)
        except BaseException:
            self.remove()
            raise

    @property
    def active(self) -> bool:
        """Whether the model is still extended by this."""
        return bool(self._undo)

    def remove(self) -> None:
        """Give the model back everything that it had. Removing twice is harmless."""
        if self._undo:
            _compile_anew()
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

    def _switch_on(self, model_parts: Anatomy, layers: tuple[Layer, ...]) -> None:
        spec = self.spec
        inside = spec.regime is not None or spec.moves
        own = inside or spec.logn is not None
        served = [layer for layer in layers if layer.sliding is None]
        choosing = [layer for layer in served if _chooses(layer)]
        name = registered(_before(model_parts), bool(choosing)) if own else None
        self._rename(model_parts, layers, name)
        sections = any(hasattr(module, "mrope_section") for module in model_parts.decoder.modules())
        foldings: list[Folding] = []
        for layer in served:
            if name is not None:
                turning = layer.turning if inside else None
                folding = None if turning is None else _shared(foldings, spec, turning)
                kept = None if folding is None else TurnedKeys()
                self._set(layer.module, ATTRIBUTE, ExtendedLayer(spec, folding, self._memory, kept))
                if kept is not None:
                    self._hook(layer.module.register_forward_pre_hook(kept, with_kwargs=True))
            if layer.turning is not None:
                hook = Embeddings(layer, spec, inside, name, self._memory, sections)
                self._hook(layer.module.register_forward_pre_hook(hook, with_kwargs=True))
        if inside:
            aside = OwnEmbeddings(self._memory)
            parts = {part for layer in choosing for part in layer.module.modules()}
            for part in parts - {layer.module for layer in choosing}:
                self._hook(part.register_forward_pre_hook(aside, with_kwargs=True))
        self._hook(model_parts.decoder.register_forward_pre_hook(self._memory.clear))
        self._hook(model_parts.decoder.register_forward_hook(self._memory.clear, always_call=True))
        if any(not layer.heard.has_ids for layer in served if layer.turning is not None):
            ids = PositionIds(self._memory)
            for module in model_parts.decoder.modules():
                if any(buffer.endswith("inv_freq") for buffer in module._buffers):
                    self._hook(module.register_forward_pre_hook(ids, with_kwargs=True))
        self._set(model_parts.decoder, HANDLE, self)

    def _rename(self, parts: Anatomy, layers: tuple[Layer, ...], name: str | None) -> None:
        """Private copies of the configurations on the way to the layers, naming our attention.

        Without a name they keep theirs; the model's own tells of the method when it is saved.
        """
        kept = {layer.module for layer in layers if layer.sliding is not None}
        way = {parts.model, *parts.decoder.modules()} - kept
        way |= {module for module in parts.model.modules() if parts.decoder in module.modules()}
        copies: dict[int, Any] = {}
        for module in parts.model.modules():
            config = module.__dict__.get("config")
            if module not in way or not hasattr(config, "_attn_implementation_internal"):
                continue
            if id(config) not in copies:
                copies[id(config)] = named(config, name or str(config._attn_implementation))
            private = copies[id(config)]
            if module is parts.model:
                private = self._telling(parts, layers, private)
            self._set(module, "config", private)

    def _telling(self, parts: Anatomy, layers: tuple[Layer, ...], config: Any) -> Any:
        """A copy of the model's configuration that tells of the method, for whoever saves it.

        In transformers' own words as well, where it has them; what they replace is kept beside.
        """
        saved = copy.deepcopy(config)
        record: dict[str, Any] = {
            "method": self.spec.method_text,
            "train_length": self.spec.train_length,
        }
        fields = native(parts, layers, self.spec)
        if fields is not None:
            record[TRAINED] = trained(parts.config)
            put_fields(saved.get_text_config(), fields)
        setattr(saved, FIELD, record)
        return saved

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


def _compile_anew() -> None:
    """Forget what torch.compile has compiled, which looks for no new hooks on a module.

    It would go on as if nothing had been switched on or off, and the code may be that of any caller
    of the model.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _shared(foldings: list[Folding], spec: ScoreSpec, turning: Turning) -> Folding:
    """One folding for all layers that turn alike."""
    alike = [folding for folding in foldings if folding.turning.alike(turning)]
    if not alike:
        alike = [Folding(spec, turning)]
        foldings += alike
    return alike[0]


def _before(parts: Anatomy) -> str:
    return str(parts.config._attn_implementation or "eager")


def _specified(
    parts: Anatomy, method: str, train_length: int | None, parameters: dict[str, Any]
) -> tuple[ScoreSpec, str]:
    """The method with its values filled in, and where the training length comes from."""
    if method.strip() in ("", "as is"):
        raise InputError("extend() needs a method by name, e.g. 'ReRoPE' or 'YaRN'")
    factor = _left_over(method, parameters)
    own = {name: value for name, value in parameters.items() if factor is None or name != "factor"}
    asked = ScoreSpec.parse("Baseline").with_method(method, **own)
    source = "given"
    length = asked.train_length if train_length is None else train_length
    if length is None:
        length, source = known_length(parts)
    spec = asked.resolve(length, factor)
    if factor is not None and ScoreSpec(asked.parts, length) == spec:
        raise InputError(f"{spec.method} takes no factor, or has what it would give already")
    if spec.visible[0] is not None:
        raise InputError(
            f"{spec.method} hides keys, and a cache of transformers keeps them all: use a cache "
            "that drops them instead"
        )
    window = None if spec.regime is None else spec.regime.window
    if window is not None and window > length:
        raise InputError(
            f"{spec.method}: window={window} is larger than the training length of {length}: "
            "positions beyond it were never trained"
        )
    return spec, source


def _left_over(method: str, parameters: dict[str, Any]) -> float | None:
    """The stretch that no part holds as such: LeakyReRoPE and SelfExtend find theirs from it."""
    given, _ = read_method(method)
    named = {field.name for part, _ in given for field in dataclasses.fields(part)}
    factor = parameters.get("factor")
    if factor is None or "factor" in named:
        return None
    if isinstance(factor, bool) or not isinstance(factor, int | float) or factor < 1:
        raise InputError(f"factor must be a number of at least 1, but it is {factor!r}")
    return float(factor)


def _refuse_twice(parts: Anatomy) -> None:
    active = parts.decoder.__dict__.get(HANDLE)
    if active is not None:
        raise InputError(
            f"this model is already extended, by {active.spec.method}: remove() that first"
        )


def _check(spec: ScoreSpec, layers: tuple[Layer, ...], parts: Anatomy) -> None:
    served = [layer for layer in layers if layer.sliding is None]
    turned = [layer for layer in served if layer.turning is not None]
    positions = spec.spectrum is not None or spec.regime is not None or spec.moves
    if not served or (positions and not turned):
        why = (
            f"all its layers attend within a window of {layers[0].sliding} tokens"
            if not served
            else "none of its layers with full attention has rotary positions"
        )
        raise InputError(
            f"{parts.name} cannot be extended: {why}, so there is no position to extend"
        )
    refuse_moving(parts, [layer.module for layer in turned])
    gained = any(layer.turning is not None and layer.turning.gains is not None for layer in turned)
    if spec.chunk_rules is not None and gained:
        raise InputError(
            f"{parts.name} gives rotated features gains of their own, so its scores depend on where"
            f" a query and a key stand, not on their distance alone: {spec.chunk_rules.name} would "
            "change short texts too"
        )
    if spec.regime is not None or spec.moves or spec.logn is not None:
        _check_attention(served, parts)
    if spec.spectrum is None or isinstance(spec.spectrum, PI):
        return
    for layer in turned:
        if layer.turning is not None and layer.turning.base is None:
            raise InputError(
                f"{parts.name} has rotary frequencies that are already scaled, and "
                f"{spec.spectrum.name} is defined on plain ones: PI, ReRoPE, LeakyReRoPE and "
                "SelfExtend take any"
            )


def _check_attention(served: list[Layer], parts: Anatomy) -> None:
    """Refuse layers whose attention ours cannot replace."""
    rest = "PI, NTK, NTK-mixed, ABF and YaRN leave its attention as it is"
    for layer in served:
        who = f"layer {layer.index} of {parts.name} ({type(layer.module).__name__})"
        unserved = [name for name in layer.unserved if name != INDICES]
        if unserved:
            raise InputError(
                f"{who} asks its attention for {', '.join(unserved)}, which ours does not "
                f"serve: {rest}"
            )


def _chooses(layer: Layer) -> bool:
    """Whether a layer chooses among the keys that it may see, by an indexer or by a mask."""
    return INDICES in layer.unserved or not layer.masked


def _resolved(spec: ScoreSpec, source: str, layers: tuple[Layer, ...]) -> Resolved:
    served = [layer for layer in layers if layer.sliding is None]
    turning = next((layer.turning for layer in served if layer.turning is not None), None)
    inside = spec.regime is not None or spec.moves
    parts = [part for part in spec.parts if part.when != "trained-in"]
    own = inside or spec.logn is not None
    assert spec.train_length is not None
    return Resolved(
        method=spec.method_text,
        train_length=spec.train_length,
        train_length_from=source,
        parameters={
            field.name: getattr(part, field.name)
            for part in parts
            for field in dataclasses.fields(part)
        },
        base=None if turning is None else turning.base,
        scaled=None if turning is None else turning.scaled,
        head_dim=served[0].heard.as_is.query.shape[-1] if turning is None else turning.head_dim,
        rotated=0 if turning is None else 2 * int((turning.frequencies != 0).sum()),
        layout="interleaved" if turning is not None and turning.interleaved else "half",
        extended=tuple(x.index for x in served if x.turning is not None),
        without_positions=tuple(x.index for x in served if x.turning is None),
        left=tuple(x.index for x in layers if x.sliding is not None),
        attention="normattn" if own else "stock",
        cached_keys="un-rotated" if inside else "rotated",
    )
