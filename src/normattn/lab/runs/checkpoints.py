"""Checkpoints: tensors and a description, written whole or not at all, with their checksums.

`step-00000120/` holds `meta.json` and `tensors.safetensors`, or the parts of several processes
(`shard-….safetensors`). The last two are kept, so that one whole checkpoint exists at every moment,
whatever is killed or unplugged.
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

KEPT = 2
TENSORS = "tensors.safetensors"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: `tensors` by name (on the CPU) and `meta`, at `step` in `path`.

    One that several processes wrote in parts is `sharded`, and its tensors are not read here.
    """

    path: Path
    step: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    sharded: bool = False


class Checkpoints:
    """The checkpoints of one run, in the folder `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Write the checkpoint of `step`, then drop all but the last two.

        Tensors must not share memory. `InputError` when the disk is full; older ones then stay.
        """

        def fill(folder: Path) -> None:
            _describe(folder, step, meta, write_tensors(folder / TENSORS, tensors))

        write_directory(self._folder(step), fill, replace=True)
        self._drop_old()

    def begin(self, step: int) -> Path:
        """A folder that several processes fill with their parts, until `finish`."""
        with explain_os_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=f".step-{step:08d}.", dir=self.path))

    def finish(self, folder: Path, step: int, meta: Mapping[str, Any]) -> None:
        """Give what was begun in `folder`, and is whole now, its name; then as `save`."""
        with explain_os_errors(folder):
            _describe(folder, step, meta, _shards(folder))
        put_in_place(folder, self._folder(step))
        self._drop_old()

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint, or None when there is none at all.

        A damaged one is named on stderr and the one before it taken; `InputError` when every one
        is damaged, because starting again from nothing would hide the loss.
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
        """The checkpoint of exactly `step`, verified."""
        return _read(self._folder(step))

    def last_path(self) -> Path | None:
        """The folder of the newest checkpoint, unverified; None when there is none."""
        return next(reversed(self._folders()), None)

    def set_aside_after(self, step: int) -> None:
        """Rename checkpoints newer than `step` (the damaged ones) so that they count no more."""
        for folder in self._folders():
            if _step_of(folder) > step:
                aside = folder.with_name(f"damaged-{folder.name}")
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)

    def _drop_old(self) -> None:
        for old in self._folders()[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    def _folder(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def _folders(self) -> list[Path]:
        """The checkpoint folders, oldest first."""
        found = self.path.iterdir() if self.path.is_dir() else ()
        return sorted((path for path in found if _NAME.fullmatch(path.name)), key=_step_of)


def _read(folder: Path) -> Checkpoint:
    """Read and verify one checkpoint; `InputError` says what is wrong with it."""
    described = read_object(folder / "meta.json")
    expected = described.pop("meta_sha256", None)
    whole = described.keys() == {"step", "meta", "sha256"} and expected == _digest(described)
    if not whole or described["step"] != _step_of(folder):
        raise InputError(f"checkpoint {folder} is damaged: meta.json does not match its checksum")
    step, meta, digest = described["step"], described["meta"], described["sha256"]
    if isinstance(digest, dict):
        if _shards(folder) != digest:
            raise InputError(f"checkpoint {folder} is damaged: its parts do not match its checksum")
        return Checkpoint(folder, step, {}, meta, sharded=True)
    try:
        return Checkpoint(folder, step, read_tensors(folder / TENSORS, digest), meta)
    except InputError as error:
        raise InputError(f"checkpoint {folder} is damaged: {error}") from error


def _describe(
    folder: Path, step: int, meta: Mapping[str, Any], digest: str | dict[str, str]
) -> None:
    """Write meta.json, with the digest of the other files."""
    body = {"step": step, "meta": dict(meta), "sha256": digest}
    text = json.dumps({**body, "meta_sha256": _digest(body)}, indent=2)
    (folder / "meta.json").write_text(text + "\n", "utf-8")


def _shards(folder: Path) -> dict[str, str]:
    """The digest of every part in `folder`, by name."""
    return {path.name: sha256_of(path) for path in sorted(folder.glob("*.safetensors"))}


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))
