"""`attention_cached`: new tokens attend to themselves and to all that a cache holds.

It prepares the plan that `attention` would have for all tokens and runs its last rows over the
cached keys. One more token costs so little that a few operations on the way would show: where
position alone decides what folds, a `DecodeStep` has tables for the whole cache.

Legend: B batch, H query heads, G key heads, T new tokens, S tokens in all, D head dimension, E
value size, C capacity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from normattn.errors import InputError
from normattn.kernels.inputs import Selection, check_shapes
from normattn.kernels.numerics import nan_for_infinite, readable, without_infinities
from normattn.kernels.stats import announce, observer
from normattn.layers.cache import KeyValueCache, Room
from normattn.layers.checks import (
    BOOLEAN,
    check_documents,
    check_forget,
    check_gate,
    check_mask,
    check_positions,
    check_restarts,
    check_tensor,
)
from normattn.layers.gates import apply_gate, join_pairs, log_gates, pair_values, sum_gates
from normattn.layers.prepare import prepare, regular_positions
from normattn.layers.residual_scores import ResidualLayer, check_residual
from normattn.score import Positions, Score, ScoreSpec
from normattn.score.norms import L2Norm
from normattn.score.parts import PairBiasPart, RotaryPosition
from normattn.score.positions import numbered
from normattn.score.rotary import (
    ChunkKeys,
    ChunkQueries,
    Rotation,
    far_to_near,
    key_tables,
    query_scale,
    query_tables,
)


def attention_cached(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g t d"],
    v: Float[Tensor, "b g t e"],
    score: Score,
    cache: KeyValueCache,
    key_padding: Bool[Tensor, "b s"] | None = None,
    positions: Int[Tensor, "*bs s"] | None = None,
    documents: Int[Tensor, "b s"] | None = None,
    backend: str = "auto",
    residual: ResidualLayer | None = None,
    gate: Float[Tensor, "b t gates"] | None = None,
    forget: Float[Tensor, "b t logits"] | None = None,
    attn_mask: Tensor | None = None,
    causal: bool = True,
) -> Float[Tensor, "b h t e"]:
    """Attention of T new tokens, whose keys and values join the cache.

    Args:
        q: queries (B, H, T, D) of the new tokens, not yet normalised, scaled or rotated.
        k: their keys (B, G, T, D), likewise.
        v: their values (B, G, T, E).
        score: the score that filled the cache.
        cache: what the layer has read before; changed by this call.
        key_padding: True where one of all S tokens is padding, which may stand on the left only.
        positions: those of all S tokens, (S,) or (B, S), where they are not simply 0 … S − 1; found
            from `key_padding` and `documents` where they are not given.
        documents: the number of each of all S tokens' document, for a score with `Packed`, as in
            `attention`.
        backend: auto, or one kernel's name.
        residual: as for `attention`.
        gate: that of the new tokens, as for `attention`.
        forget: likewise.
        attn_mask: what the new tokens see of all S tokens, broadcastable to (B, H, T, S), boolean
            (True = seen) or floating (added), as for `attention`.
        causal: False for new tokens that `attn_mask` lets see each other both ways, as those of a
            prefix or an image; tokens read before never see later ones.

    Equal to the last T rows of `attention` over all tokens. Raises `InputError` for shapes that do
    not fit, a full cache, and a cache that another score filled.
    """
    given = (key_padding, positions, documents, attn_mask, residual, forget)
    plain = all(x is None for x in given) and causal and backend == "auto" and observer() is None
    # Tables laid out for tokens to come would tie a compiled graph to their number.
    plain = plain and (score.spec.remapping is not None or not torch.compiler.is_compiling())
    step: DecodeStep | None = cache.step
    ready = plain and gate is None and step is not None and step.bare
    if ready and step is not None and step.fits(score, q, k, v, cache):
        cache.claim(score.spec)
        return step.run(q, k, v, score, cache)
    check_shapes(q, k, v)
    spec, (batch, _, count, _), first = score.spec, q.shape, cache.length
    _check_given(spec, key_padding, positions, documents, batch, count, first + count)
    _check_both_ways(spec, causal, attn_mask, documents)
    check_mask(attn_mask, (*q.shape[:3], first + count))
    check_residual(spec, residual)
    check_gate(spec, gate, q, v)
    check_forget(spec, forget, q, k)
    cache.claim(spec)
    v = pair_values(spec, v, k.shape[-1])
    if plain and count == 1 and _steps(score, q):
        if step is None or not step.fits(score, q, k, v, cache):
            cache.step = step = DecodeStep.prepare(score, first, q, k, v)
        return apply_gate(spec, join_pairs(score, step.run(q, k, v, score, cache)), gate)
    if documents is not None:
        documents = numbered(documents, key_padding)
    plan = prepare(
        *(spec, count, first + count, batch, q.device, causal, backend),
        attn_mask=attn_mask,
        key_padding=key_padding,
        q_positions=None if positions is None else positions[..., first:],
        k_positions=positions,
        documents=documents,
        cached=True,
    )
    at = plan.positions
    own = None if key_padding is None else key_padding[:, first:]
    announce(score, q, k, own, own, at.query, at.query)
    new_keys = score.cache_keys(k, at.query, first if at.regular else None)
    new_keys, width, sums = without_infinities(new_keys), new_keys.shape[-1], None
    if forget is not None:
        new_keys = torch.cat((new_keys, log_gates(forget, k.shape[1], k.dtype)), -1)
    keys, values = cache.append(new_keys, v)
    if forget is not None:
        # Kept apart from token to token, so that the oldest may be dropped and rows exchanged.
        sums, keys = sum_gates(keys[..., width:], q.shape[1]), keys[..., :width]
    selection = Selection(_taken(cache, keys, first), own) if spec.selection is not None else None
    plan = plan.without_first(cache.dropped)
    live = _live_blocks(spec, plan.positions)
    out = plan.run(
        *(score, q, keys, values),
        residual=residual,
        gate=gate,
        forget_sums=sums,
        selection=selection,
        rotate=lambda upto, block: _rotated(score, cache, keys, plan.positions, block, upto, live),
    )
    for block in set(cache.rotated) - live:
        del cache.rotated[block]
    if selection is not None and selection.after is not None:
        old = selection.before.shape[1] - count
        cache.selected = {first: selection.before[:, :old], cache.length: selection.after.detach()}
    return out


def _check_given(
    spec: ScoreSpec,
    padding: Tensor | None,
    positions: Tensor | None,
    documents: Tensor | None,
    batch: int,
    queries: int,
    keys: int,
) -> None:
    where = " with a cache, those of all tokens with those read before"
    check_tensor("key_padding", padding, ((batch, keys),), BOOLEAN, where)
    check_positions("positions", positions, batch, keys, where)
    check_documents(spec, documents, batch, queries, keys)
    if positions is not None and documents is None:
        check_restarts("positions", positions, padding)


def _check_both_ways(
    spec: ScoreSpec, causal: bool, mask: Tensor | None, documents: Tensor | None
) -> None:
    """Refuse tokens that see later ones without saying which, or by a score that cannot."""
    if causal:
        return
    if mask is None or documents is not None:
        raise InputError(
            "a cache is for causal attention: beside it causal=False needs attn_mask=…, what the "
            "new tokens see of all tokens, and takes no documents"
        )
    if spec.needs_causal:
        raise InputError(f"{spec.name} is defined for causal attention only")
    if spec.leaks_future:
        raise InputError(
            f"{spec.name} takes statistics across the sequence, which tokens that come later would "
            "change: it cannot be read with a cache"
        )


def _taken(cache: KeyValueCache, keys: Tensor, first: int) -> Float[Tensor, "b s"]:
    """What the first tokens took from all of the keys: of those after them, nothing."""
    wide = torch.promote_types(keys.dtype, torch.float32)
    taken = keys.new_zeros(keys.shape[0], keys.shape[2], dtype=wide)
    if first:
        if first not in cache.selected:
            raise InputError(
                f"this cache lacks what its first {first} tokens have selected, for a call before "
                "this one failed: make a new cache"
            )
        before = cache.selected[first]
        taken[:, : before.shape[1]] = before
    return taken


def _live_blocks(spec: ScoreSpec, at: Positions) -> set[int]:
    """The blocks that the last rows are in, whose rotated keys the next tokens will want."""
    if not spec.blockwise:
        return set()
    last = at.query[..., -1] // spec.block[1]
    return set(last.reshape(-1).tolist())


def _rotated(
    score: Score,
    cache: KeyValueCache,
    keys: Tensor,
    at: Positions,
    block: int,
    upto: int,
    live: set[int],
) -> Tensor | None:
    """The first `upto` keys as the rows of a block read them; those of live blocks are kept.

    None where one rotation serves all blocks.
    """
    if not score.spec.blockwise:
        return None
    room = cache.rotated.setdefault(block, Room(2)) if block in live else Room(2)
    if room.used < upto:
        new = slice(room.used, upto)
        first = room.used if at.regular else None
        room.append(score.rotate_cached_keys(keys[:, :, new], at.key[..., new], block, first))
    return room.view(upto)


def _steps(score: Score, q: Tensor) -> bool:
    """Whether position alone decides what folds into a query and a key, and one bias is added."""
    spec, position = score.spec, score.spec.position
    beside = spec.cap is not None or score.sink is not None or score.logn is not None
    beside = beside or spec.chunk is not None or spec.forgets or isinstance(spec.bias, PairBiasPart)
    beside = beside or spec.normaliser is not None or spec.selection is not None
    moved = spec.order is not None or spec.blockwise or getattr(position, "widens", False)
    if isinstance(position, RotaryPosition):
        moved = moved or position.log_growth(score.head_dim) is not None
    if spec.remapping is not None:
        beside = beside or spec.window[0] is not None or spec.bias is not None
    wide = q.dtype in (torch.float32, torch.float64)
    return wide and not (beside or moved or torch.is_autocast_enabled(q.device.type))


@dataclass(frozen=True)
class StepTables:
    """A rotation of one token: feature x becomes x·cos + x[partner]·sin, with the signs in sin.

    cos and sin are (C, D), or (C, 2, 1, 1, 1, D) with near and far positions.
    """

    cos: Float[Tensor, "c *n d"]
    sin: Float[Tensor, "c *n d"]
    partner: Int[Tensor, "*b d"]

    def rotate(self, x: Tensor, partners: Tensor, at: int) -> Tensor:
        """x at a position."""
        return torch.addcmul(x * self.cos[at], partners, self.sin[at])


@dataclass(frozen=True)
class DecodeStep:
    """The plan of one more token beside a cache: tables for positions 0 … C − 1.

    `query` and `key` rotate; None where nothing does, and `query` None, too, where both rotate
    alike. `scale` is λ of every position, or λ; with two regimes it is in `query`. `bias` holds
    b(C − 1 − r) from left to right, per head. With two regimes the cache has far keys, the last
    `near` of them at their near positions as well, so that a step rotates one key only. `bare` says
    that a layer does nothing beside; `unit` is the eps of keys of length 1 where only those are
    normalised; `alike` says that queries and keys are normalised in one way.
    """

    spec: ScoreSpec
    shapes: tuple[torch.Size, torch.Size, torch.Size]
    dtype: torch.dtype
    capacity: int
    bare: bool
    unit: float | None
    alike: bool
    readable: bool
    scale: list[float] | float
    query: StepTables | None
    key: StepTables | None
    bias: Float[Tensor, "h c"] | None
    near: int | None

    @staticmethod
    def prepare(score: Score, length: int, q: Tensor, k: Tensor, v: Tensor) -> DecodeStep:
        """The tables for a cache that is `length` tokens long now."""
        spec, capacity = score.spec, max(64, 1 << length.bit_length())
        q_norm, k_norm = spec.variant.query_norm(), spec.variant.key_norm()
        k_module = score.key_norm if q_norm is None else None
        query_step, bias = None, None
        scale: Tensor | float = 1.0
        with torch.inference_mode(False):
            at = regular_positions(capacity, capacity, q.device)
            keys = key_tables(spec, score.head_dim, at.key, q.dtype, 0)
            if spec.remapping is None:
                scale = query_scale(spec, score.head_dim, at.n)
            else:
                queries = query_tables(spec, score.head_dim, at, q.dtype)
                query_step = _lay_out((queries.near, queries.far), q, k)
            key_step = _lay_out((keys.near, keys.far), q, k)
            if spec.bias is not None:
                learned = {} if score.bias is None else dict(score.bias.items())
                bias = spec.bias.values(at.key.to(q.dtype), score.heads, learned)
                bias = bias.detach().flip(-1).to(q.dtype)
        return DecodeStep(
            spec,
            (q.shape, k.shape, v.shape),
            q.dtype,
            capacity,
            bare=spec.gate is None and spec.difference is None,
            unit=k_module.eps if isinstance(k_module, L2Norm) else None,
            alike=k_norm is not None and k_norm == q_norm and k_norm.by_head and not k_norm.gain,
            readable=readable(q),
            scale=scale.tolist() if isinstance(scale, Tensor) else float(scale),
            query=query_step,
            key=key_step,
            bias=bias,
            near=None if spec.remapping is None else spec.remapping.window,
        )

    def fits(self, score: Score, q: Tensor, k: Tensor, v: Tensor, cache: KeyValueCache) -> bool:
        """Whether it serves this call, whose tensors then are what was checked when it was made."""
        return (
            score.spec is self.spec
            and cache.length < self.capacity
            and (q.shape, k.shape, v.shape) == self.shapes
            and q.dtype is k.dtype is v.dtype is self.dtype
            and q.layout is k.layout is v.layout is torch.strided
        )

    def run(
        self,
        q: Float[Tensor, "b h 1 d"],
        k: Float[Tensor, "b g 1 d"],
        v: Float[Tensor, "b g 1 e"],
        score: Score,
        cache: KeyValueCache,
    ) -> Float[Tensor, "b h 1 e"]:
        """The token's output; its key and value join the cache."""
        at, heads = cache.length, (q.shape[1], k.shape[1])
        both, diverged = self._show_infinities(self._normalise(q, k, score))
        partners = None if self.key is None else both.gather(-1, self.key.partner)
        if self.query is not None and self.key is not None and partners is not None:
            (q, k), (q_partners, k_partners) = (
                x.split_with_sizes(heads, 1) for x in (both, partners)
            )
            q = self.query.rotate(q, q_partners, at)
            q = q if score.scale is None else q * score.scale
            return self._two_regimes(q, self.key.rotate(k, k_partners, at), v, score, cache)
        if self.key is not None and partners is not None:
            both = self.key.rotate(both, partners, at)
        q, k = both.split_with_sizes(heads, 1)
        keys, values = cache.append(k, v)
        window = self.spec.window[0]
        if window is not None and keys.shape[2] > window:
            keys, values = keys[:, :, -window:], values[:, :, -window:]
        mask = None
        if self.bias is not None:
            mask = self.bias[None, :, None, self.capacity - keys.shape[2] :]
        scale = self.scale if isinstance(self.scale, float) else self.scale[at]
        if score.scale is not None:
            scale = scale * float(score.scale)
        if diverged or v.shape[-1] != q.shape[-1]:
            # The kernel copies values of another size, and may give 0 where all is NaN.
            return _by_products(q * scale, keys, values, mask)
        return scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, scale=scale, enable_gqa=heads[0] != heads[1]
        )

    def _normalise(self, q: Tensor, k: Tensor, score: Score) -> Float[Tensor, "b heads 1 d"]:
        """Query and key as the score normalises them, side by side.

        Both at once where that can be, and a key of length 1 in as few calls as there are: so small
        a tensor costs its calls, not its numbers.
        """
        if self.alike:
            assert score.key_norm is not None
            both: Tensor = score.key_norm(torch.cat((q, k), 1))
            return both
        if self.unit is not None:
            k = k / torch.linalg.vector_norm(k, dim=-1, keepdim=True).clamp_min(self.unit)
        elif score.key_norm is not None:
            k = score.key_norm(k)
        if score.query_norm is not None:
            q = score.query_norm(q)
        return torch.cat((q, k), 1)

    def _show_infinities(self, both: Tensor) -> tuple[Tensor, bool]:
        """The same with NaN for infinities, and whether some number is seen not to be finite."""
        read = self.readable and not torch.compiler.is_compiling()
        diverged = read and not math.isfinite(both.sum(dtype=torch.float32).item())
        return (both if read and not diverged else nan_for_infinite(both)), diverged

    def _two_regimes(
        self, q: Tensor, k: Tensor, v: Tensor, score: Score, cache: KeyValueCache
    ) -> Float[Tensor, "b h 1 e"]:
        """Near and far scores beside each other: near ones are ⟨R_i q, R_j k⟩ whatever i is."""
        assert self.near is not None
        at, (batch, heads, _, size), groups = cache.length, self.shapes[0], v.shape[1]
        (near_q, far_q), (near_k, far_k) = q.unbind(), k.unbind()
        keys, values = cache.append(far_k, v)
        near = self._near_keys(score, cache, keys, near_k)
        # Query heads that share a key head are rows of one product.
        shape = (batch, groups, heads // groups, size)
        far = max(0, at + 1 - self.near)
        scores = near_q.reshape(shape) @ near.transpose(-1, -2)
        if far:
            distant = far_q.reshape(shape) @ keys[:, :, :far].transpose(-1, -2)
            scores = torch.cat((distant, scores), -1)
        return (torch.softmax(scores, -1) @ values).reshape(batch, heads, 1, -1)

    def _near_keys(self, score: Score, cache: KeyValueCache, keys: Tensor, new: Tensor) -> Tensor:
        """The last keys of the near window at their near positions."""
        assert self.near is not None
        room, end = cache.near, cache.length
        start = max(0, end - self.near)
        if cache.near_end != end - 1 or end - 1 - room.used > start:
            # The cache was filled or cut by other calls: rotate the window once.
            places = torch.arange(start, end)
            rotate = far_to_near(self.spec, score.head_dim, places, keys.dtype, start)
            assert rotate is not None
            cache.near = room = Room(2)
            room.append(rotate(keys[:, :, start:]))
        else:
            if room.used > 2 * self.near + 64:
                room.drop(0, room.used - self.near, 2 * self.near + 65)
            room.append(new)
        cache.near_end = end
        held = room.view(room.used)
        return held[:, :, room.used - (end - start) :]


def _by_products(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q kᵀ + mask) v; query heads that share a key head are rows of one product."""
    score = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[-1]) @ keys.transpose(-1, -2)
    if mask is not None:
        score += mask.reshape(1, *score.shape[1:])
    return (torch.softmax(score, -1) @ values).flatten(1, 2)[:, :, None]


def _lay_out(
    rotations: tuple[Rotation | ChunkQueries | ChunkKeys | None, Rotation | None],
    q: Tensor,
    k: Tensor,
) -> StepTables | None:
    """The tables of rotations, near and far, a number for each feature of query and key."""
    tables = []
    for rotation in rotations:
        if rotation is not None:
            # Rules by chunks are read by blocks, and have no decode step.
            assert isinstance(rotation, Rotation)
            tables.append(_by_feature(rotation, q))
    if not tables:
        return None
    partner = tables[0][2].expand(q.shape[0], q.shape[1] + k.shape[1], 1, -1)
    if len(tables) == 1:
        return StepTables(*tables[0][:2], partner)
    near, far = tables
    cos, sin = (torch.stack((near[n], far[n]), 1)[:, :, None, None, None] for n in (0, 1))
    return StepTables(cos, sin, partner)


def _by_feature(rotation: Rotation, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """cos and sin (C, D) of a rotation in the type of q, and the partner of each feature."""
    cos, sin, rest = (x.to(q.dtype) for x in (rotation.cos, rotation.sin, rotation.rest))
    size, turned = q.shape[-1], 2 * cos.shape[-1]
    index = torch.arange(size, device=q.device)
    pairs = index[:turned]
    if rotation.interleaved:
        cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
        partner = pairs ^ 1
    else:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        partner = (pairs + turned // 2) % turned
    rest = rest.expand(-1, size - turned)
    cos, sin = torch.cat((cos, rest), -1), torch.cat((sin, torch.zeros_like(rest)), -1)
    partner = torch.cat((partner, index[turned:]))
    if rotation.start:  # the features that turn stand behind as many of the others
        cos, sin = cos.roll(rotation.start, -1), sin.roll(rotation.start, -1)
        partner = (partner.roll(rotation.start) + rotation.start) % size
    return cos, sin, partner
