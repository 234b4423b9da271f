"""`normattn demo`: see a model fail past its training length, and a method rescue it."""

from __future__ import annotations

from normattn.cli import options
from normattn.lab import demo
from normattn.lab.data.text_files import read_text
from normattn.lab.report.output import write_page
from normattn.lab.report.terminal import print_table, say, tell


def run_demo(asked: options.Demo) -> None:
    """Evaluate both models on the text, print the table and write the report."""
    text = None if asked.text is None else read_text(asked.text)
    windows = demo.demo_windows(text, asked.windows)
    tell(
        f"evaluating 2 models × 3 methods on {len(windows)} × {demo.LENGTH:,} tokens; accuracy at "
        "the start and at the end:"
    )
    readings = demo.read(
        windows, lambda each: tell(f"  {each.label}: {each.near:.1f} % to {each.far:.1f} %")
    )
    named = "Python source of normattn" if asked.text is None else asked.text.name
    made = demo.page(readings, named, "normattn demo")
    print_table(made.tables[0])
    say(asked.out, write_page(made, asked.out))
