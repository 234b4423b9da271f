"""The Triton programs of two-regime attention; importing this module needs triton.

A program walks over the blocks on the other side in three stretches: those that one regime scores
alone, those that the window's border crosses, where both products are made and the distance
decides, and those of the other regime alone.

All tensors are contiguous: q, far_q, out, by_out and by_q (B, H, T, ·), k (B, G, S − near_start,
·), far_k, v and theirs (B, G, S, ·), lse and delta (B, H, T) in float32. Query row m stands at
position i = m + S − T.
"""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _load(base, rows, first, last, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Rows first ≤ r < last of a matrix whose first row is `first`; 0 for all others."""
    column = tl.arange(0, PADDED)
    where = (rows - first)[:, None] * SIZE + column[None, :]
    inside = ((rows >= first) & (rows < last))[:, None] & (column < SIZE)[None, :]
    return tl.load(base + where, mask=inside, other=0.0)


@triton.jit
def _store(base, rows, first, last, value, SIZE: tl.constexpr, PADDED: tl.constexpr):
    column = tl.arange(0, PADDED)
    where = (rows - first)[:, None] * SIZE + column[None, :]
    inside = ((rows >= first) & (rows < last))[:, None] & (column < SIZE)[None, :]
    tl.store(base + where, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _dot(a, b, UPCAST: tl.constexpr):
    """a · b in float32; the interpreter knows no products of bfloat16."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _scores(
    q, k, far_q, far_k, i, j, keys, window,
    NEAR: tl.constexpr, FAR: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Scores of a block, −∞ where the key is not seen."""
    if NEAR:
        score = _dot(q, tl.trans(k), UPCAST)
        if FAR:
            beyond = _dot(far_q, tl.trans(far_k), UPCAST)
            score = tl.where(i[:, None] - j[None, :] >= window, beyond, score)
    else:
        score = _dot(far_q, tl.trans(far_k), UPCAST)
    seen = (j[None, :] <= i[:, None]) & (j[None, :] < keys)
    return tl.where(seen, score, float("-inf"))


@triton.jit
def _stretches(i_first, i_last, end, window, BLOCK: tl.constexpr):
    """For query positions i_first … i_last: where all-far key blocks end, all-near ones begin."""
    all_far = tl.maximum(i_first - window + 1, 0) // BLOCK * BLOCK
    all_near = (tl.maximum(i_last - window + 1, 0) + BLOCK - 1) // BLOCK * BLOCK
    return tl.minimum(all_far, end), tl.minimum(all_near, end)


@triton.jit
def _gather(
    total, top, out, q, far_q, k, far_k, v, i, start, end, near_start, keys, window,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr,
    NEAR: tl.constexpr, FAR: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Online softmax over the key blocks from `start` to `end`."""
    for first in range(start, end, BLOCK):
        j = first + tl.arange(0, BLOCK)
        near_keys, far_keys = q, q
        if NEAR:
            near_keys = _load(k, j, near_start, keys, D, DP)
        if FAR:
            far_keys = _load(far_k, j, 0, keys, D, DP)
        score = _scores(q, near_keys, far_q, far_keys, i, j, keys, window, NEAR, FAR, UPCAST)
        higher = tl.maximum(top, tl.max(score, 1))
        # Every row sees the first key of the first block, so `higher` is finite.
        weight = tl.exp(score - higher[:, None])
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(weight, 1)
        values = _load(v, j, 0, keys, E, EP)
        out = out * shrink[:, None] + _dot(weight.to(values.dtype), values, UPCAST)
        top = higher
    return total, top, out


@triton.jit
def forward(
    q, k, v, far_q, far_k, out, lse, heads, groups, queries, keys, near_start, window,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """out and lse of ROWS queries of one head."""
    block, one = tl.program_id(0), tl.program_id(1).to(tl.int64)
    of = one // heads * groups + one % heads // (heads // groups)
    k, far_k, v = k + of * (keys - near_start) * D, far_k + of * keys * D, v + of * keys * E
    rows = block * ROWS + tl.arange(0, ROWS)
    i = rows + keys - queries
    near = _load(q + one * queries * D, rows, 0, queries, D, DP)
    far = _load(far_q + one * queries * D, rows, 0, queries, D, DP)
    i_first = block * ROWS + keys - queries
    i_last = i_first + ROWS - 1
    end = tl.minimum(keys, i_last + 1)
    all_far, all_near = _stretches(i_first, i_last, end, window, BLOCK)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    acc = tl.zeros([ROWS, EP], tl.float32)
    total, top, acc = _gather(
        total, top, acc, near, far, k, far_k, v, i, 0, all_far, near_start, keys, window,
        D, E, DP, EP, BLOCK, False, True, UPCAST,
    )  # fmt: skip
    total, top, acc = _gather(
        total, top, acc, near, far, k, far_k, v, i, all_far, all_near, near_start, keys, window,
        D, E, DP, EP, BLOCK, True, True, UPCAST,
    )  # fmt: skip
    total, top, acc = _gather(
        total, top, acc, near, far, k, far_k, v, i, all_near, end, near_start, keys, window,
        D, E, DP, EP, BLOCK, True, False, UPCAST,
    )  # fmt: skip
    _store(out + one * queries * E, rows, 0, queries, acc / total[:, None], E, EP)
    tl.store(lse + one * queries + rows, top + tl.log(total), mask=rows < queries)


@triton.jit
def _query_sums(
    by_q, by_far_q, q, far_q, k, far_k, v, by_out, lse, delta, i, start, end, near_start, keys,
    window,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr,
    NEAR: tl.constexpr, FAR: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries from the key blocks from `start` to `end`."""
    for first in range(start, end, BLOCK):
        j = first + tl.arange(0, BLOCK)
        near_keys, far_keys = q, q
        if NEAR:
            near_keys = _load(k, j, near_start, keys, D, DP)
        if FAR:
            far_keys = _load(far_k, j, 0, keys, D, DP)
        score = _scores(q, near_keys, far_q, far_keys, i, j, keys, window, NEAR, FAR, UPCAST)
        weight = tl.exp(score - lse[:, None])
        values = _load(v, j, 0, keys, E, EP)
        by_score = weight * (_dot(by_out, tl.trans(values), UPCAST) - delta[:, None])
        is_far = i[:, None] - j[None, :] >= window
        if NEAR:
            part = by_score
            if FAR:
                part = tl.where(is_far, 0.0, by_score)
            by_q += _dot(part.to(values.dtype), near_keys, UPCAST)
        if FAR:
            part = by_score
            if NEAR:
                part = tl.where(is_far, by_score, 0.0)
            by_far_q += _dot(part.to(values.dtype), far_keys, UPCAST)
    return by_q, by_far_q


@triton.jit
def backward_queries(
    q, k, v, far_q, far_k, by_out, lse, delta, by_q, by_far_q,
    heads, groups, queries, keys, near_start, window,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """by_q and by_far_q of ROWS queries of one head."""
    block, one = tl.program_id(0), tl.program_id(1).to(tl.int64)
    of = one // heads * groups + one % heads // (heads // groups)
    k, far_k, v = k + of * (keys - near_start) * D, far_k + of * keys * D, v + of * keys * E
    rows = block * ROWS + tl.arange(0, ROWS)
    i = rows + keys - queries
    near = _load(q + one * queries * D, rows, 0, queries, D, DP)
    far = _load(far_q + one * queries * D, rows, 0, queries, D, DP)
    grad = _load(by_out + one * queries * E, rows, 0, queries, E, EP)
    # Rows past the last have no weights.
    whole = tl.load(lse + one * queries + rows, mask=rows < queries, other=float("inf"))
    drop = tl.load(delta + one * queries + rows, mask=rows < queries, other=0.0)
    i_first = block * ROWS + keys - queries
    i_last = i_first + ROWS - 1
    end = tl.minimum(keys, i_last + 1)
    all_far, all_near = _stretches(i_first, i_last, end, window, BLOCK)
    near_sum = tl.zeros([ROWS, DP], tl.float32)
    far_sum = tl.zeros([ROWS, DP], tl.float32)
    near_sum, far_sum = _query_sums(
        near_sum, far_sum, near, far, k, far_k, v, grad, whole, drop, i, 0, all_far,
        near_start, keys, window, D, E, DP, EP, BLOCK, False, True, UPCAST,
    )  # fmt: skip
    near_sum, far_sum = _query_sums(
        near_sum, far_sum, near, far, k, far_k, v, grad, whole, drop, i, all_far, all_near,
        near_start, keys, window, D, E, DP, EP, BLOCK, True, True, UPCAST,
    )  # fmt: skip
    near_sum, far_sum = _query_sums(
        near_sum, far_sum, near, far, k, far_k, v, grad, whole, drop, i, all_near, end,
        near_start, keys, window, D, E, DP, EP, BLOCK, True, False, UPCAST,
    )  # fmt: skip
    _store(by_q + one * queries * D, rows, 0, queries, near_sum, D, DP)
    _store(by_far_q + one * queries * D, rows, 0, queries, far_sum, D, DP)


@triton.jit
def _key_sums(
    by_k, by_far_k, by_v, q, far_q, k, far_k, values, by_out, lse, delta, j, start, end,
    queries, keys, window,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, ROWS: tl.constexpr,
    NEAR: tl.constexpr, FAR: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values from the query blocks from `start` to `end`."""
    for first in range(start, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        i = rows + keys - queries
        near, far = k, k
        if NEAR:
            near = _load(q, rows, 0, queries, D, DP)
        if FAR:
            far = _load(far_q, rows, 0, queries, D, DP)
        grad = _load(by_out, rows, 0, queries, E, EP)
        whole = tl.load(lse + rows, mask=rows < queries, other=float("inf"))
        drop = tl.load(delta + rows, mask=rows < queries, other=0.0)
        score = _scores(near, k, far, far_k, i, j, keys, window, NEAR, FAR, UPCAST)
        weight = tl.exp(score - whole[:, None])
        by_v += _dot(tl.trans(weight.to(grad.dtype)), grad, UPCAST)
        by_score = weight * (_dot(grad, tl.trans(values), UPCAST) - drop[:, None])
        is_far = i[:, None] - j[None, :] >= window
        if NEAR:
            part = by_score
            if FAR:
                part = tl.where(is_far, 0.0, by_score)
            by_k += _dot(tl.trans(part.to(grad.dtype)), near, UPCAST)
        if FAR:
            part = by_score
            if NEAR:
                part = tl.where(is_far, by_score, 0.0)
            by_far_k += _dot(tl.trans(part.to(grad.dtype)), far, UPCAST)
    return by_k, by_far_k, by_v


@triton.jit
def backward_keys(
    q, k, v, far_q, far_k, by_out, lse, delta, by_k, by_far_k, by_v,
    heads, groups, queries, keys, near_start, window,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """by_k, by_far_k and by_v of BLOCK keys of one key head, over all of its query heads."""
    block, of = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k, by_k = k + of * (keys - near_start) * D, by_k + of * (keys - near_start) * D
    far_k, by_far_k = far_k + of * keys * D, by_far_k + of * keys * D
    v, by_v = v + of * keys * E, by_v + of * keys * E
    j = block * BLOCK + tl.arange(0, BLOCK)
    near_keys = _load(k, j, near_start, keys, D, DP)
    far_keys = _load(far_k, j, 0, keys, D, DP)
    values = _load(v, j, 0, keys, E, EP)
    # Query rows count from the position of row 0.
    row_first = block * BLOCK - (keys - queries)
    row_last = row_first + BLOCK - 1
    start = tl.maximum(row_first, 0) // ROWS * ROWS
    all_near = tl.maximum(row_first + window, 0) // ROWS * ROWS
    all_far = (tl.maximum(row_last + window, 0) + ROWS - 1) // ROWS * ROWS
    all_near = tl.minimum(tl.maximum(all_near, start), queries)
    all_far = tl.minimum(tl.maximum(all_far, start), queries)
    near_sum = tl.zeros([BLOCK, DP], tl.float32)
    far_sum = tl.zeros([BLOCK, DP], tl.float32)
    value_sum = tl.zeros([BLOCK, EP], tl.float32)
    ratio = heads // groups
    for member in range(ratio):
        one = of // groups * heads + of % groups * ratio + member
        rows_q, rows_far = q + one * queries * D, far_q + one * queries * D
        rows_out, rows_lse = by_out + one * queries * E, lse + one * queries
        rows_delta = delta + one * queries
        near_sum, far_sum, value_sum = _key_sums(
            near_sum, far_sum, value_sum, rows_q, rows_far, near_keys, far_keys, values,
            rows_out, rows_lse, rows_delta, j, start, all_near, queries, keys, window,
            D, E, DP, EP, ROWS, True, False, UPCAST,
        )  # fmt: skip
        near_sum, far_sum, value_sum = _key_sums(
            near_sum, far_sum, value_sum, rows_q, rows_far, near_keys, far_keys, values,
            rows_out, rows_lse, rows_delta, j, all_near, all_far, queries, keys, window,
            D, E, DP, EP, ROWS, True, True, UPCAST,
        )  # fmt: skip
        near_sum, far_sum, value_sum = _key_sums(
            near_sum, far_sum, value_sum, rows_q, rows_far, near_keys, far_keys, values,
            rows_out, rows_lse, rows_delta, j, all_far, queries, queries, keys, window,
            D, E, DP, EP, ROWS, False, True, UPCAST,
        )  # fmt: skip
    _store(by_k, j, near_start, keys, near_sum, D, DP)
    _store(by_far_k, j, 0, keys, far_sum, D, DP)
    _store(by_v, j, 0, keys, value_sum, E, EP)
