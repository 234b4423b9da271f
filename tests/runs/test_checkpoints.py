"""Checkpoints: written whole, the last two kept, every damage seen."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from normattn.errors import InputError
from normattn.lab.runs import Checkpoints


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2, 3), float(step)), "n": torch.tensor(step)}


def filled(path: Path, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(path)
    for step in steps:
        checkpoints.save(step, tensors(step), {"loss": step / 3})
    return checkpoints


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def latest_step(checkpoints: Checkpoints) -> int:
    found = checkpoints.latest()
    assert found is not None
    return found.step


def test_round_trip_and_the_last_two_are_kept(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "absent").latest() is None
    checkpoint = filled(tmp_path, 1, 5, 10).latest()
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.meta) == (10, {"loss": 10 / 3})
    for name, tensor in tensors(10).items():
        assert torch.equal(checkpoint.tensors[name], tensor)
    assert names(tmp_path) == ["step-00000005", "step-00000010"]


def harm(file: Path, how: str) -> None:
    content = file.read_bytes()
    changed = content[: len(content) // 2]
    if how == "a bit flipped":
        changed = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
    file.write_bytes(changed)
    if how == "removed":
        file.unlink()


@pytest.mark.parametrize("file", ["tensors.safetensors", "meta.json"])
@pytest.mark.parametrize("how", ["cut", "a bit flipped", "removed"])
def test_a_damaged_one_is_named_and_the_one_before_it_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, how: str
) -> None:
    checkpoints = filled(tmp_path, 1, 2)
    harm(tmp_path / "step-00000002" / file, how)
    checkpoint = checkpoints.latest()
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert torch.equal(checkpoint.tensors["w"], tensors(1)["w"])
    said = capsys.readouterr().err
    assert "step-00000002" in said
    assert len(said.splitlines()) == 1
    harm(tmp_path / "step-00000001" / "tensors.safetensors", "cut")
    # Nothing starts from scratch.
    with pytest.raises(InputError, match="every checkpoint"):
        checkpoints.latest()


def test_a_damaged_one_set_aside_neither_counts_nor_crowds_out(tmp_path: Path) -> None:
    checkpoints = filled(tmp_path, 10, 20)
    harm(tmp_path / "step-00000020" / "tensors.safetensors", "cut")
    checkpoints.set_aside_after(10)
    checkpoints.save(15, tensors(15), {})
    assert latest_step(checkpoints) == 15
    assert names(tmp_path) == ["damaged-step-00000020", "step-00000010", "step-00000015"]


def test_a_full_disk_is_one_sentence_and_leaves_the_old_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = filled(tmp_path, 1)
    whole = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        whole(path, content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InputError, match="no space left on the disk"):
        checkpoints.save(2, tensors(2), {})
    monkeypatch.undo()
    assert names(tmp_path) == ["step-00000001"]
    assert latest_step(checkpoints) == 1
