"""`normattn lm-eval`: lm-evaluation-harness with our model and our tasks in it."""

from __future__ import annotations

from dataclasses import dataclass

from normattn.cli.asking import argument, flag

EPILOG = """
**Examples**

`normattn lm-eval --model normattn --model_args run=runs/kna --tasks normattn` – a run on our tasks

`normattn lm-eval --model normattn --model_args pretrained=FOLDER,method=YaRN,factor=2 --tasks
normattn_passkey --metadata '{"lengths": [8192, 16384], "samples": 5}'` – an extended model

`normattn lm-eval ls tasks` – every task that the harness knows

`normattn lm-eval --tasks-path` – the folder of our tasks, for `lm_eval --include_path`
"""


@dataclass(frozen=True, kw_only=True)
class HarnessOptions:
    """Evaluate by lm-evaluation-harness; every argument is one of its own command `lm_eval`.

    The harness needs `pip install normattn[lm-eval]`. Its model `normattn` is a run trained here
    (`run=RUN`) or a model of transformers (`pretrained=FOLDER`), extended by `method=`. Its tasks
    `normattn` need no download; a task folder of your own by `--include_path` stands in their
    place.
    """

    arguments: list[str] | None = argument(None, help="Arguments of `lm_eval`.", show_default=False)
    tasks_path: bool = flag("--tasks-path", "Print the folder of our tasks, and exit.")
