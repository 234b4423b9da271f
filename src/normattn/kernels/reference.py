"""The definition: plain matmul and softmax, any derivative; whole, or by strips of whole rows.

Half-precision inputs are computed in float32, and float64 ones in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from normattn.kernels.inputs import AttentionInputs
from normattn.kernels.stats import Recorder, record_rows

# Bytes of a strip's scores: about what a core's caches hold; a GPU must be filled instead.
STRIP_BYTES, DEVICE_STRIP_BYTES = 2**22, 2**28


def reference(
    inputs: AttentionInputs, recorder: Recorder | None = None, rows: slice = slice(None)
) -> Float[Tensor, "b h t e"]:
    """softmax(score) · v by the whole T × S matrix, a query that sees no key getting 0.

    `recorder` takes statistics: the queries are the `rows` of its inputs.
    """
    return _whole(inputs, recorder, rows)[0]


def reference_with_more(
    inputs: AttentionInputs, recorder: Recorder | None, with_lse: bool
) -> tuple[Float[Tensor, "b h t e"], Float[Tensor, "b h t"] | None]:
    """The same, and the log-sum-exp of each row's scores."""
    out, score, nothing = _whole(inputs, recorder, slice(None))
    if not with_lse:
        return out, None
    lse = torch.logsumexp(score, -1)
    if nothing is not None:
        lse = lse.masked_fill(nothing.squeeze(-1), -torch.inf)
    if inputs.sink is not None:
        lse = torch.logaddexp(lse, inputs.sink.to(lse)[None, :, None].expand(lse.shape))
    return out, lse


def _whole(
    inputs: AttentionInputs, recorder: Recorder | None, rows: slice
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The output, the scores, and the rows that see no key, whose scores are 0."""
    p = inputs.widened().expanded()
    score = _products(p)
    if p.residual_scores is not None:
        p.residual_scores.enter("reference", inputs.stack)
        score = p.residual_scores.stored(score)
    if p.cap is not None:
        score = p.cap * torch.tanh(score / p.cap)
    if p.bias is not None:
        score = score + _by_distance(p, p.bias)
    score, unseen = _masked(p, score)
    if p.pairs is not None:
        score = score + p.pairs.values(score, p.visibility).to(score.dtype)
    if p.selection is not None:
        score = score - p.selection.taken(score[:, 0], p.visibility)[:, None].to(score.dtype)
    # Not told from the scores: a NaN among them has to come out.
    nothing = None if unseen is None else unseen.all(-1, keepdim=True)
    bare, score = score, score if nothing is None else score.masked_fill(nothing, 0.0)
    if p.sink is not None:
        sink = p.sink.to(score)[None, :, None, None].expand(*score.shape[:3], 1)
        weight = torch.softmax(torch.cat((score, sink), -1), -1)[..., :-1]
    elif p.normaliser is not None:
        weight = p.normaliser.weights(score, p.visibility)
    else:
        weight = torch.softmax(score, -1)
    weight = weight if nothing is None else weight.masked_fill(nothing, 0.0)
    if recorder is not None:
        record_rows(recorder, p, bare, weight, rows)
    weight = torch.nn.functional.dropout(weight, p.dropout)
    return (weight.to(p.v.dtype) @ p.v).to(inputs.v.dtype), score, nothing


def _products(p: AttentionInputs) -> Float[Tensor, "b h t s"]:
    """⟨q_i, k_j⟩ of every pair, the distant ones by the far queries and keys."""
    # Columns before near_start are far for every row: what is in them is not read.
    near_k = torch.nn.functional.pad(p.k, (0, 0, p.near_start, 0))
    score = p.q @ near_k.transpose(-1, -2)
    if p.far_q is None or p.far_k is None or p.window is None:
        return score
    every = slice(None)
    far = p.visibility.distance(every, every) >= p.window
    return torch.where(far, p.far_q @ p.far_k.transpose(-1, -2), score)


def _by_distance(p: AttentionInputs, bias: Tensor) -> Float[Tensor, "*b h t s"]:
    """The bias of every pair."""
    distance = p.visibility.distance(slice(None), slice(None)).abs()
    # (B, 1, T, S) or (T, S) distances pick from each head's row.
    by_head = bias[:, distance]
    return by_head.squeeze(2).transpose(0, 1) if distance.dim() == 4 else by_head


def _masked(p: AttentionInputs, score: Tensor) -> tuple[Tensor, Tensor | None]:
    """The scores, −∞ where a key is hidden, and where that is (None: nowhere)."""
    every = slice(None)
    added = p.visibility.added(every, every)
    if added is not None:
        score = score + added
    hidden = p.visibility.hidden(every, every)
    unseen = None if added is None else added == -torch.inf
    if hidden is not None:
        score = score.masked_fill(hidden, -torch.inf)
        unseen = hidden if unseen is None else hidden | unseen
    return score, unseen


def strip_rows(inputs: AttentionInputs) -> int:
    """How many query rows a strip has."""
    q = inputs.q
    numbers = q.shape[0] * q.shape[1] + (0 if inputs.pairs is None else inputs.pairs.width)
    size = STRIP_BYTES if q.device.type == "cpu" else DEVICE_STRIP_BYTES
    row = max(1, numbers * inputs.v.shape[2] * max(4, q.element_size()))
    return max(1, min(q.shape[2], size // row))


def strips(inputs: AttentionInputs, recorder: Recorder | None = None) -> Float[Tensor, "b h t e"]:
    """The same by strips of some rows and all keys: any inputs without a T × S matrix.

    A strip's scores take about 4 MiB on a CPU. Its backward computes it once more, so that between
    forward and backward nothing per pair is kept. `recorder` takes statistics.
    """
    out, selection = [], inputs.selection
    for rows, part in _parts(inputs):
        if selection is not None:
            part = replace(part, selection=selection.part(rows, part.v.shape[2]))
        if torch.is_grad_enabled():
            dropped = inputs.dropout > 0
            made = checkpoint(reference, part, use_reentrant=False, preserve_rng_state=dropped)
            assert isinstance(made, Tensor)
            out.append(made)
        else:
            out.append(reference(part))
        if selection is not None and part.selection is not None:
            # Not by the strip's own object, which its backward writes to once more.
            selection = selection.behind(part.selection)
        if recorder is not None:
            with torch.no_grad():
                # Without dropout, which would draw from the generator once more.
                reference(replace(part, dropout=0.0), recorder, rows)
    if inputs.selection is not None and selection is not None:
        inputs.selection.after = selection.before
    return torch.cat(out, 2)


def _parts(inputs: AttentionInputs) -> Iterator[tuple[slice, AttentionInputs]]:
    """Rows and their inputs, without the keys that none of them sees."""
    queries, keys, step = inputs.q.shape[2], inputs.v.shape[2], strip_rows(inputs)
    seen = inputs.visibility
    last = seen.causal and seen.aligned and queries <= keys
    for start in range(0, max(1, queries), step):
        rows = slice(start, min(start + step, queries))
        yield rows, _part(inputs, rows, keys - queries + rows.stop if last else keys)


def _part(inputs: AttentionInputs, rows: slice, keys: int) -> AttentionInputs:
    """The inputs of some rows and the first `keys` keys."""
    p = inputs
    return replace(
        p,
        q=p.q[:, :, rows],
        k=p.k[:, :, : max(0, keys - p.near_start)],
        v=p.v[:, :, :keys],
        far_q=None if p.far_q is None else p.far_q[:, :, rows],
        far_k=None if p.far_k is None else p.far_k[:, :, :keys],
        visibility=p.visibility.part(rows, keys),
        pairs=None if p.pairs is None else p.pairs.part(rows),
    )
