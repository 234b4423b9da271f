"""What kernels give beside the output: statistics to an observer, log-sum-exp with gradients."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from normattn import InputError, Score, attention
from normattn.kernels import AttentionInputs, AttentionMask, attend, merge_by_lse, tiled
from normattn.kernels.dispatch import choose, run_kernel
from normattn.kernels.stats import Observation, Observer, observing
from score.cases import documents, drawn, tensors
from score.oracle import places
from thorough import half_of

from . import problems
from .problems import ADDED, CHANGES, MASKS, S, T, leaves_of, logits_of, make_inputs

B, D = 2, 8
KINDS = ("causal", "not causal", "window and first keys", "padding", "added", "irregular")
kinds_and_changes = pytest.mark.parametrize(("kind", "change"), half_of(KINDS, CHANGES))
# Each change alone, and each way to hide keys.
CASES = [*(("causal", change) for change in CHANGES[:-1]), ("window", "plain"), ("added", "plain")]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "ROWS", 4)
    monkeypatch.setattr(tiled, "TILE_BYTES", 2000)


def inputs_of(kind: str, change: str, **more: Any) -> AttentionInputs:
    return make_inputs(T, S, change, **MASKS[kind], **more)


def score_of(p: AttentionInputs) -> Tensor:
    """The logits of every pair and the sink, by formula; −∞ where a key is hidden."""
    score = p.q @ p.k.repeat_interleave(2, 1).mT
    if p.far_q is not None and p.far_k is not None and p.far_from is not None:
        far = p.far_q @ p.far_k.repeat_interleave(2, 1).mT
        score = torch.where(p.mask.query[:, None] - p.mask.key >= p.far_from, far, score)
    return logits_of(p, score)


def lse_of(score: Tensor) -> Tensor:
    """ln Σ exp, −∞ without any term, where autograd's own rule gives NaN."""
    nothing = (score == -torch.inf).all(-1)
    return score.masked_fill(nothing[..., None], 0.0).logsumexp(-1).masked_fill(nothing, -torch.inf)


def entropy_of(weight: Tensor) -> Tensor:
    """−Σ α ln α, what is missing to 1 being the sink's."""
    total = weight.sum(-1, keepdim=True)
    rest = torch.where((total == 0) | (total > 1 - 1e-13), 0.0, 1 - total)
    entropy: Tensor = torch.special.entr(torch.cat((weight, rest), -1)).sum(-1)
    return entropy


def assert_close(ours: Tensor, expected: Tensor, where: str = "") -> None:
    problems.assert_all_close([ours], [expected], 1e-9, where)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@kinds_and_changes
def test_the_log_sum_exp_and_its_gradients(kind: str, change: str, backend: str) -> None:
    inputs = inputs_of(kind, change)
    leaves = [x for x in leaves_of(inputs) if x is not inputs.v]
    (out, lse), expected = run_kernel(inputs, backend, lse=True), lse_of(score_of(inputs))
    assert lse is not None
    torch.testing.assert_close(out, attend(inputs, backend), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lse, expected, rtol=1e-11, atol=1e-11)
    some = expected > -torch.inf
    along = torch.randn(int(some.sum()), dtype=torch.float64)
    mine = torch.autograd.grad((lse[some] * along).sum(), leaves, retain_graph=True)
    hers = torch.autograd.grad((expected[some] * along).sum(), leaves)
    torch.testing.assert_close(mine, hers, rtol=1e-10, atol=1e-10)
    # Beside the gradient of the output it is added.
    both = torch.autograd.grad(out.sum() + (lse[some] * along).sum(), leaves, retain_graph=True)
    alone = torch.autograd.grad(out.sum(), leaves)
    for total, one, other in zip(both, mine, alone, strict=True):
        torch.testing.assert_close(total, one + other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("split", [0, 3, 9, S])
def test_two_shards_of_keys_merged(split: int, backend: str) -> None:
    """Outputs and all gradients, a shard without keys and rows that see none in one included."""
    whole = inputs_of("causal", "cap")
    parts: list[Any] = []
    for keys in (slice(0, split), slice(split, S)):
        mask = replace(whole.mask, key=whole.mask.key[keys], aligned=False)
        shard = replace(whole, k=whole.k[:, :, keys], v=whole.v[:, :, keys], mask=mask)
        parts += run_kernel(shard, backend, lse=True)
    found = [merge_by_lse(*parts), run_kernel(whole, "reference", lse=True)]
    torch.testing.assert_close(*found)
    losses = [out.square().sum() + lse.sum() for out, lse in found]  # type: ignore[union-attr]
    torch.testing.assert_close(*(torch.autograd.grad(x, leaves_of(whole)) for x in losses))


def test_it_is_chosen_by_who_gives_it_and_refused_in_words() -> None:
    inputs = inputs_of("causal", "plain")
    assert choose(replace(inputs, q=inputs.q[:, :, -1:]), lse=True).name == "chunked"
    for backend in ("fused", "strips", "two-regime"):
        with pytest.raises(InputError, match=f"the {backend} kernel cannot serve this"):
            run_kernel(inputs, backend, lse=True)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("sink", ["", "-Sink"])
def test_attention_returns_the_log_sum_exp_with_its_gradient(sink: str, backend: str) -> None:
    q, k, v = tensors(*[(B, 2, T, D)] * 3)
    score = Score(f"Baseline-NoPE{sink}", 2, D).double()
    out, lse = attention(q, k, v, score, backend=backend, return_lse=True)
    torch.testing.assert_close(out, attention(q, k, v, score, backend=backend))
    plain = replace(make_inputs(T, T), q=q / D**0.5, k=k, v=v, sink=score.sink)
    expected, leaves = logits_of(plain, plain.q @ k.mT).logsumexp(-1), (q, k, *score.parameters())
    torch.testing.assert_close(lse, expected, rtol=1e-10, atol=1e-10)
    along = torch.randn_like(expected)
    mine, hers = (torch.autograd.grad(x, leaves, along) for x in (lse, expected))
    torch.testing.assert_close(mine, hers, rtol=1e-9, atol=1e-9)


@dataclass
class Notes(Observer):
    """Observations put together to whole rows; functions of distance, if any, are asked for."""

    asked: Tensor | None = None
    seen: list[tuple[AttentionInputs, Observation]] = field(default_factory=list)
    rows: list[tuple[slice, Tensor | None]] = field(default_factory=list)
    owners: list[object] = field(default_factory=list)

    def enter_layer(self, owner: Any, q: Tensor, k: Tensor, padding: Any, positions: Any) -> None:
        self.owners.append(owner)

    def select_rows(self, rows: slice, members: Tensor | None) -> None:
        self.rows.append((rows, members))

    def distance_functions(self, inputs: AttentionInputs) -> Tensor | None:
        return self.asked

    def record(self, inputs: AttentionInputs, observation: Observation) -> None:
        self.seen.append((inputs, observation))

    def whole(self, name: str, shape: torch.Size) -> Tensor:
        """A field of all rows, (…, B, H, T), the last three of the given shape."""
        whole, rows = torch.zeros(()), self.rows or [(slice(0, shape[-1]), None)]
        for (place, own), (_, observation) in zip(rows, self.seen, strict=True):
            value = getattr(observation, name)
            if whole.dim() == 0:
                whole = value.new_zeros(*value.shape[:-3], *shape[-3:])
            keep = torch.tensor(True) if own is None else own.reshape(-1, 1, own.shape[-1])
            whole[..., place] = torch.where(keep, value, whole[..., place])
        return whole


@pytest.mark.parametrize("backend", ["auto", "strips"])
@kinds_and_changes
def test_statistics_by_formula(kind: str, change: str, backend: str) -> None:
    """0 and −∞ for a query that sees no key; the output is what it is without them."""
    inputs = inputs_of(kind, change)
    notes = Notes(torch.arange(float(S), dtype=torch.float64)[None])
    with observing(notes):
        out = attend(inputs, backend)
    torch.testing.assert_close(out, attend(inputs, backend), rtol=1e-11, atol=1e-12)
    found, score = notes.seen[0][1], score_of(inputs)
    keys, seen = score[..., :S], score[..., :S] > -torch.inf
    weight = torch.where(seen.any(-1, keepdim=True), score.softmax(-1), 0.0)
    apart = (inputs.mask.query[:, None] - inputs.mask.key).abs()
    expected = {
        "lse": torch.where(seen.any(-1), lse_of(score), -torch.inf),
        "largest": keys.amax(-1),
        "entropy": entropy_of(weight),
        "first": weight[..., 0],
        "visible": seen.sum(-1),
        "mean": (weight[..., :S] * apart).sum(-1)[None],
    }
    if inputs.sink is not None:
        expected["sink"] = weight[..., -1]
    for name, value in expected.items():
        assert_close(getattr(found, name).expand(value.shape), value, name)


# Every way in which a score takes part: folded, two regimes, blocks of rows, hidden keys, biases
# of both kinds, a sink, other normalisers, and what is handed on from row to row.
SCORES = (
    *("KNA", "CosA-logn@4", "QKBatchNorm", "KNA-ReRoPE(window=3)", "KNA-DynamicNTK@4"),
    *("KNA-StreamingLLM(window=4,sinks=1)-Sink", "KNA-DualChunk(size=3,local=2)-Sink"),
    *("Baseline-SlidingWindow(window=3)-Sink", "Baseline-Chunked(size=4)", "Baseline-ALiBi-Sink"),
    *("Baseline-FIRE@8", "QKRMSNorm-SoftCap-CoPE(positions=4)", "KNA-RoPE-FIRE-DynamicNTK@4"),
    *("Baseline-NoPE-Sigmoid@8", "Baseline-NoPE-StickBreaking", "Baseline-NoPE-Entmax"),
    *("Baseline-NoPE-Selective", "KNA-Selective"),
)
NUMBERS, PADDING = documents(B, 9, True)
OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "padding": {"key_padding": PADDING},
    "documents": {"documents": NUMBERS},
    "both": {"documents": NUMBERS, "key_padding": PADDING},
}


@pytest.mark.parametrize(("text", "given"), half_of(SCORES, [*OPTIONS]))
def test_statistics_are_those_of_the_weights(text: str, given: str) -> None:
    """The weights are read off by values that are unit vectors."""
    options = OPTIONS[given]
    if "documents" in options:
        if "Chunked" in text:
            return
        text = text.replace("@", "-Packed@") if "@" in text else f"{text}-Packed"
    q, k, v = (x.detach() for x in tensors((B, 3, 9, D), (B, 1, 9, D), (B, 1, 9, 5)))
    score = drawn(Score(text, 3, D, 1)).eval()
    spec = score.spec
    unit = torch.eye(9, dtype=q.dtype).expand(B, 1, 9, 9)
    asked = torch.stack((torch.arange(64) >= 4, torch.arange(64).sqrt())).double()
    padding, number = (options.get(name) for name in ("key_padding", "documents"))
    known = [None if x is None else x.numpy() for x in (padding, number)]
    at = torch.from_numpy(places(9, 9, B, known[0], None, None, known[1])[1])[:, None, None]
    distance = (at.mT - at).abs()
    for causal in (True, False):
        if (causal and spec.leaks_future) or (not causal and spec.needs_causal):
            continue
        rows = attention(q, k, unit, score, causal, **options).detach()
        seen, total = rows > 0, rows.sum(-1, keepdim=True)
        share = rows if spec.sink is not None else rows / total.clamp(min=1e-300)
        expected = {
            "entropy": entropy_of(share),
            "first": (share * (at == 0)).sum(-1),
            "mean": torch.stack([(share * function[distance]).sum(-1) for function in asked]),
        }
        if spec.normaliser is None:
            even = [(seen * function[distance]).sum(-1) for function in asked]
            expected["visible"] = seen.sum(-1)
            expected["even"] = torch.stack(even) / seen.sum(-1).clamp(min=1)
        elif given == "whole" and causal:
            hidden = torch.full((9, 9), -torch.inf).triu(1)
            expected["largest"] = (q @ k.mT / D**0.5 + hidden).amax(-1)
        if spec.sink is not None:
            expected["sink"] = torch.where(seen.any(-1), 1 - rows.sum(-1), 0.0)
        for backend in ("auto", "reference"):
            notes = Notes(asked)
            with observing(notes):
                out = attention(q, k, v, score, causal, backend=backend, **options)
            where = f"{text} by {backend}, causal {causal}"
            assert_close(out, attention(q, k, v, score, causal, backend=backend, **options), where)
            assert notes.owners == [score]
            for name, value in expected.items():
                assert_close(notes.whole(name, value.shape), value, f"{where}, {name}")


@pytest.mark.parametrize(("kind", "change"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_types(kind: str, change: str, dtype: torch.dtype) -> None:
    """Entropy as good as the scores are: of logits up to ±10, to 2 % of ln n in half precision."""
    inputs = inputs_of(kind, change, size=4, scale=3, dtype=dtype)
    if kind == "added":
        inputs = replace(inputs, mask=replace(inputs.mask, attn_mask=ADDED.to(dtype)))
    exact = problems.in_float64(inputs)
    if kind == "added":
        exact = replace(exact, mask=replace(inputs.mask, attn_mask=ADDED.to(dtype).double()))
    notes = Notes()
    with observing(notes):
        (_, lse), (_, true_lse) = (run_kernel(x, lse=True) for x in (inputs, exact))
    (_, found), (_, expected) = notes.seen
    error = 1e-5 if dtype == torch.float32 else 0.05
    pairs = [(getattr(found, x), getattr(expected, x)) for x in ("entropy", "largest", "first")]
    for ours, best in [*pairs, (found.lse, expected.lse), (lse, true_lse)]:
        assert ours is not None
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), best, rtol=error, atol=error)
    torch.testing.assert_close(lse, true_lse.float(), rtol=1e-5, atol=1e-5)  # type: ignore[union-attr]


@pytest.mark.parametrize(("kind", "change"), CASES)
def test_gradients_and_dropout_are_those_of_the_unobserved_kernel(kind: str, change: str) -> None:
    results = []
    for notes in (None, Notes()):
        inputs = replace(inputs_of(kind, change), dropout=0.3)
        torch.manual_seed(5)
        with nullcontext() if notes is None else observing(notes):
            results.append(problems.outputs_and_gradients(lambda p: attend(p, "chunked"), inputs))
        if notes is not None:
            assert not notes.seen[0][1].entropy.requires_grad
    for ours, plain in zip(*results, strict=True):
        assert torch.equal(ours, plain)


def test_looking_draws_no_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips after the first, and what is drawn afterwards, are as they are unobserved."""
    monkeypatch.setattr("normattn.kernels.reference.STRIP_BYTES", 1)
    q, k, v = tensors(*[(1, 2, T, D)] * 3)
    drawn, score = [], Score("Baseline-CoPE", 2, D).double()
    for on in (False, True):
        torch.manual_seed(5)
        with observing(Notes()) if on else nullcontext():
            out = attention(q, k, v, score, dropout_p=0.3)
        drawn.append((out, torch.rand(3)))
    assert all(torch.equal(one, other) for one, other in zip(*drawn, strict=True))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("way", ["auto", "concatenated", "reference"])
def test_residual_scores(way: str, mean: bool, causal: bool) -> None:
    """Every layer's softmax is that of the sum of the products so far, or of their mean."""
    layers, notes, total = (
        problems.make_layers(rows=7, keys=7, causal=causal),
        Notes(),
        torch.zeros(()),
    )
    with observing(notes):
        outs = problems.run_layers(layers, way, mean)
    for number, (p, out, (_, found)) in enumerate(zip(layers, outs, notes.seen, strict=True), 1):
        total = total + p.q @ p.k.repeat_interleave(2, 1).mT
        score = logits_of(p, total / (number if mean else 1))
        assert_close(out, score.softmax(-1) @ p.v.repeat_interleave(2, 1), way)
        assert_close(found.entropy, entropy_of(score.softmax(-1)), way)
        assert_close(found.first, score.softmax(-1)[..., 0], way)
        assert_close(found.largest, score.amax(-1), way)


@pytest.mark.parametrize("keys", [0, 1])
def test_a_single_key_and_no_keys_at_all(keys: int) -> None:
    inputs = make_inputs(1, 1, batch=1, heads=1, groups=1, learned=False)
    mask = AttentionMask(False, torch.arange(1), torch.arange(keys), aligned=True)
    inputs = replace(inputs, k=inputs.k[:, :, :keys], v=inputs.v[:, :, :keys], mask=mask)
    notes = Notes()
    with observing(notes):
        attend(inputs)
    found = notes.seen[0][1]
    assert (int(found.visible), float(found.entropy), float(found.first)) == (keys, 0, keys)


def test_nobody_is_told_afterwards() -> None:
    notes = Notes()
    with observing(notes), pytest.raises(ZeroDivisionError):
        raise ZeroDivisionError
    attend(inputs_of("causal", "plain"))
    assert not notes.seen
