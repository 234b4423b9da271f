"""The page of families is what their tiny models say; no method is taken without its effect."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import normattn
from normattn import InputError

from . import score_page
from .families import build as build_llama
from .families import logits as logits_of
from .families import tokens as tokens_of
from .matrix import PAGE, SERVED, logits, read_page, row, tokens
from .tiny import LENGTH, build

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
    assert not [f"{family}: {said}" for family in rows for said in _wrong(rows[family])]
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
    "doge",  # a mask of its own
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
        assert score_page.line(family, score_page.row(family)) in written


def _wrong(answers: dict[str, str]) -> list[str]:
    return [said for said in answers.values() if "WRONG" in said]


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


def _patched(model: Any, forward: Any) -> Any:
    """The model with other attention code in its second layer."""
    layer = model.model.layers[1].self_attn
    kind = type("OtherAttention", (type(layer),), {"forward": forward(type(layer).forward)})
    layer.__class__ = kind
    return model


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
    ("forward", "method", "values", "reason"),
    [
        (_stubborn, "YaRN", {"factor": 4}, "does not get the positions"),
        (_narrow, "ReRoPE", {"window": 3}, "its forward( then)? fails"),
    ],
)
def test_what_has_no_effect_or_breaks_is_refused(
    forward: Any, method: str, values: dict[str, Any], reason: str
) -> None:
    model, ids = _patched(build_llama("Llama"), forward), tokens_of(1, 9)
    as_trained, before = logits_of(model, ids), dict(model.model.layers[0].self_attn.__dict__)
    config = model.config
    with pytest.raises(InputError, match=reason):
        normattn.extend(model, method, **values)
    assert model.config is config
    assert model.model.layers[0].self_attn.__dict__ == before
    assert torch.equal(logits_of(model, ids), as_trained)


def test_training_length_and_modes_come_back() -> None:
    """Asking changes nothing: a model in training stays in training, layer by layer."""
    model = build("llama").train()
    model.model.layers[0].mlp.eval()
    modes = [each.training for each in model.modules()]
    with normattn.extend(model, "ReRoPE", window=4) as extension:
        assert [each.training for each in model.modules()] == modes
        assert extension.resolved.train_length == LENGTH
    assert [each.training for each in model.modules()] == modes


def test_an_image_among_the_tokens_is_refused() -> None:
    """Its tokens stand in time, height and width; a text's three positions are one."""
    model, ids = build("qwen3_5_text"), tokens()
    counted = torch.arange(ids.shape[1]).expand(4, *ids.shape).clone()
    with normattn.extend(model, "ReRoPE"):
        as_text = model(input_ids=ids, position_ids=counted).logits
        torch.testing.assert_close(as_text, logits(model, ids))
        counted[2, :, 5:9] += 7
        with pytest.raises(InputError, match="it takes only text"):
            model(input_ids=ids, position_ids=counted)


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


@pytest.mark.parametrize(
    ("method", "values"), [("DualChunk", {"size": 9, "local": 4}), ("logn+", {})]
)
def test_padding_on_the_left_does_not_count_where_a_layer_chooses(
    method: str, values: dict[str, Any]
) -> None:
    """Places come from the mask before the layer chose, as the model gives no position_ids."""
    model, ids = build("doge"), tokens()
    padded = torch.nn.functional.pad(ids, (5, 0))
    with normattn.extend(model, method, **values), torch.no_grad():
        found = model(input_ids=padded, attention_mask=(padded > 0).long(), use_cache=False).logits
        torch.testing.assert_close(found[:, 5:], logits(model, ids), rtol=1e-4, atol=1e-4)
