"""`normattn demo`: two small models past their training length."""

from __future__ import annotations

from normattn.cli.options import Demo
from normattn.lab import demo
from normattn.lab.data.text_files import read_text
from normattn.lab.report.output import write_page
from normattn.lab.report.terminal import print_table, say, tell


def run_demo(options: Demo) -> None:
    """Evaluate both models on the text, print the table and write the report."""
    text = None if options.text is None else read_text(options.text)
    windows = demo.demo_windows(text, options.windows)
    tell(
        f"evaluating 2 models × 3 methods on {len(windows)} × {demo.LENGTH:,} tokens; accuracy at "
        "the start and at the end:"
    )
    results = demo.evaluate(
        windows, lambda each: tell(f"  {each.label}: {each.near:.1f} % to {each.far:.1f} %")
    )
    source = "Python source of normattn" if options.text is None else options.text.name
    page = demo.page(results, source, "normattn demo")
    print_table(page.tables[0])
    say(options.out, write_page(page, options.out))
