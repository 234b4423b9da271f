"""A name for weights that changes whenever their content does."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def weights_digest(module: nn.Module) -> str:
    """SHA-256 of every parameter and saved buffer of `module`, by name, type, shape and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        value = tensor.detach().cpu().contiguous()
        digest.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        # Viewed as bytes because numpy knows no bfloat16.
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
