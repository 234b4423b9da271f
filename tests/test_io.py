"""Folders that are whole or absent, and never in the place of somebody else's."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from safetensors import SafetensorError

from normattn.errors import InputError
from normattn.io import explain_os_errors, write_directory, write_text, write_with


def fill(folder: Path) -> None:
    (folder / "ours").write_text("new")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("there", ["absent", "empty", "link"])
def test_a_folder_takes_an_empty_place(tmp_path: Path, there: str) -> None:
    place = tmp_path / "place"
    if there == "empty":
        place.mkdir()
    if there == "link":
        (tmp_path / "elsewhere").mkdir()
        place.symlink_to(tmp_path / "elsewhere")
    write_directory(place, fill)
    assert names(place) == ["ours"]
    assert place.is_symlink() == (there == "link")
    assert not [name for name in names(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("came", ["a file", "a folder", "a file in it"])
def test_a_place_filled_while_it_was_written_is_left_alone(tmp_path: Path, came: str) -> None:
    place = tmp_path / "place"
    mine = place if came == "a file" else place / "thesis.tex"
    if came == "a file in it":
        place.mkdir()

    def fill_late(folder: Path) -> None:
        fill(folder)
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("mine")

    with pytest.raises(InputError, match="place was filled by another process"):
        write_directory(place, fill_late)
    assert mine.read_text() == "mine"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_new_file_takes_no_other_file_s_place(tmp_path: Path, when: str) -> None:
    place = tmp_path / "place"
    if when == "before":
        place.write_text("mine")

    def write_late(temporary: Path) -> None:
        temporary.write_text("ours")
        place.write_text("mine")

    with pytest.raises(InputError, match="place exists already"):
        write_with(place, write_late, new=True)
    assert place.read_text() == "mine"
    assert names(tmp_path) == ["place"]
    place.unlink()
    write_text(place, "ours", new=True)
    assert place.read_text() == "ours"
    assert names(tmp_path) == ["place"]


def test_our_own_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "old").write_text("")
    write_directory(place, fill, replace=True)
    assert names(place) == ["ours"]
    assert names(tmp_path) == ["place"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "no space left on the disk that holds"),
        (OSError(errno.EFBIG, "File too large"), "no space left on the disk that holds"),
        (OSError(errno.EIO, "Input/output error"), "cannot be written: Input/output error"),
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system; choose a writable"),
        (
            SafetensorError("I/O error: No space left on device (os error 28)"),
            "no space left on the disk that holds",
        ),
        (Exception("No space left on device (os error 28)"), "no space left on the disk"),
    ],
)
def test_what_the_system_refuses_is_one_sentence(error: Exception, message: str) -> None:
    with pytest.raises(InputError, match=message), explain_os_errors(Path("place")):
        raise error


def test_what_is_no_refusal_of_the_system_stays_as_it_is() -> None:
    for error in (ValueError("no"), OSError("no number"), KeyError("x")):
        with pytest.raises(type(error)) as caught, explain_os_errors(Path("place")):
            raise error
        assert caught.value is error
