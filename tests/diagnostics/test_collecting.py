"""Collected sums against plain matrices; names, probes and inspections; nothing stays behind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from data.helpers import make_split
from normattn.errors import InputError
from normattn.kernels.cosines import BINS
from normattn.lab.data.batches import Masking
from normattn.lab.data.windows import masked_set
from normattn.lab.diagnostics import DiagnosticsProbe, collecting, inspect_model, layer_names
from normattn.lab.diagnostics.attention import attention_weights
from normattn.lab.diagnostics.collector import unseen_angles
from normattn.lab.diagnostics.depth import SAMPLED, layer_gradients, measure_depth
from normattn.lab.diagnostics.inspection import by_position, cosine_counts, totals
from normattn.lab.diagnostics.lines import DiagnosticsLine, read_diagnostics
from normattn.lab.evaluation.masked import documents_of
from normattn.layers.attention import Attention
from normattn.models import CausalLM, CausalLMConfig, MaskedLM, MaskedLMConfig
from normattn.score import Score, ScoreSpec

L = 8


def model_of(score: str = "Baseline", **changes: Any) -> CausalLM:
    torch.manual_seed(1)
    fields: dict[str, Any] = {"vocab_size": 40, "dim": 16, "layers": 3, "heads": 4, "kv_heads": 2}
    model = CausalLM(CausalLMConfig(**{**fields, "train_length": L, "score": score, **changes}))
    return model.double()


def ids_of(rows: int, length: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(40, size=(rows, length)))


SPANS = [slice(first, first + 4) for first in (0, 4, 8)]
BEHIND = torch.arange(12)[:, None] - torch.arange(12)


@pytest.mark.parametrize("score", ["Baseline", "KNA-logn", "Baseline-ALiBi", "Baseline-RealFormer"])
def test_means_by_head_and_position(score: str) -> None:
    model, ids = model_of(score), ids_of(3, 12)
    measured = inspect_model(model, ids, bins=3, tokens_per_batch=12)
    bins = measured.select("bin", "bin_end").unique().sort("bin").rows()
    assert bins == [(0, 4), (4, 8), (8, 12)]
    texts = [list(attention_weights(model, row).values()) for row in ids]
    far = BEHIND >= L
    for layer in range(3):
        alpha = torch.stack([text[layer] for text in texts]).double()
        entropy = -torch.special.xlogy(alpha, alpha).sum(-1)
        share = entropy / torch.arange(1, 13).double().log()
        for place, rows in enumerate(SPANS):
            several = slice(max(rows.start, 1), rows.stop)
            beyond = (far[rows].sum(-1) / torch.arange(1, 13)[rows]).mean()
            means = {
                "entropy": entropy[:, :, rows].mean((0, 2)),
                "entropy_share": share[:, :, several].mean((0, 2)),
                "first_mass": alpha[:, :, rows, 0].mean((0, 2)),
                "beyond_mass": (alpha * far)[:, :, rows].sum(-1).mean((0, 2)),
                "beyond_share": beyond.expand(4),
            }
            for field, expected in means.items():
                found = by_position(measured, field, layer)[:, place]
                # Weights are looked at in float32.
                np.testing.assert_allclose(found, expected, atol=1e-6, err_msg=field)
            assert totals(measured, "entropy", layer)[1][:, place].tolist() == [12] * 4


@pytest.mark.parametrize(
    "score",
    ["KNA", "QKRMSNorm", "Baseline-ALiBi", "Baseline-RealFormer", "Baseline-ReRoPE(window=4)"],
)
def test_norms_and_cosines_by_position(score: str) -> None:
    """Under any kernel each bin's are those of the queries and keys that stand in it."""
    model, ids = model_of(score), ids_of(2, 12)
    measured = inspect_model(model, ids, cosines=True, bins=3, tokens_per_batch=12)
    given: list[tuple[Tensor, Tensor]] = []
    prepared: list[Any] = []
    for module in model.modules():
        if isinstance(module, Score):
            module.register_forward_hook(lambda m, x, out: given.append((x[0], x[1])))
            module.register_forward_hook(lambda m, x, out: prepared.append(out))
    with torch.no_grad():
        model(ids)
    for layer, ((q, k), out) in enumerate(zip(given, prepared, strict=True)):
        for field, x in (("q_norm", q), ("k_norm", k)):
            expected = torch.stack([x[:, :, s].norm(dim=-1).mean((0, 2)) for s in SPANS], -1)
            norms = by_position(measured, field, layer)
            assert norms == pytest.approx(expected.numpy(), abs=1e-6)
        both = [(out.q, out.k)] + ([] if out.far_q is None else [(out.far_q, out.far_k)])
        one = [[nn.functional.normalize(x, dim=-1) for x in pair] for pair in both]
        cosine = [x @ y.repeat_interleave(2, 1).transpose(-1, -2) for x, y in one]
        near = cosine[0] if out.far_q is None else torch.where(BEHIND < 4, cosine[0], cosine[1])
        counts = cosine_counts(measured, layer)
        ends = [by_position(measured, f"{end}_cosine", layer) for end in ("least", "largest")]
        for head in range(4):
            for place, span in enumerate(SPANS):
                values = near[:, head, span][:, BEHIND[span] >= 0].flatten()
                assert ends[0][head, place] == pytest.approx(float(values.min()), abs=1e-9)
                assert ends[1][head, place] == pytest.approx(float(values.max()), abs=1e-9)
                cut = np.histogram(values.numpy(), BINS, (-1, 1))[0]
                assert np.abs(counts[head, place] - cut).sum() <= 2  # a value at an edge


def test_padding_counts_for_nothing() -> None:
    model, ids = model_of("QKRMSNorm"), ids_of(1, 9)
    with torch.no_grad(), collecting(model) as alone:
        model(ids)
    padded = torch.cat((torch.zeros(1, 4, dtype=torch.int64), ids), 1)
    padding = (torch.arange(13) < 4)[None]
    with torch.no_grad(), collecting(model) as beside:
        model(padded, key_padding=padding)
    for name, line in alone.lines().items():
        found = beside.lines()[name].model_dump()
        for field, values in line.model_dump().items():
            assert found[field] == values or found[field] == pytest.approx(values, abs=1e-10)


@pytest.mark.parametrize("method", ["", "DynamicNTK", "ReRoPE"])
def test_a_cache_is_looked_at_alike(method: str) -> None:
    """A text read in chunks of 5 and of 1 shows what it shows when it is read whole."""
    model, ids = model_of("Baseline").eval(), ids_of(2, 21)
    with torch.no_grad(), model.using(method or "as is"):
        with collecting(model, (0, 7, 21)) as whole:
            model(ids)
        with collecting(model, (0, 7, 21)) as parts:
            cache = model.new_cache()
            for start, stop in ((0, 5), (5, 6), (6, 20), (20, 21)):
                model(ids[:, start:stop], cache=cache)
    ours, expected = parts.measured(), whole.measured()
    for layer in range(3):
        for field in ("entropy", "largest", "lse", "first_mass", "q_norm", "k_norm"):
            found = np.stack(totals(ours, field, layer))
            assert found.any((1, 2)).all()
            whole_text = np.stack(totals(expected, field, layer))
            np.testing.assert_allclose(found, whole_text, atol=1e-7, err_msg=field)


def test_nothing_stays_behind() -> None:
    model, ids = model_of("QKLayerNorm"), ids_of(1, 6)

    def state() -> list[tuple[bool, int, int]]:
        modules = model.modules()
        return [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in modules]

    before, plain = state(), model(ids)
    inspect_model(model, ids)
    assert state() == before
    assert torch.equal(model(ids), plain)


def test_bad_input() -> None:
    with pytest.raises(InputError, match="no Score"):
        inspect_model(nn.Linear(2, 2), ids_of(1, 3))
    with pytest.raises(InputError, match="must be token ids"):
        inspect_model(model_of(), torch.zeros(0, 3, dtype=torch.int64))
    with pytest.raises(InputError, match="no layer of the model ran"):
        inspect_model(model_of(), ids_of(1, 3), read=lambda ids: None)
    with pytest.raises(InputError, match="1 to 512 tokens"):
        attention_weights(model_of(), torch.zeros(600, dtype=torch.int64))


@pytest.mark.parametrize(
    ("text", "distances"),
    [
        ("Baseline", 12),
        ("Baseline-RoPE(direction=backward)", 12),
        ("Baseline-PI(factor=2)", 20),
        ("Baseline-ReRoPE(window=3)", 40),
    ],
)
def test_unseen_angles(text: str, distances: int) -> None:
    """By the definition: pair m has seen θ_m·r, r < L, or the whole circle."""
    spec = ScoreSpec.parse(text, train_length=L).resolve(train_length=L)
    found = unseen_angles(spec, 8, distances)
    assert found is not None
    for r in range(distances):
        rho = r / 2 if "PI" in text else min(r, 3) if "ReRoPE" in text else r
        new = 0
        for theta in (10000 ** (-m / 4) for m in range(4)):
            most, angle = theta * (L - 1), math.fmod(theta * rho, 2 * math.pi)
            new += most < 2 * math.pi and angle > most * (1 + 1e-6)
        assert float(found[r]) == new / 4
    assert unseen_angles(ScoreSpec.parse("Baseline-NoPE", train_length=L), 8, 9) is None


def test_angles_that_another_score_was_trained_with() -> None:
    """PI by 4 has seen at 4 L what the ordinary rotation has at L."""

    def scored(text: str) -> ScoreSpec:
        return ScoreSpec.parse(text, train_length=L).resolve(train_length=L)

    def first(spec: ScoreSpec, trained: ScoreSpec) -> int:
        new = unseen_angles(spec, 8, 100, trained=trained)
        assert new is not None
        return next((r for r in range(100) if new[r] > 0), 100)

    plain, stretched = scored("Baseline"), scored("Baseline-PI(factor=4)")
    assert first(plain, plain) == first(stretched, stretched) == L
    # Trained with PI at L, a pair has turned a quarter as far, read as it is as with PI.
    assert first(plain, stretched) == (L - 1) // 4 + 1
    assert first(stretched, plain) == 4 * (L - 1) + 1


@pytest.mark.parametrize(
    ("score", "layer"), [("FullEvery(every=2,window=4,stretch=8)", 1), ("PI(factor=8)", 0)]
)
def test_a_spectrum_that_was_trained_in_is_no_method(score: str, layer: int) -> None:
    """Both pairs turn an eighth as far, so neither goes round: from L on every angle is new."""
    measured = inspect_model(model_of(f"Baseline-{score}"), ids_of(1, 2 * L), bins=2 * L)
    new, beyond = (by_position(measured, f"{name}_share", layer) for name in ("angle", "beyond"))
    assert beyond[:, L:].min() > 0
    np.testing.assert_allclose(new, beyond)


def probed(model: CausalLM, probe: DiagnosticsProbe, step: int, ids: Tensor) -> Mapping[str, Any]:
    assert probe.due(step, 10)
    with probe.around(SimpleNamespace(model=model), step) as read:
        model.loss(ids).loss.backward()  # type: ignore[no-untyped-call]
    return read()


def test_a_probe_leaves_lines_and_changes_nothing(tmp_path: Path) -> None:
    model, ids = model_of(), ids_of(2, 300)
    model.loss(ids).loss.backward()  # type: ignore[no-untyped-call]
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    line = probed(model, DiagnosticsProbe(5, warn=pytest.fail), 1, ids)
    for ours, expected in zip(model.parameters(), plain, strict=True):
        # Tiles, which can be read, take the place of torch's kernel: the same but for rounding.
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad, expected, rtol=1e-10, atol=1e-12)
    found = DiagnosticsLine.model_validate({"step": 1, **line})
    assert list(found.layers) == list(next(zip(*layer_names(model).values(), strict=True)))
    largest = [value for layer in found.layers.values() for value in layer.largest]
    assert len(largest) == 12
    assert found.largest == max(value for value in largest if value is not None)
    path = tmp_path / "diagnostics.jsonl"
    path.write_text(found.model_dump_json() + '\n{"step": 2, "lay')
    assert read_diagnostics(tmp_path) == [found]
    path.write_text('{"step": 2}\n')
    with pytest.raises(InputError, match="not a line of diagnostics"):
        read_diagnostics(tmp_path)


def test_a_warning_comes_once() -> None:
    said: list[str] = []
    probe, model, ids = DiagnosticsProbe(1, warn=said.append), model_of("QKNorm2020"), ids_of(2, 60)
    scores = [module for module in model.modules() if isinstance(module, Score)]
    for scale, step in ((1e-6, 1), (1e5, 2), (1e5, 3)):
        for score in scores:
            assert score.scale is not None
            score.scale.data.fill_(scale)
        probed(model, probe, step, ids)
    [warning] = said
    assert "scores concentrate at step 2" in warning
    assert "blocks." in warning


# What changes with depth, against plain matrices made from the model's own weights.
LENGTH = 24
SPLIT = make_split([60, 30, 90])
TEXTS = masked_set(SPLIT, LENGTH, Masking(), 200, max_windows=5, seed=1)


def masked_model(**changes: Any) -> MaskedLM:
    values: dict[str, Any] = {"vocab_size": 200, "dim": 16, "layers": 4, "heads": 2}
    values |= {"train_length": LENGTH, "placement": "PostLN", "exits": True, "dropout": 0.2}
    values |= {"score": "Baseline-NoPE"}
    torch.manual_seed(0)
    return MaskedLM(MaskedLMConfig(**{**values, **changes})).double()


def attention_of(model: MaskedLM, ids: Tensor, residual: bool) -> list[Tensor]:
    """The weights (B, H, T, T) of every layer, from hooks on what its attention reads."""
    read: list[Tensor] = []
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    handles = [each.register_forward_pre_hook(lambda m, x: read.append(x[0])) for each in layers]
    model.eval()
    with torch.no_grad():
        model.hidden(ids)
    model.train()
    for handle in handles:
        handle.remove()
    found, total = [], torch.zeros(())
    for x, layer in zip(read, layers * (len(read) // len(layers)), strict=True):
        q, k, _ = layer.qkv(x).chunk(3, -1)
        q, k = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in (q, k))
        score = q @ k.transpose(-1, -2) / 8**0.5
        total = total + score if residual else score
        found.append(total.softmax(-1).detach())
    return found


def expected_of(attention: list[Tensor]) -> dict[str, Tensor]:
    rows = np.linspace(0, LENGTH - 1, SAMPLED).astype(int)
    entropy = [-(a * a.log()).sum(-1).mean((1, 2)) for a in attention]
    pairs = list(pairwise(attention))
    near = [1 - 0.5 * (a - b).abs().sum(-1)[:, :, rows].mean((1, 2)) for a, b in pairs]
    means = [(a.mean(1), b.mean(1)) for a, b in pairs]
    mean = [1 - 0.5 * (a - b).abs().sum(-1)[:, rows].mean(1) for a, b in means]
    named = {"entropy": entropy, "agreement": near, "agreement_mean": mean}
    return {name: torch.stack(values, -1) for name, values in named.items()}


@pytest.mark.parametrize(
    ("score", "shared"),
    [("Baseline-NoPE", False), ("Baseline-NoPE-RealFormer", False), ("Baseline-NoPE", True)],
)
def test_against_plain_matrices(score: str, shared: bool) -> None:
    model = masked_model(score=score, shared_layers=shared)
    names, place = documents_of(TEXTS)
    ids = torch.from_numpy(TEXTS.rows.ids)
    found = measure_depth(model, TEXTS, place, tokens_per_batch=2 * LENGTH)
    expected = expected_of(attention_of(model, ids, "RealFormer" in score))
    outputs: list[Tensor] = []
    model.eval()
    with torch.no_grad():
        model.hidden(ids, after=lambda layer, x: outputs.append(x))
    expected["variance"] = torch.stack(
        [(x - x.mean(-1, keepdim=True)).square().mean((1, 2)) for x in outputs], -1
    )
    for name, each_text in expected.items():
        sums = np.zeros((len(names), each_text.shape[-1]))
        np.add.at(sums, place, each_text.numpy())
        np.testing.assert_allclose(found[name], sums, rtol=0, atol=1e-6, err_msg=name)


def test_gradients_are_those_of_the_loss() -> None:
    model = masked_model()
    found = layer_gradients(model, TEXTS, rows=3)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()
    for batch, rows in zip(found, (slice(0, 3), slice(3, 5)), strict=True):
        ids, places, targets = (torch.from_numpy(each[rows]) for each in TEXTS.rows)
        logits = torch.take_along_dim(model(ids), places[..., None], 1)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        for layer, norm in enumerate(batch):
            grads = torch.autograd.grad(
                loss, list(model.blocks[layer].parameters()), retain_graph=True
            )
            assert norm == pytest.approx(float(sum(g.square().sum() for g in grads)) ** 0.5)
    assert layer_gradients(masked_model(shared_layers=True), TEXTS, 3) == []
