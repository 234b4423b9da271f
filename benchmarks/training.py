"""A training step of our decoder, transformers' Llama and x-transformers' decoder.

All have rotary positions or ALiBi, RMSNorm, SwiGLU and one embedding for input and output.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import normattn
from benchmarks.harness import Case, Options
from normattn.lab.runs.timing import Step

SCORES = ("Baseline", "KNA", "CosA", "QKRMSNorm", "Baseline-logn")


@dataclass(frozen=True)
class Size:
    """The decoder that every library builds, and its batch."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    length: int = 512
    vocabulary: int = 4096
    batch: int = 8
    hidden: int = 688


SMALL = Size(layers=1, width=64, heads=2, length=16, vocabulary=64, batch=1, hidden=64)


def ours(size: Size, score: str) -> nn.Module:
    """Our causal language model."""
    config = normattn.CausalLMConfig(
        vocab_size=size.vocabulary,
        dim=size.width,
        layers=size.layers,
        heads=size.heads,
        hidden=size.hidden,
        train_length=size.length,
        score=normattn.ScoreSpec.parse(score),
    )
    return normattn.CausalLM(config)


def llama(size: Size) -> nn.Module:
    """transformers' Llama with sdpa."""
    import transformers

    config: Any = transformers.LlamaConfig
    model: Any = transformers.LlamaForCausalLM
    llama_model: nn.Module = model(
        config(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            intermediate_size=size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads,
            max_position_embeddings=size.length,
            tie_word_embeddings=True,
            attn_implementation="sdpa",
            use_cache=False,
        )
    )
    return llama_model


def x_transformers(size: Size, alibi: bool) -> nn.Module:
    """x-transformers' decoder with its flash path."""
    import x_transformers as library

    rotary = {"rotary_pos_emb": True, "rotary_emb_dim": size.width // size.heads}
    bias = {"alibi_pos_bias": True, "alibi_num_heads": size.heads}
    decoder = library.Decoder(
        dim=size.width,
        depth=size.layers,
        heads=size.heads,
        attn_dim_head=size.width // size.heads,
        use_rmsnorm=True,
        ff_swish=True,
        ff_glu=True,
        ff_no_bias=True,
        ff_mult=size.hidden / size.width,
        attn_flash=True,
        **(bias if alibi else rotary),
    )
    wrapper: nn.Module = library.TransformerWrapper(
        num_tokens=size.vocabulary,
        max_seq_len=size.length,
        attn_layers=decoder,
        use_abs_pos_emb=False,
        tie_embedding=True,
    )
    return wrapper


def training_step(build: Callable[[], nn.Module], size: Size, precision: str, device: str) -> Step:
    """Forward, backward and AdamW on one batch; bf16 by autocast."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build().to(device)
    generator = torch.Generator().manual_seed(1)
    shape = (size.batch, size.length + 1)
    ids = torch.randint(size.vocabulary, shape, generator=generator).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> object:
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            loss: Any = _loss(model, ids)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    if isinstance(model, normattn.CausalLM):
        return model.loss(ids).loss
    output: Any = model(ids[:, :-1])
    logits: Tensor = getattr(output, "logits", output)
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def train(options: Options) -> list[Case]:
    """A training step: RoPE at 512 tokens, ALiBi at 2,048, equally many tokens in a batch."""
    rotary, long = (SMALL, SMALL) if options.quick else (Size(), Size(length=2048, batch=2))
    builders: dict[str, Callable[[], nn.Module]] = {
        "transformers": partial(llama, rotary),
        "x-transformers": partial(x_transformers, rotary, alibi=False),
        **{score: partial(ours, rotary, score) for score in SCORES},
    }
    installed = find_spec("x_transformers") is not None
    if not installed:
        del builders["x-transformers"]
        print("x-transformers is not installed; it and ALiBi are left out", file=sys.stderr)
    with_bias: dict[str, Callable[[], nn.Module]] = {
        "x-transformers": partial(x_transformers, long, alibi=True),
        "ALiBi": partial(ours, long, "Baseline-ALiBi"),
    }
    cases = []
    for precision in options.dtypes:
        entries: dict[str, Callable[[], Step]] = {}
        for name, build in builders.items():
            entries[name] = partial(training_step, build, rotary, precision, options.device)
        kind = f"training step {precision}"
        cases.append(Case(f"{kind}, T {rotary.length}", entries, "transformers"))
        if not installed:
            continue
        alibi: dict[str, Callable[[], Step]] = {}
        for name, build in with_bias.items():
            alibi[name] = partial(training_step, build, long, precision, options.device)
        cases.append(Case(f"{kind}, ALiBi, T {long.length}", alibi, "x-transformers"))
    return cases
