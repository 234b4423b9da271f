"""An extended model is asked once more: no method is taken that has no effect, or breaks it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from normattn.errors import InputError, NormattnError
from normattn.hf.anatomy import Anatomy
from normattn.hf.fitting import turned
from normattn.hf.folding import stretched
from normattn.hf.probing import COUNT, Heard, listen, quiet, some_tokens
from normattn.hf.understanding import Layer
from normattn.score import ScoreSpec

_CLOSE = 0.01


def read(parts: Anatomy, spec: ScoreSpec) -> list[Tensor]:
    """What a model makes of a few tokens at once and, where it can, with a cache.

    No more tokens than those to which a method of two regimes or of log-n promises no change.
    """
    ids = some_tokens(parts, _count(spec))
    with quiet(parts):
        whole = _output(parts.model(input_ids=ids, use_cache=False))
        try:
            first = parts.model(input_ids=ids[:, :-1], use_cache=True)
            cache = {"past_key_values": first.past_key_values}
            step = parts.model(input_ids=ids[:, -1:], use_cache=True, **cache)
        except NormattnError:
            raise
        except Exception:  # a model whose own cache is broken is not made worse
            return [whole]
    return [whole, _output(step)]


def _count(spec: ScoreSpec) -> int:
    bounds = [COUNT]
    if spec.regime is not None and spec.regime.window is not None:
        bounds.append(spec.regime.window)
    if spec.chunk_rules is not None:
        bounds.append(spec.chunk_rules.reach)
    if spec.train_length is not None:
        bounds.append(spec.train_length)
    return max(2, min(bounds))


def _output(out: Any) -> Tensor:
    output: Tensor = out.logits if hasattr(out, "logits") else out.last_hidden_state
    return output.detach()


def confirm(
    parts: Anatomy, layers: Sequence[Layer], spec: ScoreSpec, before: Sequence[Tensor]
) -> None:
    """Raise `InputError` unless every layer of the extended model gets what it shall get.

    `before` is what `read` found before. Every layer shall get the queries and keys meant; within
    the near regime and the training length the logits shall be the model's own.
    """
    heard: dict[nn.Module, Heard] = {}
    for call in listen(parts):
        heard.setdefault(call.module, call)
    by_module = {layer.module: layer for layer in layers}
    for layer in layers:
        _compare(parts, layer, heard.get(layer.module), spec, by_module)
    try:
        after = read(parts, spec)
    except NormattnError:
        raise
    except Exception as error:
        sentence = " ".join(str(error).split())[:200]
        raise InputError(
            f"{parts.name} cannot be extended by {spec.method}: its forward then fails "
            f"({type(error).__name__}: {sentence})"
        ) from error
    if len(after) < len(before):
        raise InputError(
            f"{parts.name} cannot be extended by {spec.method}: a step with a cache then fails"
        )
    near = spec.regime is None or (spec.regime.window or 2) >= 2
    if near and (spec.spectrum is None or spec.moves) and not _same(after, before):
        raise InputError(
            f"{parts.name} cannot be extended by {spec.method}: a short text, to which it "
            "promises no change, is read otherwise"
        )


def _same(after: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    """Whether a text is read as before, at once and with a cache.

    Some models' own caches give other logits than one forward: only a sound one is compared. In
    half precision a step is one row, whose logits rounding alone may turn round (SmolLM2's): it is
    held against the extended model's own forward.
    """
    if _off(after[0], before[0]) > _CLOSE:
        return False
    if len(before) < 2 or _off(before[1], before[0][:, -1:]) >= _CLOSE:
        return True
    return _off(after[1], before[1] if _exact(before[1]) else after[0][:, -1:]) <= _CLOSE


def _compare(
    parts: Anatomy,
    layer: Layer,
    heard: Heard | None,
    spec: ScoreSpec,
    layers: Mapping[nn.Module, Layer],
) -> None:
    own = layer.heard.as_is
    if heard is None:
        meant: tuple[Tensor, Tensor] | None = None
    elif layer.turning is None or not (spec.regime or spec.spectrum or spec.moves):
        meant = own.query, own.key
    else:
        source = layer if layer.keys_of is None else layers[layer.keys_of]
        meant = _meant(layer, spec, source)
    if heard is None or meant is None:
        right = False
    else:
        close = 1e-3 if _exact(own.query) else 5e-2
        pairs = zip((heard.query, heard.key), meant, strict=True)
        right = all(
            one.shape == other.shape
            and bool((one - other).abs().max() <= close * other.abs().max())
            for one, other in pairs
        )
    if not right:
        raise InputError(
            f"layer {layer.index} of {parts.name} ({type(layer.module).__name__}) does not get the "
            f"positions that {spec.method} means it to have, so it cannot be extended by it"
        )


def _meant(layer: Layer, spec: ScoreSpec, source: Layer) -> tuple[Tensor, Tensor] | None:
    """The queries and keys that a layer shall hand to its attention; keys are its source's."""
    one, keys = layer.heard.plain, source.heard.plain
    if one is None or keys is None or layer.turning is None or layer.tables is None:
        return None
    if spec.regime is not None or spec.moves:
        return one.query, keys.key
    assert spec.spectrum is not None
    gain = spec.spectrum.gain(spec.train_length) ** 0.5
    other = replace(
        layer.turning,
        frequencies=stretched(spec, layer.turning),
        amplitude=1.0 if layer.turning.normed else layer.tables.amplitude * gain,
    )
    of_query, of_key = other.gains or (None, None)
    return turned(other, one.query, of_query), turned(other, keys.key, of_key)


def _off(mine: Tensor, own: Tensor) -> float:
    """How far logits are from the model's own, as a part of them, over what rounding explains.

    In half precision the median of the rows, where rounding may send one token to another expert.
    """
    off = (mine.double() - own.double()).norm(dim=-1) / own.double().norm(dim=-1).clamp(min=1e-30)
    return float(off.max() if _exact(own) else off.median() / 20)


def _exact(x: Tensor) -> bool:
    return x.dtype in (torch.float32, torch.float64)
