"""Checkpoints: written whole, the last two kept, every damage seen."""

from __future__ import annotations

import errno
from collections.abc import Callable
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


def flip_tensor_byte(folder: Path) -> None:
    content = bytearray((folder / "tensors.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "tensors.safetensors").write_bytes(content)


def edit_meta(folder: Path) -> None:
    text = (folder / "meta.json").read_text()
    (folder / "meta.json").write_text(text.replace("loss", "lost"))


def cut(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return damage


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


DAMAGE: list[Callable[[Path], None]] = [flip_tensor_byte, edit_meta]
DAMAGE += [make(name) for make in (cut, remove) for name in ("tensors.safetensors", "meta.json")]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_is_named_and_the_one_before_it_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    checkpoints = filled(tmp_path, 1, 2)
    damage(tmp_path / "step-00000002")
    checkpoint = checkpoints.latest()
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert torch.equal(checkpoint.tensors["w"], tensors(1)["w"])
    said = capsys.readouterr().err
    assert "step-00000002" in said
    assert len(said.splitlines()) == 1
    flip_tensor_byte(tmp_path / "step-00000001")
    # Nothing starts from scratch.
    with pytest.raises(InputError, match="every checkpoint"):
        checkpoints.latest()


def test_a_damaged_one_set_aside_neither_counts_nor_crowds_out(tmp_path: Path) -> None:
    checkpoints = filled(tmp_path, 10, 20)
    flip_tensor_byte(tmp_path / "step-00000020")
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
