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
from typing import Any

import torch
from torch import nn

from normattn.errors import InputError
from normattn.hf.anatomy import Anatomy, anatomy, known_length
from normattn.hf.attending import ATTRIBUTE, ExtendedLayer, Memory
from normattn.hf.embeddings import Embeddings
from normattn.hf.folding import Folding, Turning
from normattn.hf.interface import registered
from normattn.hf.probing import Layer, ask
from normattn.hf.resolved import Resolved
from normattn.score import ScoreSpec
from normattn.score.grammar import print_part, read
from normattn.score.parts.pi import PI

HANDLE = "normattn_extension"
FIELD = "normattn"


def extend(
    model: Any, method: str, *, train_length: int | None = None, **parameters: Any
) -> Extension:
    """Let a trained rotary model read longer texts, without training, until removed.

        with normattn.extend(model, "ReRoPE-logn+", window=2048):
            model.generate(...)

    Args:
        model: a causal language model of transformers with rotary positions.
        method: the post-hoc parts of a score by name: PI, ABF, NTK, NTK-mixed, DynamicNTK, YaRN,
            ReRoPE, LeakyReRoPE or SelfExtend, with or without `-logn+`; also `logn+` alone.
        train_length: how far the model was trained to read; by default what its configuration says.
        parameters: those of the method, e.g. window=, factor=, s=, group=, base=.

    Returns the extension, switched on: `.remove()` or leaving its `with` block undoes it exactly.
    `.resolved` says every value. What `torch.compile` has compiled, here or elsewhere, is compiled
    anew at the next call, after `remove()` too. YaRN's factor reaches the features that turn, on
    queries and on keys, as in transformers. Raises `InputError` where the model or a value cannot
    serve.
    """
    found = anatomy(model)
    _refuse_twice(found)
    spec, source = _specified(found, method, train_length, parameters)
    registered(_before(found))
    layers = ask(found)
    _check(spec, layers, type(model).__name__)
    return Extension(found, layers, spec, source)


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
        self, found: Anatomy, layers: tuple[Layer, ...], spec: ScoreSpec, source: str
    ) -> None:
        self.spec = spec
        self.resolved = _resolved(spec, source, layers)
        self._undo: list[Callable[[], object]] = []
        self._memory = Memory()
        _compile_anew()
        try:
            self._switch_on(found, [each for each in layers if each.sliding is None])
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

    def _switch_on(self, found: Anatomy, layers: list[Layer]) -> None:
        spec = self.spec
        inside = spec.regime is not None or spec.moves
        own = inside or spec.logn is not None
        before = _before(found)
        name = registered(before) if own else before
        top, text = _private(found, name, self.spec)
        served = {each.module for each in layers}
        left = {each for each in found.layers if own and each not in served}
        for module in found.model.modules():
            config = module.__dict__.get("config")
            if module in left:
                continue
            if config is found.model.config:
                self._set(module, "config", top)
            elif config is found.config:
                self._set(module, "config", text)
        foldings: list[Folding] = []
        for layer in layers:
            if own:
                turning = layer.turning if inside else None
                folding = None if turning is None else _shared(foldings, spec, turning)
                self._set(layer.module, ATTRIBUTE, ExtendedLayer(spec, folding, self._memory))
            if layer.turning is not None:
                name_or_any = name if own else None
                hook = Embeddings(found, layer, spec, inside, name_or_any, self._memory)
                self._hook(layer.module.register_forward_pre_hook(hook, with_kwargs=True))
        self._hook(found.decoder.register_forward_pre_hook(self._memory.clear))
        self._hook(found.decoder.register_forward_hook(self._memory.clear, always_call=True))
        self._set(found.decoder, HANDLE, self)

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
    alike = [each for each in foldings if each.turning.alike(turning)]
    if not alike:
        alike = [Folding(spec, turning)]
        foldings += alike
    return alike[0]


def _before(found: Anatomy) -> str:
    return str(found.config._attn_implementation or "eager")


def _private(found: Anatomy, name: str, spec: ScoreSpec) -> tuple[Any, Any]:
    """Copies of the model's and of the decoder's configuration that name our attention."""
    top = copy.deepcopy(found.model.config)
    text = top.get_text_config()
    text._attn_implementation_internal = name
    setattr(top, FIELD, {"method": method_of(spec), "train_length": spec.train_length})
    return top, text


def method_of(spec: ScoreSpec) -> str:
    """The post-hoc parts with all their parameters."""
    return "-".join(print_part(part) for part in spec.parts if part.when != "trained-in")


def _specified(
    found: Anatomy, method: str, train_length: int | None, parameters: dict[str, Any]
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
        length, source = known_length(found)
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
    given, _ = read(method)
    named = {field.name for part, _ in given for field in dataclasses.fields(part)}
    factor = parameters.get("factor")
    if factor is None or "factor" in named:
        return None
    if isinstance(factor, bool) or not isinstance(factor, int | float) or factor < 1:
        raise InputError(f"factor must be a number of at least 1, but it is {factor!r}")
    return float(factor)


def _refuse_twice(found: Anatomy) -> None:
    active = found.decoder.__dict__.get(HANDLE)
    if active is not None:
        raise InputError(
            f"this model is already extended, by {active.spec.method}: remove() that first"
        )


def _check(spec: ScoreSpec, layers: tuple[Layer, ...], name: str) -> None:
    served = [each for each in layers if each.sliding is None]
    turned = [each.turning for each in served if each.turning is not None]
    if not turned:
        why = (
            f"all its layers attend within a window of {layers[0].sliding} tokens"
            if not served
            else "none of its layers with full attention has rotary positions"
        )
        raise InputError(f"{name} cannot be extended: {why}, so there is no position to extend")
    if spec.spectrum is None or isinstance(spec.spectrum, PI):
        return
    if any(each.base is None for each in turned):
        raise InputError(
            f"{name} has rotary frequencies that are already scaled, and {spec.spectrum.name} is "
            "defined on plain ones: PI, ReRoPE, LeakyReRoPE and SelfExtend take any"
        )


def _resolved(spec: ScoreSpec, source: str, layers: tuple[Layer, ...]) -> Resolved:
    turning = next(x.turning for x in layers if x.sliding is None and x.turning is not None)
    inside = spec.regime is not None or spec.moves
    parts = [part for part in spec.parts if part.when != "trained-in"]
    own = inside or spec.logn is not None
    assert spec.train_length is not None
    return Resolved(
        method=method_of(spec),
        train_length=spec.train_length,
        train_length_from=source,
        parameters={
            field.name: getattr(part, field.name)
            for part in parts
            for field in dataclasses.fields(part)
        },
        base=turning.base,
        head_dim=turning.head_dim,
        rotated=2 * turning.frequencies.numel(),
        layout="interleaved" if turning.interleaved else "half",
        extended=tuple(x.index for x in layers if x.sliding is None and x.turning is not None),
        without_positions=tuple(x.index for x in layers if x.turning is None),
        left=tuple(x.index for x in layers if x.sliding is not None),
        attention="normattn" if own else "stock",
        cached_keys="un-rotated" if inside else "rotated",
    )
