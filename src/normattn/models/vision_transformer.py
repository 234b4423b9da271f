"""The Vision Transformer: an image classifier on a sequence of patches."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from normattn.kernels.cross_entropy import LinearCrossEntropy, TokenScores
from normattn.kernels.numerics import at_least_float32
from normattn.layers.checks import check_tensor
from normattn.models.config import VisionConfig
from normattn.models.initialisation import initialise
from normattn.models.transformer import AttentionContext, Blocks, make_outer_norms
from normattn.models.utils import without_dropout
from normattn.plain import plain_operations

# As in ViT (arXiv 2010.11929); the class token starts at zero.
POSITION_STD = 0.02


class VisionTransformer(nn.Module):
    """An encoder that predicts the class of an image (ViT).

    `model(images (B, C, H, W)) → logits (B, K)`; pixels are numbers in −1 … 1. A linear layer turns
    each patch, row by row, into a token. With `pool` "class" a learned class token precedes them;
    with `positions` "learned" position vectors are added. The head reads the class token, or the
    mean of all tokens, after the final norm.

    Weights are drawn from torch's global generator: blocks and head as in `initialise`, the patch
    projection with deviation `init_std`, else 1/√fan-in, positions with 0.02. Raises `InputError`
    for images of another shape. Source: arXiv 2010.11929; with QK-Norm: arXiv 2302.05442.
    """

    config_class = VisionConfig

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patches = nn.Linear(config.patch_size, config.dim)
        learned = config.positions == "learned"
        self.position = nn.Embedding(config.tokens, config.dim) if learned else None
        self.class_token = nn.Parameter(torch.zeros(config.dim)) if config.pool == "class" else None
        self.embedding_norm, final_norm = make_outer_norms(config)
        self.blocks = Blocks(config)
        self.final_norm = final_norm
        self.head = nn.Linear(config.dim, config.classes)
        initialise(self, config)
        with torch.no_grad():
            self.patches.weight.normal_(std=config.init_std or config.patch_size**-0.5)
            self.patches.bias.zero_()
            if self.position is not None:
                self.position.weight.normal_(std=POSITION_STD)

    def forward(
        self, images: Float[Tensor, "b c h w"], backend: str = "auto"
    ) -> Float[Tensor, "b k"]:
        """The logits of the classes."""
        config = self.config
        rows = images.shape[:1] if isinstance(images, Tensor) else ()
        sizes = config.channels, config.height, config.width
        check_tensor("images", images, "floating", (*rows, *sizes))
        with plain_operations(backend == "reference"):
            x: Tensor = self.patches(F.unfold(images, config.patch, stride=config.patch).mT)
            if self.class_token is not None:
                x = torch.cat([self.class_token.to(x.dtype).expand(len(x), 1, -1), x], 1)
            if self.position is not None:
                x = x + self.position.weight
            x = x if self.embedding_norm is None else self.embedding_norm(x)
            x = self.blocks(x, AttentionContext(causal=False, backend=backend))
            x = x if self.final_norm is None else self.final_norm(x)
        logits: Tensor = self.head(x[:, 0] if self.class_token is not None else x.mean(1))
        return logits

    def loss(
        self, images: Float[Tensor, "b c h w"], labels: Int[Tensor, "b"], *, backend: str = "auto"
    ) -> LinearCrossEntropy:
        """Mean cross-entropy of the `labels`, and correct predictions."""
        loss, correct = self._loss_and_correct(images, labels, "mean", backend)
        return LinearCrossEntropy(loss, correct.sum(), loss.detach())

    @torch.no_grad()
    def scores(self, images: Float[Tensor, "b c h w"], labels: Int[Tensor, "b"]) -> TokenScores:
        """Loss and correctness of every image, in evaluation mode, without gradients."""
        with without_dropout(self):
            return TokenScores(*self._loss_and_correct(images, labels, "none"))

    def _loss_and_correct(
        self, images: Tensor, labels: Tensor, reduction: str, backend: str = "auto"
    ) -> tuple[Tensor, Tensor]:
        """The mean loss, or with `reduction` "none" the images' losses; and which are correct."""
        logits = self(images, backend)
        logits = logits.to(at_least_float32(logits.dtype))
        loss = F.cross_entropy(logits, labels.long(), reduction=reduction)
        return loss, logits.argmax(-1) == labels
