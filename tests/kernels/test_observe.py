"""What an observer gets: every kind of score, against the weights that attention itself has."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from normattn import Score, attention
from normattn.kernels import AttentionInputs, AttentionMask, attend, run_kernel, tiled
from normattn.kernels.residual_scores import ResidualScores
from normattn.kernels.stats import Observation, Observer, observing
from score.cases import documents, tensors
from thorough import half_of

from .problems import in_float64, make_inputs, outputs_and_gradients

B, H, G, T = 2, 3, 1, 9


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

    def whole(self, name: str) -> Tensor:
        """A field (…, B, H, T) of all rows."""
        if not self.rows:
            one: Tensor = getattr(self.seen[0][1], name)
            return one.expand(*one.shape[:-3], B, H, T)
        whole = torch.full((), torch.nan)
        for (rows, own), (_, observation) in zip(self.rows, self.seen, strict=True):
            value = getattr(observation, name)
            value = value.expand(*value.shape[:-3], B, H, rows.stop - rows.start)
            if whole.dim() == 0:
                whole = value.new_zeros(*value.shape[:-1], T)
            kept = whole[..., rows] if own is None else whole[..., rows].clone()
            keep = torch.tensor(True) if own is None else own.reshape(-1, 1, own.shape[-1])
            whole[..., rows] = torch.where(keep, value, kept)
        return whole


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
NUMBERS, PADDING = documents(B, T, True)
OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "padding": {"key_padding": PADDING},
    "documents": {"documents": NUMBERS},
    "both": {"documents": NUMBERS, "key_padding": PADDING},
}
both = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "ROWS", 4)


@pytest.mark.parametrize(("text", "given"), half_of(SCORES, [*OPTIONS]))
def test_statistics_are_those_of_the_weights(text: str, given: str) -> None:
    """The weights are read off by values that are unit vectors."""
    options = OPTIONS[given]
    if "documents" in options:
        if "Chunked" in text:
            return
        text = text.replace("@", "-Packed@") if "@" in text else f"{text}-Packed"
    q, k, v = (x.detach() for x in tensors((B, H, T, 8), (B, G, T, 8), (B, G, T, 5)))
    score = _drawn(Score(text, H, 8, G).double())
    spec = score.spec
    unit = torch.eye(T, dtype=q.dtype).expand(B, G, T, T)
    asked = torch.stack((torch.arange(64) >= 4, torch.arange(64).sqrt())).double()
    places = _places(options)
    distance = (places.mT - places).abs()
    for causal in (True, False):
        if (causal and spec.leaks_future) or (not causal and spec.needs_causal):
            continue
        score.eval()
        rows = attention(q, k, unit, score, causal, **options).detach()
        seen, total = rows > 0, rows.sum(-1, keepdim=True)
        share = rows if spec.sink is not None else rows / total.clamp(min=1e-300)
        for backend in ("auto", "reference"):
            notes = Notes(asked)
            with observing(notes):
                out = attention(q, k, v, score, causal, backend=backend, **options)
            where = f"{text} by {backend}, causal {causal}"
            assert_close(out, attention(q, k, v, score, causal, backend=backend, **options), where)
            assert notes.owners == [score]
            assert_close(notes.whole("entropy"), entropy_of(share), where)
            assert_close(notes.whole("first"), (share * (places == 0)).sum(-1), where)
            for number, function in enumerate(asked):
                mean = (share * function[distance]).sum(-1)
                assert_close(notes.whole("mean")[number], mean, where)
            if spec.normaliser is None:
                assert torch.equal(notes.whole("visible").expand(B, H, T), seen.sum(-1)), where
                for number, function in enumerate(asked):
                    even = (seen * function[distance]).sum(-1) / seen.sum(-1).clamp(min=1)
                    assert_close(notes.whole("even")[number].expand(B, H, T), even, where)
            elif given == "whole" and causal:
                logits = (q @ k.mT / 8**0.5) + torch.full((T, T), -torch.inf).triu(1)
                assert_close(notes.whole("largest"), logits.amax(-1), where)
            if spec.sink is not None:
                left = torch.where(seen.any(-1), 1 - rows.sum(-1), 0.0)
                assert_close(notes.whole("sink"), left, where)


def _drawn(score: Score) -> Score:
    """With other values of what it learns than at first."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in score.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return score


def _places(options: dict[str, Any]) -> Tensor:
    """The position of every key, counted by hand, (B, 1, 1, T)."""
    padding, number = options.get("key_padding"), options.get("documents")
    found = torch.zeros(B, T, dtype=torch.int64)
    for row in range(B):
        count = 0
        for j in range(T):
            if number is not None and j and number[row, j] != number[row, j - 1]:
                count = 0
            found[row, j] = count
            count += padding is None or not padding[row, j]
    return found[:, None, None]


def entropy_of(weight: Tensor) -> Tensor:
    """−Σ α ln α, what is missing to 1 being the sink's."""
    rest = (1 - weight.sum(-1, keepdim=True)).clamp(min=0.0)
    rest = torch.where(weight.sum(-1, keepdim=True) == 0, 0.0, rest)
    whole = torch.cat((weight, torch.where(rest > 1e-13, rest, 0.0)), -1)
    total: Tensor = torch.special.xlogy(whole, whole).sum(-1)
    return -total


def assert_close(ours: Tensor, expected: Tensor, where: str) -> None:
    torch.testing.assert_close(
        ours, expected, rtol=1e-9, atol=1e-10, msg=lambda text: f"{where}: {text}"
    )


ADDED = torch.randn(B, 4, 7, 9, generator=torch.Generator().manual_seed(2))
ADDED[0, :, 3] = -torch.inf
ADDED[1, 1, :, ::2] = -torch.inf
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{change: (change, {}) for change in ("plain", "two regimes", "bias", "cap", "sink")},
    "sliding": ("plain", {"window": 3}),
    "mask": ("plain", {"attn_mask": ADDED}),
}


def inputs_of(kind: str, dtype: torch.dtype = torch.float64) -> AttentionInputs:
    change, seen = KINDS[kind]
    seen = {name: x.to(dtype) if name == "attn_mask" else x for name, x in seen.items()}
    return make_inputs(7, 9, change, size=4, far_from=3, scale=3, dtype=dtype, **seen)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_types(kind: str, dtype: torch.dtype) -> None:
    """Entropy as good as the scores are: of logits up to ±10, to 2 % of ln n in half precision."""
    inputs = inputs_of(kind, dtype)
    exact, mask = in_float64(inputs), inputs.mask
    if mask.attn_mask is not None:
        exact = replace(exact, mask=replace(mask, attn_mask=mask.attn_mask.double()))
    notes = Notes()
    with observing(notes):
        (_, lse), (_, true_lse) = (run_kernel(x, lse=True) for x in (inputs, exact))
    (_, found), (_, expected) = notes.seen
    error = 1e-5 if dtype == torch.float32 else 0.05
    assert lse is not None
    assert true_lse is not None
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-5, atol=1e-5)
    for name in ("entropy", "largest", "lse", "first"):
        ours, best = getattr(found, name), getattr(expected, name)
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), best, rtol=error, atol=error)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_dropout_are_those_of_the_unobserved_kernel(kind: str) -> None:
    results = []
    for notes in (None, Notes()):
        inputs = replace(inputs_of(kind), dropout=0.3)
        torch.manual_seed(5)
        with nullcontext() if notes is None else observing(notes):
            results.append(outputs_and_gradients(lambda p: attend(p, "chunked"), inputs))
        if notes is not None:
            assert not notes.seen[0][1].entropy.requires_grad
    for ours, plain in zip(*results, strict=True):
        assert torch.equal(ours, plain)


def test_looking_draws_no_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips after the first, and what is drawn afterwards, are as they are unobserved."""
    monkeypatch.setattr("normattn.kernels.reference.STRIP_BYTES", 1)
    q, k, v = tensors((1, 2, T, 8), (1, 2, T, 8), (1, 2, T, 8))
    drawn, score = [], Score("Baseline-CoPE", 2, 8).double()
    for on in (False, True):
        torch.manual_seed(5)
        with observing(Notes()) if on else nullcontext():
            out = attention(q, k, v, score, dropout_p=0.3)
        drawn.append((out, torch.rand(3)))
    assert all(torch.equal(one, other) for one, other in zip(*drawn, strict=True))


@both
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("backend", ["auto", "concatenated", "reference"])
def test_residual_scores(backend: str, mean: bool, causal: bool) -> None:
    """Every layer's softmax is that of the sum of the products so far, or of their mean."""
    residual, notes, sums = ResidualScores(mean), Notes(), torch.zeros(())
    for layer in range(1, 4):
        shapes = (B, 4, 7, 4), (B, 2, 7, 4), (B, 2, 7, 3)
        q, k, v = (x.detach() for x in tensors(*shapes, seed=layer))
        sums = sums + q @ k.repeat_interleave(2, 1).mT
        inputs = replace(make_inputs(7, 7, causal=causal), q=q, k=k, v=v)
        score = sums / (layer if mean else 1)
        score = score.masked_fill(torch.ones(7, 7).triu(1).bool() & causal, -torch.inf)
        plain = torch.softmax(score, -1)
        with observing(notes):
            out = attend(replace(inputs, residual_scores=residual), backend)
        assert_close(out, plain @ v.repeat_interleave(2, 1), backend)
        found = notes.seen[-1][1]
        for name, expected in (
            ("entropy", entropy_of(plain)),
            ("first", plain[..., 0]),
            ("largest", score.amax(-1)),
        ):
            assert_close(getattr(found, name), expected, f"{backend}, {name}")


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
    attend(inputs_of("plain"))
    assert not notes.seen
