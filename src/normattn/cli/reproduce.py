"""`normattn reproduce STUDY`: a published experiment, from data to table and figures."""

from __future__ import annotations

from normattn.cli import reproduce_reading as reading
from normattn.cli import reproduce_training as training
from normattn.cli.checked import Commands

app = Commands(
    no_args_is_help=True,
    help="Run a published experiment from data to table: keynorm, window, continue, mechanism, "
    "realformer, rmsnorm, qknorm.",
)


@app.callback()
def _group() -> None:
    """Run a published experiment from data to table."""


app.command("keynorm", epilog=reading.KEYNORM)(reading.keynorm)
app.command("window", epilog=reading.WINDOW)(reading.window)
app.command("continue", epilog=reading.CONTINUE)(reading.continue_)
app.command("mechanism", epilog=reading.MECHANISM)(reading.mechanism)
app.command("realformer", epilog=training.REALFORMER)(training.realformer)
app.command("rmsnorm", epilog=training.RMSNORM)(training.rmsnorm)
app.command("qknorm", epilog=training.QKNORM)(training.qknorm)
