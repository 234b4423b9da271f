"""`normattn demo`: see a model fail past its training length, and a method rescue it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from normattn.cli.asking import option

EPILOG = """
**Examples**

`normattn demo` – plain RoPE and KeyNorm on this package's own source

`normattn demo --text book.txt --out runs/demo` – on a text of your own

Then try a real model: `normattn extend HuggingFaceTB/SmolLM2-135M --text book.txt`
"""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Two small trained models read eight times their training length, in under a minute.

    Both ship with the package: nothing is downloaded. Each reads the text unmodified, with YaRN
    and with ReRoPE. The report has the curve where plain RoPE collapses.
    """

    text: Path | None = option(None, help="A text file. [default: this package's own source]")
    windows: int = option(24, min=1, help="Windows of 1,024 tokens, at most.")
    out: Path = option(Path("normattn-demo"), help="The folder of the report.")


def run_demo(options: DemoOptions) -> None:
    """Read the text with both models, print the table and write the report."""
    from normattn.io import expanded
    from normattn.lab import demo
    from normattn.lab.data.text_files import read_text
    from normattn.lab.report.page import write_files
    from normattn.lab.report.terminal import print_table, say, tell

    text = None if options.text is None else read_text(options.text)
    windows = demo.demo_windows(text, options.windows)
    tell(f"2 models × 3 methods on {len(windows)} windows of {demo.LENGTH:,} tokens")
    readings = demo.read(
        windows, lambda each: tell(f"  {each.label}: {each.near:.1f} % to {each.far:.1f} %")
    )
    named = "normattn's own source" if options.text is None else options.text.name
    made = demo.page(readings, named, "normattn demo")
    print_table(made.tables[0])
    out = expanded(options.out)
    say(out, write_files(made, out))
