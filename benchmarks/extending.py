"""One layer of transformers' Llama, as it is and extended by a method."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import normattn
from benchmarks.harness import DTYPES, Case, Options
from normattn.lab.runs.timing import Step

METHODS = ("YaRN(factor=4)", "ReRoPE(window=512)", "ReRoPE(window=512)-logn+", "DynamicNTK")
# SmolLM2-135M: 9 query heads and 3 key heads of 64 features.
HEADS, KEY_HEADS, SIZE = 9, 3, 64


def layer(length: int, dtype: torch.dtype, device: str) -> Any:
    """A model of one layer; its feed-forward has eight features, so that attention dominates."""
    import transformers

    config: Any = transformers.LlamaConfig
    model: Any = transformers.LlamaForCausalLM
    torch.manual_seed(0)
    llama = model(
        config(
            vocab_size=8,
            hidden_size=HEADS * SIZE,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=HEADS,
            num_key_value_heads=KEY_HEADS,
            max_position_embeddings=length,
            attn_implementation="sdpa",
        )
    )
    return llama.eval().to(device, dtype)


def reading(length: int, precision: str, device: str, method: str | None, decoding: bool) -> Step:
    """A prefill of `length` tokens, or a decoding step after it."""
    model = layer(length, DTYPES[precision], device)
    if method is not None:
        normattn.extend(model, method, train_length=length // 4)
    decoder = model.model
    x = torch.randn(1, length, HEADS * SIZE, generator=torch.Generator().manual_seed(0))
    x = x.to(device, DTYPES[precision])
    if not decoding:
        return torch.no_grad()(lambda: decoder(inputs_embeds=x, use_cache=False).last_hidden_state)
    with torch.no_grad():
        cache = decoder(inputs_embeds=x, use_cache=True).past_key_values

    @torch.no_grad()
    def step() -> object:
        out = decoder(inputs_embeds=x[:, :1], past_key_values=cache).last_hidden_state
        cache.crop(-1)
        return out

    return step


def extend(options: Options) -> list[Case]:
    """Prefill and decoding with every method, relative to the unmodified layer."""
    length = 2304 if options.quick else max(options.lengths)
    cases = []
    for precision in options.dtypes:
        for decoding in (False, True):
            entries: dict[str, Callable[[], Step]] = {}
            for method in (None, *METHODS):
                entries[method or "as it is"] = partial(
                    reading, length, precision, options.device, method, decoding
                )
            kind = "one token after" if decoding else "a text of"
            cases.append(Case(f"extend {precision}, {kind} T {length}", entries, "as it is"))
    return cases
