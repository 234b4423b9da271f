"""DualChunk: the paper's own example, texts that are read as they were, and what is refused."""

from __future__ import annotations

import pytest
import torch

from kernels.memory import largest
from normattn import InputError, Score, ScoreSpec, attention, explain
from normattn.kernels import tiled
from normattn.lab.diagnostics.angles import unseen_angles
from score.cases import tensors

H, D = 2, 8
SHAPES = (2, H, 40, D), (2, 1, 40, D), (2, 1, 40, 5)


def test_the_example_of_the_paper() -> None:
    """s = 6, c = 10, w = 4, twelve tokens: figure 2 of arXiv 2402.17463."""
    rules = ScoreSpec.parse("Baseline-DualChunk(size=6,local=4)").chunk_remapping
    assert rules is not None
    assert rules.reach == 10
    place = torch.arange(12).double()
    assert rules.key_positions(place).tolist() == [0, 1, 2, 3, 4, 5] * 2
    own, next_to, further = (each[6:].tolist() for each in rules.query_positions(place))
    assert own == [0, 1, 2, 3, 4, 5]
    assert next_to == [6, 7, 8, 9, 9, 9]
    assert further == [9] * 6


def test_a_text_of_the_training_length_is_read_as_it_was() -> None:
    q, k, v = tensors(*SHAPES)
    spec = ScoreSpec.parse("KNA-DualChunk@40")
    assert str(spec) == "KNA-DualChunk(size=30,local=10)@40"
    torch.testing.assert_close(attention(q, k, v, spec), attention(q, k, v, "KNA"))
    longer = attention(q, k, v, "KNA-DualChunk@39")
    torch.testing.assert_close(longer[:, :, :39], attention(q, k, v, "KNA")[:, :, :39])
    assert not torch.allclose(longer[:, :, 39:], attention(q, k, v, "KNA")[:, :, 39:])


def test_no_angle_is_new_that_was_not_trained() -> None:
    found = {
        name: unseen_angles(ScoreSpec.parse(f"Baseline{name}@64"), D, 512, 3)
        for name in ("", "-DualChunk")
    }
    for new in found.values():
        assert new is not None
    assert found["-DualChunk"].max() == 0  # type: ignore[union-attr]
    assert found[""].max() > 0  # type: ignore[union-attr]


def test_no_tensor_holds_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a forward nor a backward; the reference shows that one would be noticed."""
    monkeypatch.setattr(tiled, "ROWS", 16)
    tokens, size = 512, 192
    q, k, v = tensors((2, H, tokens, D), (2, 1, tokens, D), (2, 1, tokens, D))
    for backend in ("auto", "reference"):
        with largest() as seen:
            out = attention(q, k, v, f"KNA-DualChunk(size={size},local=8)", backend=backend)
            torch.autograd.grad(out.sum(), [q, k, v])
        assert (seen.numel < 2 * H * size * tokens // 4) == (backend == "auto"), backend


def test_a_method_of_chunks_is_switched_on_and_off() -> None:
    score = Score("CosA-logn@16", H, D)
    score.use(ScoreSpec.parse("CosA-logn-DualChunk@16"))
    assert score.spec.method_name == "DualChunk"
    assert ScoreSpec.parse("KNA-DualChunk(size=4)@16").method_name == "DualChunk(size=4,local=12)"


def test_what_attention_refuses_and_explain_says() -> None:
    q, k, v = tensors(*SHAPES)
    with pytest.raises(InputError, match="needs size="):
        attention(q, k, v, "KNA-DualChunk")
    with pytest.raises(InputError, match="DualChunk is defined for causal attention only"):
        attention(q, k, v, "KNA-DualChunk@8", causal=False)
    told = explain("KNA-DualChunk@512", (1, 4, 2048, 64))
    assert told.kernel == "chunked"
    assert any("query rows in blocks of 384: DualChunk" in line for line in told.left)
    assert any("relative positions by chunks" in line for line in told.left)
