"""Whole training steps as entries: our decoder and those of x-transformers and transformers."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from normattn.bench.case import Work
from normattn.lab.runs.timing import Step
from normattn.models.causal_lm import CausalLM
from normattn.models.config import CausalLMConfig
from normattn.models.flops import flops_per_token
from normattn.score import ScoreSpec

Family = Literal["normattn", "x-transformers", "transformers"]
X_TRANSFORMERS: Final = "x-transformers"
LLAMA: Final = "transformers"


@dataclass(frozen=True)
class ModelSize:
    """The decoder that every family builds: rotary or ALiBi, RMSNorm, SwiGLU, tied embedding."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    length: int = 512
    vocabulary: int = 4096
    batch: int = 8
    hidden: int = 688

    def config(self, score: str) -> CausalLMConfig:
        """The configuration of our decoder with this score."""
        return CausalLMConfig(
            vocab_size=self.vocabulary,
            dim=self.width,
            layers=self.layers,
            heads=self.heads,
            hidden=self.hidden,
            train_length=self.length,
            score=ScoreSpec.parse(score),
        )


SMALL = ModelSize(layers=1, width=64, heads=2, length=16, vocabulary=64, batch=1, hidden=64)


@dataclass(frozen=True)
class TrainingStep:
    """Forward, backward and AdamW of a decoder on one fixed batch, fp32 or bf16 autocast.

    `score` is our score; a peer knows "Baseline" (rotary positions) and, x-transformers only,
    "Baseline-ALiBi" and "Baseline-RealFormer".
    """

    family: Family
    score: str = "Baseline"
    half: bool = False
    size: ModelSize = ModelSize()
    device: str = "cpu"

    def build(self) -> Step:
        """The step; weights are drawn from seed 0 and tokens from seed 1."""
        return self.step_of(self.model().to(self.device), self.ids())

    def ids(self) -> Tensor:
        """The batch (B, N + 1)."""
        shape, generator = (self.size.batch, self.size.length + 1), torch.Generator().manual_seed(1)
        return torch.randint(self.size.vocabulary, shape, generator=generator).to(self.device)

    def step_of(self, model: nn.Module, ids: Tensor) -> Step:
        """The step of a module that gives the mean loss."""
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def step() -> object:
            with torch.autocast(self.device, torch.bfloat16, enabled=self.half):
                loss = model(ids)
            loss.backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            return loss.detach()

        return step

    def model(self) -> nn.Module:
        """A module from ids (B, N + 1) to the mean loss."""
        torch.manual_seed(0)
        if self.family == "normattn":
            return Ours(CausalLM(self.size.config(self.score)))
        build: Callable[[ModelSize, str], nn.Module] = _x_transformers
        if self.family == LLAMA:
            build = _llama
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Peer(build(self.size, self.score))

    def work(self) -> Work:
        """FLOPs by the model's own account; the weights and their two moments, read and written."""
        config = self.size.config("Baseline")
        tokens = self.size.batch * self.size.length
        flops = flops_per_token(config, self.size.length).training * tokens
        parameters = self.size.layers * self.size.width * (4 * self.size.width)
        parameters += 3 * self.size.layers * self.size.width * self.size.hidden
        parameters += self.size.vocabulary * self.size.width
        return Work(flops, 7.0 * 4 * parameters, float(tokens * self.size.vocabulary))

    def small(self) -> TrainingStep:
        """The same with a tiny model."""
        return dataclasses.replace(self, size=SMALL)


class Ours(nn.Module):
    """Our decoder, as a module that gives the mean loss."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """The loss of ids (B, N + 1)."""
        return self.model.loss(ids).loss


class _Peer(nn.Module):
    """A decoder that gives logits, with the loss by torch's own means."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        output: Any = self.model(ids[:, :-1])
        logits: Tensor = getattr(output, "logits", output)
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _llama(size: ModelSize, score: str) -> nn.Module:
    """transformers' Llama with sdpa."""
    if score != "Baseline":
        raise ValueError(f"transformers' Llama has no {score}")
    import transformers

    config = transformers.LlamaConfig(  # type: ignore[call-arg]
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
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def _x_transformers(size: ModelSize, score: str) -> nn.Module:
    """x-transformers' decoder with RMSNorm, SwiGLU and its flash path.

    Its residual scores have no flash path.
    """
    import x_transformers

    rotary = {"rotary_pos_emb": True, "rotary_emb_dim": size.width // size.heads}
    alibi, residual = score == "Baseline-ALiBi", score == "Baseline-RealFormer"
    position = {"alibi_pos_bias": True, "alibi_num_heads": size.heads} if alibi else rotary
    decoder = x_transformers.Decoder(
        dim=size.width,
        depth=size.layers,
        heads=size.heads,
        attn_dim_head=size.width // size.heads,
        use_rmsnorm=True,
        ff_swish=True,
        ff_glu=True,
        ff_no_bias=True,
        ff_mult=size.hidden / size.width,
        attn_flash=not residual,
        residual_attn=residual,
        **position,
    )
    model: nn.Module = x_transformers.TransformerWrapper(
        num_tokens=size.vocabulary,
        max_seq_len=size.length,
        attn_layers=decoder,
        use_abs_pos_emb=False,
        tie_embedding=True,
    )
    return model
