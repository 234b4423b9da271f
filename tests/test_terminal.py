"""Names from files reach the terminal without what a terminal would obey."""

from __future__ import annotations

import io

import pytest
from rich.table import Table

from normattn.__main__ import _format_warning
from normattn.cli.failures import exit_code_of
from normattn.errors import InputError
from normattn.lab.report.terminal import ProgressBar, print_line
from normattn.terminal import Console, show, visible, warn

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
    console = Console(
        file=out, force_terminal=terminal, width=100, color_system="standard" if terminal else None
    )
    table = Table("name")
    table.add_row(HOSTILE)
    console.print(table)
    console.print("[bold]title[/]")
    written = out.getvalue()
    assert r"\x1b]0;owned" in written
    assert "\x1b]" not in written
    assert "\x9b" not in written
    assert ("\x1b[1mtitle" in written) is terminal
