"""Checks of the arguments of attention; each raises `InputError`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normattn.errors import InputError, require_sizes
from normattn.kernels.inputs import DTYPES, check_dense, check_shapes
from normattn.layers.residual_scores import ResidualLayer
from normattn.plain import traced
from normattn.score import Score, ScoreSpec
from normattn.score.parts import XSA

if TYPE_CHECKING:
    from normattn.score import Positions

Kind = Literal["boolean", "int64 or int32", "floating"]
# Differences of integers are taken: an unsigned type would wrap around and show the future.
_TYPES: dict[Kind, tuple[torch.dtype, ...]] = {
    "boolean": (torch.bool,),
    "int64 or int32": (torch.int64, torch.int32),
    "floating": DTYPES,
}


class AttentionArguments(NamedTuple):
    """The arguments of `attention` other than q, k, v, the score and the cache."""

    causal: bool = True
    backend: str = "auto"
    attn_mask: Tensor | None = None
    key_padding: Bool[Tensor, "b s"] | None = None
    query_padding: Bool[Tensor, "b t"] | None = None
    q_positions: Int[Tensor, "*bq t"] | None = None
    k_positions: Int[Tensor, "*bk s"] | None = None
    documents: Int[Tensor, "b s"] | None = None
    dropout_p: float = 0.0
    residual: ResidualLayer | None = None
    gate: Float[Tensor, "b t gates"] | None = None
    forget: Float[Tensor, "b new logits"] | None = None
    return_lse: bool = False


def check_call(
    score: Score, q: Tensor, k: Tensor, v: Tensor, args: AttentionArguments, num_cached: int | None
) -> None:
    """Check all arguments of a call; `num_cached` is the length of its cache, None without one."""
    check_shapes(q, k, v)
    if not isinstance(args.causal, bool):
        raise InputError(f"causal must be True or False, but it is {args.causal!r}")
    spec, (batch, heads, num_queries, size) = score.spec, q.shape
    num_keys = k.shape[2] + (num_cached or 0)
    expected = score.heads, score.kv_heads, score.head_dim
    if (heads, k.shape[1], size) != expected:
        raise InputError(
            f"the score was built for {expected[0]} query heads, {expected[1]} key heads and "
            f"dimension {expected[2]}, but q is {tuple(q.shape)} and k is {tuple(k.shape)}"
        )
    check_residual(spec, args.residual)
    for name, component, used, meaning in (
        ("documents", "Packed", spec.documents, "the number of each key's document (B, S)"),
        ("gate", "Gate", spec.gate, "the gate's logits W_g x of each new token"),
        ("forget", "FoX", spec.forgets or None, "a gate's logit for each key, (B, S, H)"),
    ):
        missing = getattr(args, name) is None
        if missing and used is not None:
            raise InputError(f"{spec.name} needs {name}=…, {meaning}")
        if not missing and used is None:
            raise InputError(
                f"{name} is given, but {spec.name} does not use it: add {component} to the score"
            )
    aligned = spec.documents is not None or spec.forgets or isinstance(spec.values, XSA)
    if num_queries > num_keys and aligned:
        raise InputError(
            f"with {spec.name} the queries are the last of the keys, but there are {num_queries} "
            f"queries and {num_keys} keys"
        )
    gates = 0 if spec.gate is None else spec.gate.logits(heads, v.shape[-1])
    _check_mask(args.attn_mask, (batch, heads, num_queries, num_keys))
    check_tensor("key_padding", args.key_padding, "boolean", (batch, num_keys))
    check_tensor("query_padding", args.query_padding, "boolean", (batch, num_queries))
    check_positions("q_positions", args.q_positions, batch, num_queries)
    check_positions("k_positions", args.k_positions, batch, num_keys)
    check_tensor("documents", args.documents, "int64 or int32", (batch, num_keys))
    check_tensor("forget", args.forget, "floating", (batch, k.shape[2], heads))
    check_tensor("gate", args.gate, "floating", (batch, num_queries, gates))
    checked_probability(args.dropout_p, "dropout_p")
    one_softmax = spec.difference is None and not isinstance(spec.values, XSA)
    if args.return_lse and (spec.blockwise or not one_softmax):
        raise InputError(f"{spec.name} gives no log-sum-exp: call attention without return_lse")
    if num_cached is not None:
        _check_cached(spec, q, k, args)


def check_tensor(name: str, x: Tensor | None, kind: Kind, *shapes: tuple[int, ...]) -> None:
    """Check the type of a tensor, and that its shape is one of `shapes`; None passes."""
    if x is None:
        return
    check_dense(name, x)
    if tuple(x.shape) not in shapes or x.dtype not in _TYPES[kind]:
        raise InputError(
            f"{name} must be {kind} of shape {' or '.join(map(str, shapes))}, but "
            f"it is {x.dtype} of {tuple(x.shape)}"
        )


def check_positions(name: str, positions: Tensor | None, batch: int, tokens: int) -> None:
    """Check that positions are integers of shape (T,), (1, T) or (B, T)."""
    shared = isinstance(positions, Tensor) and tuple(positions.shape) == (1, tokens)
    check_tensor(name, positions, "int64 or int32", (tokens,), (1 if shared else batch, tokens))


def check_input(name: str, x: Tensor, width: int, axes: int | None = 3) -> None:
    """Check that x is (B, T, width), or (…, width) if `axes` is None, in a supported type."""
    actual = tuple(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
    if not isinstance(x, Tensor) or x.shape[-1:] != (width,) or x.dim() != (axes or x.dim()):
        shape = "(…, width)" if axes is None else "(batch, tokens, width)"
        raise InputError(f"{name} must be {shape} with a width of {width}, but it is {actual}")
    if x.dtype not in DTYPES:
        raise InputError(
            f"{name} must be float32, float64, bfloat16 or float16, but it is {x.dtype}"
        )


def check_residual(spec: ScoreSpec, residual: object) -> None:
    """Check that a residual is given if, and only if, the score uses one."""
    if spec.residual is None and residual is not None:
        raise InputError(f"residual is given, but {spec.name} uses nothing from the layers below")
    if spec.residual is not None and not isinstance(residual, ResidualLayer):
        raise InputError(
            f"{spec.name} adds to what the layers below pass on: pass residual=residual[n] to "
            "layer n, with residual = layers.residual_layers(spec, layers=…)"
        )


def _check_mask(mask: Tensor | None, full: tuple[int, ...]) -> None:
    """Check the type of `attn_mask`, and that it broadcasts to (B, H, T, S)."""
    if mask is None:
        return
    check_dense("attn_mask", mask)
    sizes = zip(mask.shape[::-1], full[::-1], strict=False)
    fits = 2 <= mask.dim() <= 4 and all(size in (1, whole) for size, whole in sizes)
    if not fits or mask.dtype not in (torch.bool, *DTYPES):
        raise InputError(
            "attn_mask must be boolean, float32, float64, bfloat16 or float16 and broadcast to "
            f"{full}, but it is {mask.dtype} of {tuple(mask.shape)}"
        )


def _check_cached(spec: ScoreSpec, q: Tensor, k: Tensor, args: AttentionArguments) -> None:
    if q.shape[2] != k.shape[2]:
        raise InputError(
            f"with a cache each new token has a query and a key, but there are {q.shape[2]} "
            f"queries and {k.shape[2]} keys"
        )
    if args.return_lse or args.q_positions is not None or args.dropout_p:
        raise InputError("return_lse, q_positions and dropout_p cannot be used with a cache")
    if args.causal:
        return
    if args.attn_mask is None or args.documents is not None:
        raise InputError(
            "a cache is for causal attention: with causal=False it needs attn_mask=…, from the "
            "new tokens to all tokens, and takes no documents"
        )
    if spec.needs_causal:
        raise InputError(f"{spec.name} is defined for causal attention only")
    if spec.leaks_future:
        raise InputError(
            f"{spec.name} uses statistics across the sequence, which later tokens would change: "
            "it cannot be used with a cache"
        )


def check_order(spec: ScoreSpec, positions: Positions, documents: Tensor | None) -> None:
    """Check that queries are the last keys, in order, where tokens pass something on to others."""
    passes_on = spec.forgets or spec.selection is not None or isinstance(spec.values, XSA)
    if traced() or not passes_on:
        return
    query, key = positions.query, positions.key
    back = key.diff(dim=-1) < 0
    back = back if documents is None else back & (documents.diff(dim=-1) == 0)
    if bool(back.any()) or not bool((query == key[..., -query.shape[-1] :]).all()):
        raise InputError(
            f"{spec.name} needs tokens in their order: positions must not decrease, and "
            "q_positions must be those of the last keys"
        )


def check_restarts(positions: Tensor, padding: Tensor | None) -> None:
    """Check that causal positions do not restart within a row, as in packed texts.

    A restart is a return to an earlier position; padded tokens do not count. Positions that cannot
    be read (traced, meta, torch.func) pass.
    """
    if traced() or positions.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(positions):
        return
    if not bool((positions.diff(dim=-1) < 0).any()):
        return
    if padding is not None:
        # Each padded token gets a unique position below all others.
        unique = torch.arange(-positions.shape[-1], 0, device=positions.device)
        positions = torch.where(padding, unique, positions)
    decreases = (positions.diff(dim=-1) < 0).any(-1)
    repeats = (positions.sort(dim=-1).values.diff(dim=-1) == 0).any(-1)
    if bool((decreases & repeats).any()):
        raise InputError(
            "k_positions restart within a row, so causal queries would see keys of later texts: "
            "add Packed to the score and give documents=…, the number of each token's text"
        )


def checked_head_dim(dim: int, heads: int, head_dim: int | None) -> int:
    """Return the dimension of one head, by default dim / heads; `Score` checks it."""
    require_sizes("attention", dim=dim, heads=heads)
    if head_dim is None and dim % heads:
        raise InputError(
            f"a width of {dim} does not divide into {heads} heads; "
            "give head_dim, or choose a number of heads that divides the width"
        )
    return dim // heads if head_dim is None else head_dim


def checked_probability(dropout: float, name: str = "dropout") -> float:
    """Return `dropout` if it is a probability below 1."""
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise InputError(f"{name} is {dropout}; it must be at least 0 and below 1")
    return dropout
