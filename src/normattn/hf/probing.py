"""A layer is asked what it does: three tokens through its attention, with and without rotation.

Whatever a family's file writes (partial rotation, pairs side by side or apart, no rotation at all,
a norm on either side), the queries and keys that reach the attention function tell. What they do
not confirm is refused, so that no family is served wrongly in silence.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.anatomy import Anatomy
from normattn.hf.attending import KNOWN
from normattn.hf.folding import Turning
from normattn.score.part import rope_frequencies
from normattn.score.rotary import rotation

PROBE = "normattn_probe"
_PLACES = (0, 3, 8)
_Given = tuple[Tensor, Tensor, dict[str, Any]]


@dataclass(frozen=True)
class Layer:
    """What one attention layer does.

    Attributes:
        module: the layer.
        index: its number.
        sliding: the window outside of which it sees nothing, or None.
        turning: its rotation, or None for a layer without positions.
    """

    module: nn.Module
    index: int
    sliding: int | None
    turning: Turning | None


def ask(found: Anatomy) -> tuple[Layer, ...]:
    """What each attention layer of a model does. Raises `InputError` for what is not understood."""
    private = copy.deepcopy(found.config)
    private._attn_implementation_internal = PROBE
    return tuple(_ask(found, module, private) for module in found.layers)


def probe_function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any
) -> tuple[Tensor, None]:
    """Stands where attention would, and keeps what it is given."""
    module.__dict__[PROBE].append((query, key, more))
    return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


def _ask(found: Anatomy, module: Any, private: Any) -> Layer:
    index = int(module.layer_idx)
    rotated, plain = _heard(found, module, private)
    (q_rotated, k_rotated, more), (q, k, _) = rotated, plain
    unknown = [name for name, value in more.items() if name not in KNOWN and value is not None]
    if unknown:
        raise InputError(
            f"layer {index} of this model ({type(module).__name__}) asks its attention for "
            f"{', '.join(unknown)}, which normattn does not serve"
        )
    sliding = _sliding(found, module, more)
    if torch.equal(q, q_rotated) and torch.equal(k, k_rotated):
        return Layer(module, index, sliding, None)
    turning = _fitting(found, module, q, q_rotated)
    if turning is None or not _turns(turning, k, k_rotated):
        raise InputError(
            f"layer {index} of this model ({type(module).__name__}) does not rotate the first "
            "features of its queries and keys as RoPE does (it may normalise them afterwards, or "
            "turn others), so its positions cannot be replaced"
        )
    return Layer(module, index, sliding, turning)


def _heard(found: Anatomy, module: Any, private: Any) -> tuple[_Given, _Given]:
    """What reaches the attention function with the model's rotation and with none."""
    weight = next((each for each in module.parameters() if each.is_floating_point()), None)
    dtype = found.model.dtype if weight is None else weight.dtype
    device = found.model.device if weight is None else weight.device
    if device.type == "meta":
        device = _executing(module)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, len(_PLACES), found.config.hidden_size, generator=generator)
    x = x.to(device, dtype)
    before, kept = module.config, list[_Given]()
    with torch.no_grad():
        cos, sin = embeddings(found, module, x, torch.tensor([_PLACES], device=device))
        module.config, module.__dict__[PROBE] = private, kept
        try:
            for pair in ((cos, sin), (torch.ones_like(cos), torch.zeros_like(sin))):
                module(hidden_states=x, position_embeddings=pair, attention_mask=None)
        except (TypeError, KeyError, AttributeError, NotImplementedError) as error:
            raise InputError(
                f"layer {module.layer_idx} of this model ({type(module).__name__}) cannot be asked "
                f"what it does: {error}"
            ) from error
        finally:
            module.config = before
            del module.__dict__[PROBE]
    if len(kept) != 2:
        raise InputError(
            f"layer {module.layer_idx} of this model ({type(module).__name__}) does not take its "
            "attention function from transformers' AttentionInterface, so it cannot be extended"
        )
    return kept[0], kept[1]


def _executing(module: nn.Module) -> torch.device:
    """Where accelerate brings the weights of a layer that it keeps elsewhere."""
    for each in module.modules():
        device = getattr(getattr(each, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    raise InputError("the weights of this model are on the meta device: load them first")


def embeddings(found: Anatomy, module: nn.Module, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin as the model makes them for a layer."""
    kind = (found.layer_type(module),) if found.per_type else ()
    made = found.rotary(x, ids, *kind)
    if not (isinstance(made, tuple) and len(made) == 2 and not made[0].is_complex()):
        raise InputError(
            f"{type(found.rotary).__name__} does not make cos and sin, so they cannot be replaced"
        )
    return made


def _sliding(found: Anatomy, module: nn.Module, more: dict[str, Any]) -> int | None:
    given = more.get("sliding_window")
    if given is not None:
        return int(given)
    kind = found.layer_type(module)
    if kind in ("sliding_attention", "chunked_attention"):
        name = "sliding_window" if kind.startswith("sliding") else "attention_chunk_size"
        return int(getattr(found.config, name))
    return None


def _fitting(found: Anatomy, module: nn.Module, q: Tensor, rotated: Tensor) -> Turning | None:
    """The rotation that makes `rotated` of q, or None."""
    prefix = f"{found.layer_type(module)}_" if found.per_type else ""
    theta = getattr(found.rotary, f"{prefix}inv_freq").detach().double().cpu()
    size = float(getattr(found.rotary, f"{prefix}attention_scaling", 1.0))
    rope = found.rope(module)
    base = rope.get("rope_theta") if rope.get("rope_type", "default") == "default" else None
    if base is not None:
        plain = rope_frequencies(2 * theta.numel(), float(base))
        base = float(base) if torch.allclose(theta, plain, rtol=2e-2, atol=0) else None
    if 2 * theta.numel() > q.shape[-1]:
        return None
    for interleaved in (False, True):
        turning = Turning(theta, base, interleaved, size, q.shape[-1])
        if _turns(turning, q, rotated):
            return turning
    return None


def _turns(turning: Turning, x: Tensor, rotated: Tensor) -> bool:
    """Whether this rotation makes `rotated` of x, up to the rounding of x's type."""
    places = torch.tensor(_PLACES, dtype=torch.float64, device=x.device)
    turn = rotation(places, turning.frequencies, 1.0, turning.interleaved, torch.float64)
    size = turning.amplitude
    found = replace(turn, cos=turn.cos * size, sin=turn.sin * size)(x.double())
    close = 1e-3 if x.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((found - rotated).abs().max() <= close * rotated.abs().max())
