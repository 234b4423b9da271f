"""A model and its optimiser as named tensors, and back."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.lab.runs import Checkpoint
from normattn.lab.training.optim import Optimiser

MODEL = "model/"
OPTIMISER = "optimiser/"


def pack(model: nn.Module, optimiser: Optimiser) -> dict[str, Tensor]:
    """`model/NAME` for each parameter and kept buffer, `optimiser/NAME/KEY` for each state.

    A tied parameter appears once. The tensors are the live ones, not copies.
    """
    weights = {MODEL + name: tensor for name, tensor in model_tensors(model).items()}
    return weights | {OPTIMISER + name: state for name, state in optimiser.state().items()}


@torch.no_grad()
def unpack(tensors: Mapping[str, Tensor], model: nn.Module, optimiser: Optimiser) -> None:
    """Put what `pack` gave back into a model and optimiser of the same construction.

    Raises `InputError` when a tensor is missing, unknown, or of another shape.
    """
    weights = {k.removeprefix(MODEL): v for k, v in tensors.items() if k.startswith(MODEL)}
    own = model_tensors(model)
    if weights.keys() != own.keys():
        name = sorted(weights.keys() ^ own.keys())[0]
        where = "checkpoint" if name in own else "model"
        raise InputError(f"the checkpoint belongs to another model: the {where} lacks {name}")
    for name, tensor in own.items():
        if tensor.shape != weights[name].shape:
            raise InputError(
                f"the checkpoint belongs to another model: {name} has shape "
                f"{tuple(weights[name].shape)} there and {tuple(tensor.shape)} here"
            )
        tensor.copy_(weights[name])
    moments = {k: v for k, v in tensors.items() if k.startswith(OPTIMISER)}
    optimiser.load_state({k.removeprefix(OPTIMISER): v for k, v in moments.items()})


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (a tied one once) and the buffers that a state_dict keeps, by name."""
    return {**dict(model.named_parameters()), **kept_buffers(model)}


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a state_dict keeps, such as running statistics; live ones, not copies."""
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def read_shards(checkpoint: Checkpoint, model: nn.Module) -> dict[str, Tensor]:
    """The checkpoint's tensors, each divided as `model` holds it; this process reads its part.

    Whoever wrote them: parts of any number of processes, or one file. `InputError` where the parts
    do not make up a whole.
    """
    # torch's distributed checkpoints take half a second to import.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    own = model_tensors(model)
    reader = HuggingFaceStorageReader(str(checkpoint.path))
    try:
        stored = reader.read_metadata().state_dict_metadata
        target = {key: _room(key, entry, own) for key, entry in stored.items()}
        with warnings.catch_warnings():
            # A single process gets a warning that it is alone.
            warnings.simplefilter("ignore", UserWarning)
            load(target, storage_reader=reader, no_dist=not dist.is_initialized())
    except (CheckpointException, KeyError, ValueError, SafetensorError) as error:
        raise InputError(f"checkpoint {checkpoint.path} is damaged: {error}") from error
    return target


def _room(key: str, stored: Any, own: Mapping[str, Tensor]) -> Tensor:
    """Memory for a tensor: as the parameter whose value or optimiser state it is, where alike."""
    chunks = getattr(stored, "chunks", None)
    if chunks is None:
        raise ValueError(f"{key} is no tensor")
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(stored.size):
        raise ValueError(f"the parts of {key} do not make up a whole")
    name = key.removeprefix(MODEL)
    if key.startswith(OPTIMISER):
        name = key.removeprefix(OPTIMISER).rpartition("/")[0]
    owner = own.get(name)
    if owner is not None and owner.shape == stored.size:
        return torch.empty_like(owner, requires_grad=False)
    return torch.empty(stored.size, dtype=stored.properties.dtype)
