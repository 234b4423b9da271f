"""Print text on the terminal with control characters escaped.

Names come from untrusted files: safetensors headers, GGUF keys, studies. An escape sequence in one
could change the window's title, hide lines or write to the clipboard.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from rich import console
from rich.segment import Segment

_ALLOWED = "\n\t"


def visible(text: str) -> str:
    """Escape characters that do not print, such as `\\x1b`, except line ends and tabs."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in _ALLOWED else repr(letter)[1:-1]
        for letter in text
    )


def show(text: object) -> None:
    """Print a text on stdout, escaped."""
    print(visible(str(text)))


def warn(message: object) -> None:
    """Print a line on stderr, escaped. Ignores a closed or full stderr."""
    try:
        print(visible(str(message)), file=sys.stderr, flush=True)
    except OSError:
        # Otherwise Python writes it again at exit, and changes the exit status if that fails.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # stays


class Console(console.Console):
    """rich's console, which escapes the text to print but not its own control codes."""

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Yield the segments of a renderable, with their text escaped."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)
