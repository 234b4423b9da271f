"""Folders that are whole or absent; and what reaches the terminal from files."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from normattn.__main__ import _format_warning
from normattn.cli.failures import exit_code_of
from normattn.errors import InputError
from normattn.io import explain_os_errors, write_directory, write_text
from normattn.lab.report.terminal import ProgressBar, print_line
from normattn.terminal import Console, show, visible, warn


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


def test_neither_folder_nor_new_file_takes_another_s_place(tmp_path: Path) -> None:
    mine = tmp_path / "place" / "thesis.tex"
    mine.parent.mkdir()
    write_text(mine, "mine", new=True)
    with pytest.raises(InputError, match="place cannot be written"):
        write_directory(mine.parent, fill)
    with pytest.raises(InputError, match=r"thesis\.tex exists already"):
        write_text(mine, "ours", new=True)
    assert mine.read_text() == "mine"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]


def test_our_own_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "old").write_text("")
    write_directory(place, fill, replace=True)
    assert (names(place), names(tmp_path)) == (["ours"], ["place"])


def test_what_the_system_refuses_is_one_sentence_and_all_else_stays_as_it_is() -> None:
    """How libraries wrap such errors is tested with the command line."""
    for number, said in (
        (errno.ENOSPC, "no space left on the disk that holds place; make room"),
        (errno.EROFS, "place cannot be written: Read-only file system; choose a writable place"),
    ):
        with pytest.raises(InputError, match=said), explain_os_errors(Path("place")):
            raise OSError(number, os.strerror(number))
    for error in (ValueError("no"), OSError("no number"), KeyError("x")):
        with pytest.raises(type(error)) as caught, explain_os_errors(Path("place")):
            raise error
        assert caught.value is error


# The terminal.
HOSTILE = "a\x1b]0;owned\x07b\x9bc\x7f\u202ed\re"
SHOWN = r"a\x1b]0;owned\x07b\x9bc\x7f\u202ed\re"


def test_what_prints_stays_and_the_rest_is_written_out() -> None:
    assert visible("héllo λ 中\n\tx") == "héllo λ 中\n\tx"
    assert visible(HOSTILE) == SHOWN
    assert visible(visible(HOSTILE)) == SHOWN


def test_every_way_to_the_terminal_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    show(HOSTILE)
    warn(HOSTILE)
    print_line(HOSTILE)
    with ProgressBar() as bar:
        bar.print_line(HOSTILE)
    exit_code_of(InputError(HOSTILE))
    said = capsys.readouterr()
    assert said.out.count(r"\x1b]0;owned") == 2
    assert said.err.count(r"\x1b]0;owned") == 3
    assert "\x1b" not in said.out + said.err
    assert "\x1b" not in _format_warning(UserWarning(HOSTILE), UserWarning, "file", 1)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_table_keeps_its_own_colours_alone(terminal: bool) -> None:
    out = io.StringIO()
    colours: Any = "standard" if terminal else None
    console = Console(file=out, force_terminal=terminal, width=100, color_system=colours)
    table = Table("name")
    table.add_row(HOSTILE)
    console.print(table, "[bold]title[/]")
    written = out.getvalue()
    assert r"\x1b]0;owned" in written
    assert "\x1b]" not in written
    assert "\x9b" not in written
    assert ("\x1b[1mtitle" in written) is terminal
