"""Read a checkpoint whose tensors lie in parts, whoever wrote them and however many processes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from normattn.errors import InputError
from normattn.lab.runs import Checkpoint
from normattn.lab.training.state import MODEL, OPTIMISER, model_tensors


def read_shards(checkpoint: Checkpoint, model: nn.Module) -> dict[str, Tensor]:
    """The checkpoint's tensors, each divided as `model` holds it; this process reads its part.

    Whoever wrote them: parts of any number of processes, or one file. `InputError` where the parts
    do not make up a whole.
    """
    own = model_tensors(model)
    reader = HuggingFaceStorageReader(str(checkpoint.path))
    try:
        stored = reader.read_metadata().state_dict_metadata
        target = {key: _room(key, entry, own) for key, entry in stored.items()}
        with warnings.catch_warnings():
            # One process alone is told that it is alone.
            warnings.simplefilter("ignore", UserWarning)
            load(target, storage_reader=reader, no_dist=not dist.is_initialized())
    except (CheckpointException, KeyError, ValueError, SafetensorError) as error:
        raise InputError(f"checkpoint {checkpoint.path} is damaged: {error}") from error
    return target


def _room(key: str, stored: Any, own: Mapping[str, Tensor]) -> Tensor:
    """Memory for a tensor: as the parameter whose value or optimiser state it is, where alike."""
    if not isinstance(stored, TensorStorageMetadata):
        raise ValueError(f"{key} is no tensor")
    if sum(math.prod(chunk.sizes) for chunk in stored.chunks) != math.prod(stored.size):
        raise ValueError(f"the parts of {key} do not make up a whole")
    owner = own.get(_owner(key))
    if owner is not None and owner.shape == stored.size:
        return torch.empty_like(owner, requires_grad=False)
    return torch.empty(stored.size, dtype=stored.properties.dtype)


def _owner(key: str) -> str:
    """The parameter or buffer of which `key` is the value or an optimiser's state."""
    if key.startswith(OPTIMISER):
        return key.removeprefix(OPTIMISER).rpartition("/")[0]
    return key.removeprefix(MODEL)
