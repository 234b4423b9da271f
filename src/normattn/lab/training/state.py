"""Convert a model and its optimiser to named tensors and back."""

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
    """Return `model/NAME` for parameters and saved buffers, `optimiser/NAME/KEY` for its state.

    A tied parameter appears once. The tensors are not copied.
    """
    weights = {MODEL + name: tensor for name, tensor in model_tensors(model).items()}
    return weights | {OPTIMISER + name: state for name, state in optimiser.state().items()}


@torch.no_grad()
def unpack(tensors: Mapping[str, Tensor], model: nn.Module, optimiser: Optimiser) -> None:
    """Load what `pack` returned into a model and optimiser of the same architecture.

    Raises `InputError` if a tensor is missing, unknown, or has another shape.
    """
    weights = {k.removeprefix(MODEL): v for k, v in tensors.items() if k.startswith(MODEL)}
    targets = model_tensors(model)
    if weights.keys() != targets.keys():
        name = sorted(weights.keys() ^ targets.keys())[0]
        where = "checkpoint" if name in targets else "model"
        raise InputError(f"the checkpoint belongs to another model: the {where} lacks {name}")
    for name, tensor in targets.items():
        if tensor.shape != weights[name].shape:
            raise InputError(
                f"the checkpoint belongs to another model: {name} has shape "
                f"{tuple(weights[name].shape)} there and {tuple(tensor.shape)} here"
            )
        tensor.copy_(weights[name])
    state = {k.removeprefix(OPTIMISER): v for k, v in tensors.items() if k.startswith(OPTIMISER)}
    optimiser.load_state(state)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters (a tied one once) and persistent buffers by name."""
    return {**dict(model.named_parameters()), **persistent_buffers(model)}


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers in the state_dict, such as running statistics; not copied."""
    names = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in names}


def read_shards(checkpoint: Checkpoint, model: nn.Module) -> dict[str, Tensor]:
    """Return the checkpoint's tensors, sharded like `model`; each process reads its shards.

    The checkpoint may be one file or the shards of any number of processes. Raises `InputError` if
    shards are missing.
    """
    # torch's distributed checkpoints take half a second to import.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    model_state = model_tensors(model)
    reader = HuggingFaceStorageReader(str(checkpoint.path))
    try:
        stored = reader.read_metadata().state_dict_metadata
        target = {key: _allocate(key, entry, model_state) for key, entry in stored.items()}
        with warnings.catch_warnings():
            # torch warns if there is a single process.
            warnings.simplefilter("ignore", UserWarning)
            load(target, storage_reader=reader, no_dist=not dist.is_initialized())
    except (CheckpointException, KeyError, ValueError, SafetensorError) as error:
        raise InputError(f"checkpoint {checkpoint.path} is damaged: {error}") from error
    return target


def _allocate(key: str, stored: Any, model_state: Mapping[str, Tensor]) -> Tensor:
    """Allocate a tensor, sharded like its parameter if the shapes are equal."""
    chunks = getattr(stored, "chunks", None)
    if chunks is None:
        raise ValueError(f"{key} is no tensor")
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(stored.size):
        raise ValueError(f"the parts of {key} do not make up a whole")
    name = key.removeprefix(MODEL)
    if key.startswith(OPTIMISER):
        name = key.removeprefix(OPTIMISER).rpartition("/")[0]
    parameter = model_state.get(name)
    if parameter is not None and parameter.shape == stored.size:
        return torch.empty_like(parameter, requires_grad=False)
    return torch.empty(stored.size, dtype=stored.properties.dtype)
