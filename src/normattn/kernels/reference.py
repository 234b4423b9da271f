"""The definition of attention by matmul and softmax, whole or by strips of whole rows.

It supports every derivative and computes in float32, or in float64 for float64 inputs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from normattn.kernels.inputs import AttentionInputs
from normattn.kernels.stats import Recorder, record_rows

# Bytes of a strip's scores: about the size of a core's caches; a GPU needs more to be busy.
STRIP_BYTES, DEVICE_STRIP_BYTES = 2**22, 2**28
_ALL = slice(None)


def reference(
    inputs: AttentionInputs, recorder: Recorder | None = None, rows: slice = _ALL
) -> Float[Tensor, "b h t e"]:
    """softmax(score) · v through the whole T × S matrix; 0 for a query that sees no key.

    `recorder` collects statistics; the queries are `rows` of its inputs.
    """
    return reference_with_lse(inputs, recorder, False, rows)[0]


def reference_with_lse(
    inputs: AttentionInputs,
    recorder: Recorder | None = None,
    with_lse: bool = True,
    rows: slice = _ALL,
) -> tuple[Float[Tensor, "b h t e"], Float[Tensor, "b h t"] | None]:
    """`reference` and the log-sum-exp of each row, −∞ for a row without any logit."""
    dtype, inputs = inputs.v.dtype, inputs.upcast().repeat_kv()
    score = _scores(inputs)
    added, hidden = inputs.mask.additive(_ALL, _ALL), inputs.mask.hidden(_ALL, _ALL)
    if added is not None:
        score = score + added
    masked = score if hidden is None else score.masked_fill(hidden, -torch.inf)
    # Rows without a key are found from the mask: a NaN among the scores must reach the output.
    if added is not None:
        hidden = added == -torch.inf if hidden is None else hidden | (added == -torch.inf)
    empty = None if hidden is None else hidden.all(-1, keepdim=True)
    if inputs.pairs is not None:
        bias = inputs.pairs.compute(masked, inputs.mask, inputs.pairs.table)
        masked = masked + bias.to(masked.dtype)
    if inputs.selection is not None:
        penalties = inputs.selection.penalties(masked[:, 0], inputs.mask)
        masked = masked - penalties[:, None].to(masked.dtype)
    score = masked if empty is None else masked.masked_fill(empty, 0.0)
    sink = None if inputs.sink is None else inputs.sink.to(score)[None, :, None, None]
    if sink is not None:
        logits = torch.cat((score, sink.expand(*score.shape[:3], 1)), -1)
        weight = torch.softmax(logits, -1)[..., :-1]
    elif inputs.normaliser is not None:
        weight = inputs.normaliser(score, inputs.mask)
    else:
        weight = torch.softmax(score, -1)
    weight = weight if empty is None else weight.masked_fill(empty, 0.0)
    if recorder is not None:
        record_rows(recorder, inputs, masked, weight, rows)
    dropped = torch.nn.functional.dropout(weight, inputs.dropout)
    out = dropped.to(inputs.v.dtype) @ inputs.v
    if inputs.pair_values is not None:
        out = out + inputs.pair_values(dropped, inputs.v.shape[-1], inputs.mask).to(out.dtype)
    out = out.to(dtype)
    if not with_lse:
        return out, None
    lse = torch.logsumexp(score, -1, keepdim=True)
    lse = lse if empty is None else lse.masked_fill(empty, -torch.inf)
    lse = lse if sink is None else torch.logaddexp(lse, sink.expand(lse.shape))
    return out, lse.squeeze(-1)


def _scores(inputs: AttentionInputs) -> Float[Tensor, "b h t s"]:
    """The score of every pair before masks: products, residual scores, cap and bias by distance."""
    # Columns before near_start are far for every row, so their products are not used.
    near_k = torch.nn.functional.pad(inputs.k, (0, 0, inputs.near_start, 0))
    score, distance = inputs.q @ near_k.mT, None
    if inputs.far_from is not None or inputs.bias is not None:
        distance = inputs.mask.distance(_ALL, _ALL)
    if inputs.far_q is not None and inputs.far_k is not None:
        assert distance is not None
        assert inputs.far_from is not None
        far_score = inputs.far_q @ inputs.far_k.mT
        score = torch.where(distance >= inputs.far_from, far_score, score)
    if inputs.cap is not None:
        score = inputs.cap * torch.tanh(score / inputs.cap)
    if inputs.bias is not None:
        assert distance is not None
        # Distances are (B, 1, T, S) or (T, S).
        bias = inputs.bias[:, distance.abs()]
        score = score + (bias.squeeze(2).transpose(0, 1) if distance.dim() == 4 else bias)
    return score


def strips(inputs: AttentionInputs, recorder: Recorder | None = None) -> Float[Tensor, "b h t e"]:
    """`reference` by strips of query rows, for any inputs and without a T × S matrix.

    A strip's scores take about 4 MiB on a CPU. The backward recomputes each strip, so that nothing
    per pair is stored in between. A single strip on a CPU is not recomputed, which is faster.
    `recorder` collects statistics.
    """
    q, v, selection, outputs = inputs.q, inputs.v, inputs.selection, []
    queries, keys, on_cpu = q.shape[2], v.shape[2], q.device.type == "cpu"
    numbers = q.shape[0] * q.shape[1] + (0 if inputs.pairs is None else inputs.pairs.numbers)
    row_bytes = max(1, numbers * keys * max(4, q.element_size()))
    step = max(1, min(queries, (STRIP_BYTES if on_cpu else DEVICE_STRIP_BYTES) // row_bytes))
    if on_cpu and step == queries:
        return reference(inputs, recorder)
    skip_future = inputs.mask.causal and inputs.mask.aligned and queries <= keys
    for start in range(0, max(1, queries), step):
        rows = slice(start, min(start + step, queries))
        # Without the keys that no row of the strip sees.
        count = keys - queries + rows.stop if skip_future else keys
        strip = replace(
            inputs,
            q=q[:, :, rows],
            k=inputs.k[:, :, : max(0, count - inputs.near_start)],
            v=v[:, :, :count],
            far_q=None if inputs.far_q is None else inputs.far_q[:, :, rows],
            far_k=None if inputs.far_k is None else inputs.far_k[:, :, :count],
            mask=inputs.mask.select(rows, count),
            pairs=None if inputs.pairs is None else inputs.pairs.select(rows),
            selection=None if selection is None else selection.select(rows, count),
        )
        if torch.is_grad_enabled():
            has_dropout = inputs.dropout > 0
            out = checkpoint(reference, strip, use_reentrant=False, preserve_rng_state=has_dropout)
            assert isinstance(out, Tensor)
        else:
            out = reference(strip)
        outputs.append(out)
        if selection is not None and strip.selection is not None:
            # A new object: the strip's backward writes to its selection again.
            selection = selection.advance(strip.selection)
        if recorder is not None:
            with torch.no_grad():
                # Without dropout, which would draw from the generator again.
                reference(replace(strip, dropout=0.0), recorder, rows)
    if inputs.selection is not None and selection is not None:
        inputs.selection.after = selection.before
    return torch.cat(outputs, 2)
