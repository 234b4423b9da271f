"""The page of families is what their tiny models say; no method is taken without its effect."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import normattn
from normattn import InputError

from .families import build as build_llama
from .families import logits
from .matrix import PAGE, SERVED, read_page, row, score_line, score_row, tokens
from .tiny import build

# One for each way of rotating, and for each kind of refusal.
SAMPLE = (
    "phimoe",  # recomputes its frequencies
    "deepseek_v2",  # complex numbers, and the last features turn
    "gemma3",  # of two parts
    "gemma4_text",  # zero frequencies
    "gemma3n_text",  # keys of other layers
    "hunyuan_v1_dense",  # norms with a gain after the rotation
    "nanochat",  # turns the other way
    "granitemoehybrid",  # beside layers without attention
    "exaone4",  # no positions where it sees everything
    "zamba2",  # shared attention layers, with layer_idx −1
    "axk2",  # an indexer
    "gptj",  # attention of its own
)


@pytest.mark.parametrize("family", SAMPLE)
def test_the_page_says_what_the_model_does(family: str) -> None:
    chosen = ("YaRN", "LeakyReRoPE", "logn+")
    on_page = read_page()[family]
    assert row(family, chosen) == {name: on_page[name] for name in chosen}


def test_the_page_is_whole() -> None:
    rows = read_page()
    assert "WRONG" not in str(rows)
    least = {"YaRN": 109, "DynamicNTK": 109, "ReRoPE": 111, "SelfExtend": 111, "logn+": 121}
    for name, count in least.items():
        assert sum(each[name] == SERVED for each in rows.values()) >= count, name
    assert len(rows) >= 130


SCORED = (
    "llama",
    "phi3",  # joined projections
    "deepseek_v3",  # latent keys
    "afmoe",  # a gate
    "glm_moe_dsa",  # an indexer
    "axk2",  # with a gate on the logits of each head
    "laguna",  # a gate of another kind
    "doge",  # a mask of its own
    "qwen4_exp_text",  # one of blocks
    "diffllama",  # not read
    "gemma4_text",
    "deepseek_v4",
)


def test_the_page_says_which_score_a_family_has() -> None:
    written = PAGE.read_text(encoding="utf-8")
    families, read = re.findall(r"Of (\d+)\s+families,\s+(\d+)\s+are identified", written)[0]
    assert int(families) >= 130
    assert int(read) >= 115
    for family in SCORED:
        assert score_line(family, score_row(family)) in written


@pytest.mark.parametrize("family", ["granite_swa", "granitemoe_swa"])
def test_each_layer_keeps_a_base_of_its_own(family: str) -> None:
    types = ["full_attention", "full_attention"]
    model, ids = build(family, layer_rope_theta=[1e2, 1e6], layer_types=types), tokens()
    as_trained = logits(model, ids)
    with normattn.extend(model, "LeakyReRoPE", window=4, s=1.0):
        torch.testing.assert_close(logits(model, ids), as_trained, rtol=0, atol=1e-4)
    with normattn.extend(model, "ABF", base=1e6) as extension:
        assert extension.resolved.extended == (0, 1)
        found = logits(model, ids)
    # The second layer has that base already: all of the effect is the first one's.
    other = build(family, layer_rope_theta=[1e6, 1e6], layer_types=types)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(found, logits(other, ids), rtol=0, atol=1e-4)


def _stubborn(own: Any) -> Any:
    """Turns by the embeddings of its first call, whichever it is given that turn."""
    kept: list[Any] = []

    def forward(self: Any, hidden_states: Tensor, position_embeddings: Any, **more: Any) -> Any:
        if bool(position_embeddings[1].any()):
            kept.append(position_embeddings)
            rows = hidden_states.shape[1]
            position_embeddings = tuple(each[:, :rows] for each in kept[0])
        return own(self, hidden_states, position_embeddings, **more)

    return forward


def _narrow(own: Any) -> Any:
    """Takes no mask but one of truth values or numbers to add."""

    def forward(self: Any, hidden_states: Tensor, attention_mask: Any = None, **more: Any) -> Any:
        if self.config._attn_implementation.startswith("normattn"):
            attention_mask = attention_mask.float().log().expand(-1, -1, 3, -1)
        return own(self, hidden_states, attention_mask=attention_mask, **more)

    return forward


@pytest.mark.parametrize(
    ("forward", "method", "reason"),
    [
        (_stubborn, "YaRN(factor=4)", "does not get the positions"),
        (_narrow, "ReRoPE(window=3)", "its forward( then)? fails"),
    ],
)
def test_what_has_no_effect_or_breaks_is_refused(forward: Any, method: str, reason: str) -> None:
    model, ids = build_llama("Llama"), tokens(9, 1)
    first, other = (layer.self_attn for layer in model.model.layers)
    kind = type(other)
    other.__class__ = type("OtherAttention", (kind,), {"forward": forward(kind.forward)})
    as_trained, before, config = logits(model, ids), dict(first.__dict__), model.config
    with pytest.raises(InputError, match=reason):
        normattn.extend(model, method)
    assert model.config is config
    assert first.__dict__ == before
    assert torch.equal(logits(model, ids), as_trained)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_an_indexer_selects_as_trained(family: str) -> None:
    model, ids = build(family), tokens()
    selected: list[Tensor] = []
    layer = model.model.layers[0].self_attn
    hook = layer.indexer.register_forward_hook(lambda *given: selected.append(given[2].sort(-1)[0]))
    logits(model, ids)
    with normattn.extend(model, "ReRoPE", window=4):
        logits(model, ids)
    hook.remove()
    assert torch.equal(selected[0], selected[-1])


@pytest.mark.parametrize("method", ["DualChunk(size=9,local=4)", "logn+"])
def test_padding_on_the_left_does_not_count_where_a_layer_chooses(method: str) -> None:
    """Places come from the mask before the layer chose, as the model gives no position_ids."""
    model, ids = build("doge"), tokens()
    padded = torch.nn.functional.pad(ids, (5, 0))
    with normattn.extend(model, method):
        found = logits(model, padded, attention_mask=(padded > 0).long())
        torch.testing.assert_close(found[:, 5:], logits(model, ids), rtol=1e-4, atol=1e-4)
