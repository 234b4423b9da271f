"""One layer of transformers' Llama as an entry: as it is, or extended by a method."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from normattn.bench.case import Work
from normattn.lab.runs.timing import Step

# SmolLM2-135M: 9 query heads and 3 key heads of 64 features.
_HEADS, _KEY_HEADS, _SIZE = 9, 3, 64
_SMALL = 64


@dataclass(frozen=True)
class OneLayer:
    """An attention layer with its projections, no feed-forward worth the name, stock sdpa.

    `method` extends it, trained to read a quarter of `length`; None leaves it as it is. It reads
    `length` tokens at once, or, with `decoding`, one token after as many.
    """

    length: int
    dtype: torch.dtype
    method: str | None = None
    decoding: bool = False
    device: str = "cpu"

    def build(self) -> Step:
        """The forward without gradients."""
        from normattn.hf import extend

        model = self.model()
        if self.method is not None:
            extend(model, self.method, train_length=self.length // 4)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1, self.length, _HEADS * _SIZE, generator=generator)
        x = x.to(self.device, self.dtype)
        return self._decoding(model, x) if self.decoding else self._prefill(model, x)

    def model(self) -> Any:
        """The layer as a model, weights from seed 0."""
        import transformers

        llama: Any = transformers.LlamaModel
        configured: Any = transformers.LlamaConfig
        config = configured(
            vocab_size=8,
            hidden_size=_HEADS * _SIZE,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=_HEADS,
            num_key_value_heads=_KEY_HEADS,
            max_position_embeddings=self.length,
            attn_implementation="sdpa",
        )
        torch.manual_seed(0)
        return llama(config).eval().to(self.device, self.dtype)

    def work(self) -> Work:
        """The projections, and two products over the causal pairs or over one row."""
        rows = 1 if self.decoding else self.length
        pairs = self.length if self.decoding else self.length * (self.length + 1) / 2
        width, keys = _HEADS * _SIZE, _KEY_HEADS * _SIZE
        weights = 2 * width * (width + keys)
        flops = 2.0 * rows * weights + 4.0 * pairs * width
        moved = weights + self.length * 2 * keys + rows * 4 * width
        return Work(flops, float(moved * self.dtype.itemsize), float(_HEADS * pairs))

    def small(self) -> OneLayer:
        """The same over a few tokens."""
        return dataclasses.replace(self, length=min(self.length, _SMALL))

    def _prefill(self, model: Any, x: torch.Tensor) -> Step:
        @torch.no_grad()
        def step() -> object:
            return model(inputs_embeds=x, use_cache=False).last_hidden_state

        return step

    def _decoding(self, model: Any, x: torch.Tensor) -> Step:
        with torch.no_grad():
            cache = model(inputs_embeds=x, use_cache=True).past_key_values

        @torch.no_grad()
        def step() -> object:
            out = model(inputs_embeds=x[:, :1], past_key_values=cache).last_hidden_state
            cache.crop(-1)
            return out

        return step
