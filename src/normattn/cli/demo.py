"""`normattn demo`: see a model fail past its training length, and a method rescue it."""

from __future__ import annotations

from normattn.cli import options
from normattn.lab import demo
from normattn.lab.data.text_files import read_text
from normattn.lab.report.output import write_page
from normattn.lab.report.terminal import print_line, print_report, print_table


def run_demo(args: options.Demo) -> None:
    """Evaluate both models on the text, print the table and write the report."""
    text = None if args.text is None else read_text(args.text)
    windows = demo.demo_windows(text, args.windows)
    print_line(
        f"evaluating 2 models × 3 methods on {len(windows)} × {demo.LENGTH:,} tokens; accuracy at "
        "the start and at the end:"
    )
    readings = demo.read(
        windows,
        lambda reading: print_line(
            f"  {reading.label}: {reading.near:.1f} % to {reading.far:.1f} %"
        ),
    )
    source = "Python source of normattn" if args.text is None else args.text.name
    page = demo.page(readings, source, "normattn demo")
    print_table(page.tables[0])
    print_report(args.out, write_page(page, args.out))
