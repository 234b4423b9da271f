"""Checkpoints: tensors and metadata, written atomically and verified by checksums.

`step-00000120/` has `meta.json` and `tensors.safetensors`, or the shards of several processes
(`shard-….safetensors`). The last two are kept, so that a complete one exists at every moment.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from normattn.errors import InputError
from normattn.io import (
    explain_os_errors,
    put_in_place,
    read_object,
    read_tensors,
    sha256_of,
    write_directory,
    write_tensors,
)
from normattn.terminal import warn

TENSORS = "tensors.safetensors"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: `tensors` by name, on the CPU (none if `sharded`), and metadata."""

    path: Path
    step: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    sharded: bool = False


class Checkpoints:
    """The checkpoints of a run in the folder `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Write tensors that share no memory as the checkpoint of `step`; keep the last two."""

        def fill(folder: Path) -> None:
            _write_meta(folder, step, meta, write_tensors(folder / TENSORS, tensors))

        write_directory(self._folder(step), fill, replace=True)
        self._delete_old()

    def begin(self, step: int) -> Path:
        """Create a temporary folder for the shards of several processes."""
        with explain_os_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=f".step-{step:08d}.", dir=self.path))

    def finish(self, folder: Path, step: int, meta: Mapping[str, Any]) -> None:
        """Write the metadata of a folder with all shards, rename it, delete old checkpoints."""
        with explain_os_errors(folder):
            _write_meta(folder, step, meta, _shard_digests(folder))
        put_in_place(folder, self._folder(step))
        self._delete_old()

    def latest(self) -> Checkpoint | None:
        """Load the newest complete checkpoint, None if there are none.

        A damaged one is reported on stderr and skipped. Raises `InputError` if all are damaged:
        starting from nothing would hide the loss.
        """
        folders = self._folders()
        for folder in reversed(folders):
            try:
                return _read(folder)
            except InputError as error:
                warn(f"warning: {error}; trying the checkpoint before it")
        if folders:
            raise InputError(
                f"every checkpoint in {self.path} is damaged; delete the folder to train again "
                "from the start"
            )
        return None

    def load(self, step: int) -> Checkpoint:
        """Load and verify the checkpoint of `step`."""
        return _read(self._folder(step))

    def last_path(self) -> Path | None:
        """Return the folder of the newest checkpoint, not verified; None if there is none."""
        return next(reversed(self._folders()), None)

    def set_aside_after(self, step: int) -> None:
        """Rename checkpoints newer than `step`, which are damaged."""
        for folder in self._folders():
            if _step_of(folder) > step:
                aside = folder.with_name(f"damaged-{folder.name}")
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)

    def _delete_old(self) -> None:
        for old in self._folders()[:-2]:
            shutil.rmtree(old, ignore_errors=True)

    def _folder(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def _folders(self) -> list[Path]:
        """Return the checkpoint folders, oldest first."""
        entries = self.path.iterdir() if self.path.is_dir() else ()
        return sorted((path for path in entries if _NAME.fullmatch(path.name)), key=_step_of)


def _read(folder: Path) -> Checkpoint:
    """Load and verify a checkpoint; `InputError` if it is damaged."""
    body = read_object(folder / "meta.json")
    expected = body.pop("meta_sha256", None)
    intact = body.keys() == {"step", "meta", "sha256"} and expected == _digest(body)
    if not intact or body["step"] != _step_of(folder):
        raise InputError(f"checkpoint {folder} is damaged: meta.json does not match its checksum")
    step, meta, digest = body["step"], body["meta"], body["sha256"]
    if isinstance(digest, dict):
        if _shard_digests(folder) != digest:
            raise InputError(f"checkpoint {folder} is damaged: its parts do not match its checksum")
        return Checkpoint(folder, step, {}, meta, sharded=True)
    try:
        return Checkpoint(folder, step, read_tensors(folder / TENSORS, digest), meta)
    except InputError as error:
        raise InputError(f"checkpoint {folder} is damaged: {error}") from error


def _write_meta(
    folder: Path, step: int, meta: Mapping[str, Any], digest: str | dict[str, str]
) -> None:
    body = {"step": step, "meta": dict(meta), "sha256": digest}
    text = json.dumps({**body, "meta_sha256": _digest(body)}, indent=2)
    (folder / "meta.json").write_text(text + "\n", "utf-8")


def _shard_digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in sorted(folder.glob("*.safetensors"))}


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))
