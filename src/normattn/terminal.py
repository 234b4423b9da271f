"""Text for people, on the terminal: whatever would make a terminal obey is written out.

Names come from files that others wrote: headers of safetensors, keys of GGUF files, studies. One
with an escape sequence in it could retitle the window, hide lines or write to the clipboard.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from rich import console
from rich.segment import Segment

_KEPT = "\n\t"


def visible(text: str) -> str:
    """The text with each character that does not print, but for line ends and tabs, as `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in _KEPT else repr(letter)[1:-1] for letter in text
    )


def show(text: object) -> None:
    """Print a text on stdout."""
    print(visible(str(text)))


def warn(sentence: object) -> None:
    """Print a line on stderr; where that is full or gone, there is nobody to tell."""
    try:
        print(visible(str(sentence)), file=sys.stderr, flush=True)
    except OSError:
        # Python would write it once more at its end, and change the exit status where it cannot.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # stays


class Console(console.Console):
    """rich's console; what it is given to print is made visible, its own colours stay."""

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """The segments of a renderable; those that move the cursor are rich's own."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)
