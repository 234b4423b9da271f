"""The multi-label classifier: an encoder and a linear head on its mean vector."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from normattn.kernels.numerics import at_least_float32
from normattn.models.config import ClassifierConfig
from normattn.models.initialisation import initialise
from normattn.models.transformer import AttentionContext, TokenModel


class Classifier(TokenModel):
    """p(k | text) = σ(w_k · mean_t h_t + b_k) for each label k.

    `model(ids (B, T), key_padding (B, T)) → logits (B, K)`. h is the encoder's output after the
    final norm, and its mean leaves padding out: logits do not depend on the batch.
    """

    config_class = ClassifierConfig

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__(config, config.vocab_size)
        self.config = config
        self.head = nn.Linear(config.dim, config.labels)
        initialise(self, config)

    def forward(
        self,
        ids: Int[Tensor, "b t"],
        key_padding: Bool[Tensor, "b t"] | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "b k"]:
        """The logits of all labels; `key_padding` is True where a token is padding."""
        x = self.hidden_states(ids, AttentionContext(key_padding, causal=False, backend=backend))
        if key_padding is None:
            mean = x.mean(1)
        else:
            # Not a product with the mask: values at padding may be infinite, and 0 · ∞ is NaN.
            total = torch.where(key_padding[..., None], 0.0, x).sum(1)
            mean = total / (~key_padding).to(x.dtype).sum(1, keepdim=True).clamp(min=1)
        logits: Tensor = self.head(mean)
        return logits

    def loss(
        self,
        ids: Int[Tensor, "b t"],
        key_padding: Bool[Tensor, "b t"] | None,
        labels: Float[Tensor, "b k"],
        *,
        backend: str = "auto",
    ) -> Float[Tensor, ""]:
        """Binary cross-entropy in nats, the mean over texts and labels."""
        logits = self(ids, key_padding, backend)
        dtype = at_least_float32(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits.to(dtype), labels.to(dtype))
