"""Checkpoints that every process writes its part of, and any number of processes reads back.

By torch.distributed.checkpoint, with parts as safetensors (each file's header says where its rows
stand in the whole): torch's own format keeps its index as a pickle, and to read a pickle is to run
what it says.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from normattn.atomic import explain_os_errors
from normattn.errors import InputError
from normattn.lab.runs import Checkpoint, Checkpoints
from normattn.lab.training.distribution import World
from normattn.lab.training.state import MODEL, OPTIMISER, model_tensors


class ShardWriter:
    """Writes the parts of one checkpoint at a time while training goes on.

    `begin` returns when every part is copied. Nothing is lost by that: a checkpoint gets its name
    only when all of it is on the disk with its checksums, and until then the one before it stands.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        # Of its own: the training's messages do not wait for those of a checkpoint.
        self._group = dist.new_group(backend="gloo")
        self._finisher = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Any] | None = None

    def begin(
        self,
        checkpoints: Checkpoints,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
    ) -> None:
        """Copy the tensors and begin to write them; one that was begun before is finished first."""
        self.settle()
        folder = self._world.on_main(lambda: checkpoints.begin(step))
        writing = async_save(
            {name: tensor.detach() for name, tensor in tensors.items()},
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
            process_group=self._group,
        )
        assert isinstance(writing, Future)
        if self._world.main:
            self._pending = self._finisher.submit(
                _finish, writing, checkpoints, folder, step, dict(meta)
            )
        else:
            self._pending = writing

    def settle(self) -> None:
        """Wait until what was begun is in its place; `InputError` on all where it cannot be."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        if not self._world.main:
            # What went wrong anywhere, the writing process says.
            pending.exception()
        self._world.on_main(pending.result)


def _finish(
    writing: Future[Any],
    checkpoints: Checkpoints,
    folder: Path,
    step: int,
    meta: Mapping[str, Any],
) -> None:
    """On the writing process: wait for all parts, then give the checkpoint its name."""
    with explain_os_errors(folder):
        try:
            writing.result()
        except CheckpointException as error:
            # Of the refusals of all processes the first one is told.
            raise next(iter(error.failures.values()))[0] from error
    checkpoints.finish(folder, step, meta)


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
