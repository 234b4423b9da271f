"""Look at what the attention layers of a transformers model do while it reads, or trains.

Each layer's own attention computes as ever; beside it the same queries and keys go through our
kernel, without gradients and tile by tile, for whoever observes (`kernels.observe`). So the model's
outputs are what they are unobserved, and no N × N matrix is made that the model does not make. An
extended model attends by our kernel anyway, and is observed there.

Legend: B batch, H query heads, G key heads, T queries, S keys.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.probing import LOOKING
from normattn.kernels import Problem, Visibility, attend
from normattn.kernels.observe import announce, observer, observing
from normattn.lab.diagnostics.collecting import Collector
from normattn.layers.attend import regular_positions

_OURS = "normattn_"
_UNKNOWN = "this model has attention code of its own, which no look reaches"
_CLOSE, _HALF = 1e-3, 5e-2
_CONFIRMED: WeakSet[nn.Module] = WeakSet()
Own = Callable[..., tuple[Tensor, Any]]


@contextmanager
def looking(
    model: nn.Module,
    edges: Sequence[int] | None = None,
    *,
    reach: bool = False,
    cosines: bool = False,
) -> Iterator[Collector]:
    """Collect what every attention layer does while inside, each named by its path in the model.

    For `inspect_model`, in the place of its own `collecting`; attention beyond the training length
    (`reach`) is not asked for. Norms are those of queries and keys as attention is given them,
    normalised and rotated, before the scale. Raises `InputError` for a model none of whose layers
    takes its attention from transformers' AttentionInterface, once it has read.
    """
    collector = Collector(paths(model), edges, cosines=cosines)
    with told_aside(model), observing(collector):
        yield collector
    if not collector.sums:
        raise InputError(_UNKNOWN)


def paths(model: nn.Module) -> Mapping[nn.Module, tuple[str, ...]]:
    """Every module of a model, and the path by which it is called."""
    return {module: (path,) for path, module in model.named_modules()}


@contextmanager
def told_aside(model: nn.Module) -> Iterator[None]:
    """The layers of a model tell of their queries and keys while inside, if someone observes.

    Configurations are put back afterwards, whatever happened; a compiled model runs uncompiled.
    """
    before: list[tuple[nn.Module, Any]] = []
    copies: dict[int, Any] = {}
    try:
        for module in model.modules():
            config = module.__dict__.get("config")
            if hasattr(config, "_attn_implementation_internal"):
                before.append((module, config))
                if id(config) not in copies:
                    copies[id(config)] = _named(config)
                module.__dict__["config"] = copies[id(config)]
        if "torch._dynamo" in sys.modules:
            with torch.compiler.set_stance("force_eager"):
                yield
        else:
            yield
    finally:
        for module, config in before:
            module.__dict__["config"] = config


def _named(config: Any) -> Any:
    """A copy of a configuration, and of that of its text, whose attention tells aside."""
    private = copy.deepcopy(config)
    for part in {id(part): part for part in (private, private.get_text_config())}.values():
        own = str(part._attn_implementation or "eager")
        part._attn_implementation_internal = _registered(own)
    return private


def _registered(own: str) -> str:
    """The name of an attention that computes as `own` does, and tells aside."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    name = LOOKING + own.replace("/", "_").replace("|", "_")
    AttentionInterface.register(name, _beside(own))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS.get(own, sdpa_mask))
    return name


def _beside(own: str) -> Own:
    def function(
        module: nn.Module,
        query: Float[Tensor, "b h t d"],
        key: Float[Tensor, "b g s d"],
        value: Float[Tensor, "b g s e"],
        attention_mask: Tensor | None = None,
        **given: Any,
    ) -> tuple[Tensor, Any]:
        ours: Tensor | None = None
        if own.startswith(_OURS):
            at = regular_positions(query.shape[2], key.shape[2], query.device)
            announce(module, query, key, None, None, at.query, at.key)
        elif observer() is not None:
            with torch.no_grad():
                ours = _tell(module, query, key, value, attention_mask, given)
        out = _own(own, module)(module, query, key, value, attention_mask, **given)
        if ours is not None and module not in _CONFIRMED and not given.get("dropout"):
            _confirm(module, ours.transpose(1, 2), out[0].detach())
        return out

    return function


def _own(name: str, module: nn.Module) -> Own:
    """The attention of that name; eager attention is that of the model's own file."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    own: Own = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return own


def _tell(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    given: Mapping[str, Any],
) -> Float[Tensor, "b h t e"]:
    """The same attention, computed where it is observed."""
    q, k, v = (tensor.detach() for tensor in (query, key, value))
    scale = given.get("scaling")
    seen, padding = _visibility(module, q, k.shape[2], mask, given)
    own = padding if padding is not None and q.shape[2] == k.shape[2] else None
    announce(module, q, k, own, padding, seen.query, seen.key)
    cap, sink = given.get("softcap"), given.get("s_aux")
    scaled = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    sink = None if sink is None else sink.detach()
    output: Tensor = attend(Problem(scaled, k, v, seen, cap=cap, sink=sink))
    return output


def _confirm(
    module: nn.Module, ours: Float[Tensor, "b t h e"], own: Float[Tensor, "b t h e"]
) -> None:
    """Raise `InputError` unless what was looked at is what the layer computed; asked once a layer.

    Rows that see no key are nobody's.
    """
    rows = (ours != 0).any(-1, keepdim=True)
    off = ((own - ours) * rows).abs().nan_to_num(posinf=torch.inf).amax()
    share = float(off / ours.abs().amax().clamp(min=1e-30)) if rows.any() else 0.0
    if share > (_CLOSE if own.dtype in (torch.float32, torch.float64) else _HALF):
        raise InputError(
            f"{type(module).__name__} computes something else than the attention that can be "
            f"looked at: its output differs by {share:.1e} of the largest"
        )
    _CONFIRMED.add(module)


def _visibility(
    module: nn.Module, q: Tensor, keys: int, mask: Tensor | None, given: Mapping[str, Any]
) -> tuple[Visibility, Bool[Tensor, "b s"] | None]:
    """Who sees whom by a mask of transformers (None, of tokens, of pairs), and which keys pad."""
    queries = q.shape[2]
    if mask is not None and mask.dim() == 4:
        return _of_pairs(mask[..., :keys], queries, keys)
    causal = given.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal) and queries > 1
    padding = None if mask is None else ~mask[:, -keys:].bool()
    if causal:
        at = regular_positions(queries, keys, q.device)
        regular = at.regular and padding is None
        window = given.get("sliding_window")
        return Visibility(True, at.query, at.key, regular, padding, window=window), padding
    where = torch.arange(keys, device=q.device)
    return Visibility(False, where[keys - queries :], where, False, padding), padding


def _of_pairs(
    mask: Tensor, queries: int, keys: int
) -> tuple[Visibility, Bool[Tensor, "b s"] | None]:
    """A mask that the model made itself: keys that no query sees are padding."""
    if mask.dtype != torch.bool:
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        mask = (
            torch.where(hidden, -torch.inf, mask) if bool((mask != 0)[~hidden].any()) else ~hidden
        )
    open_ = mask if mask.dtype == torch.bool else mask > -torch.inf
    padding = ~open_.any(1).any(1)
    where = torch.arange(keys, device=mask.device)
    seen = Visibility(False, where[keys - queries :], where, False, mask=mask)
    return seen, padding if bool(padding.any()) and queries == keys else None
