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
_EVERY = slice(None)


def reference(
    inputs: AttentionInputs, recorder: Recorder | None = None, rows: slice = _EVERY
) -> Float[Tensor, "b h t e"]:
    """softmax(score) · v by the whole T × S matrix, a query that sees no key getting 0.

    `recorder` takes statistics: the queries are the `rows` of its inputs.
    """
    return reference_with_lse(inputs, recorder, False, rows)[0]


def reference_with_lse(
    inputs: AttentionInputs,
    recorder: Recorder | None = None,
    with_lse: bool = True,
    rows: slice = _EVERY,
) -> tuple[Float[Tensor, "b h t e"], Float[Tensor, "b h t"] | None]:
    """The same, and the log-sum-exp of each row's scores: −∞ where there is nothing to choose."""
    if inputs.residual_scores is not None:
        inputs.residual_scores.enter("reference", inputs.stack)
    p = inputs.widened().expanded()
    score, unseen = _masked(p, _products(p))
    if p.pairs is not None:
        score = score + p.pairs.values(score, p.mask).to(score.dtype)
    if p.selection is not None:
        score = score - p.selection.taken(score[:, 0], p.mask)[:, None].to(score.dtype)
    # Not seen in the scores: a NaN among them has to come out.
    nothing = None if unseen is None else unseen.all(-1, keepdim=True)
    bare, score = score, score if nothing is None else score.masked_fill(nothing, 0.0)
    sink = None if p.sink is None else p.sink.to(score)[None, :, None, None]
    if sink is not None:
        logits = torch.cat((score, sink.expand(*score.shape[:3], 1)), -1)
        weight = torch.softmax(logits, -1)[..., :-1]
    elif p.normaliser is not None:
        weight = p.normaliser.weights(score, p.mask)
    else:
        weight = torch.softmax(score, -1)
    weight = weight if nothing is None else weight.masked_fill(nothing, 0.0)
    if recorder is not None:
        record_rows(recorder, p, bare, weight, rows)
    dropped = torch.nn.functional.dropout(weight, p.dropout)
    out = dropped.to(p.v.dtype) @ p.v
    if p.pair_values is not None:
        out = out + p.pair_values.read(dropped, p.v.shape[-1], p.mask).to(out.dtype)
    out = out.to(inputs.v.dtype)
    if not with_lse:
        return out, None
    lse = torch.logsumexp(score, -1, keepdim=True)
    lse = lse if nothing is None else lse.masked_fill(nothing, -torch.inf)
    lse = lse if sink is None else torch.logaddexp(lse, sink.expand(lse.shape))
    return out, lse.squeeze(-1)


def _products(p: AttentionInputs) -> Float[Tensor, "b h t s"]:
    """The score of every pair before masks: products, residual scores, cap and bias by distance."""
    # Columns before near_start are far for every row: what is in them is not read.
    near_k = torch.nn.functional.pad(p.k, (0, 0, p.near_start, 0))
    score, distance = p.q @ near_k.mT, None
    if p.window is not None or p.bias is not None:
        distance = p.mask.distance(_EVERY, _EVERY)
    if p.far_q is not None and p.far_k is not None:
        assert distance is not None
        assert p.window is not None
        score = torch.where(distance >= p.window, p.far_q @ p.far_k.mT, score)
    if p.residual_scores is not None:
        score = p.residual_scores.stored(score)
    if p.cap is not None:
        score = p.cap * torch.tanh(score / p.cap)
    if p.bias is not None:
        assert distance is not None
        # (B, 1, T, S) or (T, S) distances pick from each head's row.
        bias = p.bias[:, distance.abs()]
        score = score + (bias.squeeze(2).transpose(0, 1) if distance.dim() == 4 else bias)
    return score


def _masked(p: AttentionInputs, score: Tensor) -> tuple[Tensor, Tensor | None]:
    """The scores, −∞ where a key is hidden, and where that is (None: nowhere)."""
    added, hidden = p.mask.additive(_EVERY, _EVERY), p.mask.hidden(_EVERY, _EVERY)
    unseen = hidden
    if added is not None:
        score, out = score + added, added == -torch.inf
        unseen = out if hidden is None else hidden | out
    return score if hidden is None else score.masked_fill(hidden, -torch.inf), unseen


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
    forward and backward nothing per pair is kept; what one strip holds on a CPU is kept, which
    saves computing it again. `recorder` takes statistics.
    """
    if inputs.q.device.type == "cpu" and strip_rows(inputs) == inputs.q.shape[2]:
        return reference(inputs, recorder)
    out, selection = [], inputs.selection
    for rows, part in _strips(inputs):
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


def _strips(inputs: AttentionInputs) -> Iterator[tuple[slice, AttentionInputs]]:
    """Rows and their inputs, without the keys that none of them sees."""
    p, mask, step = inputs, inputs.mask, strip_rows(inputs)
    queries, keys = p.q.shape[2], p.v.shape[2]
    last = mask.causal and mask.aligned and queries <= keys
    for start in range(0, max(1, queries), step):
        rows = slice(start, min(start + step, queries))
        count = keys - queries + rows.stop if last else keys
        yield (
            rows,
            replace(
                p,
                q=p.q[:, :, rows],
                k=p.k[:, :, : max(0, count - p.near_start)],
                v=p.v[:, :, :count],
                far_q=None if p.far_q is None else p.far_q[:, :, rows],
                far_k=None if p.far_k is None else p.far_k[:, :, :count],
                mask=mask.select(rows, count),
                pairs=None if p.pairs is None else p.pairs.part(rows),
            ),
        )
