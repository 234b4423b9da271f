"""SIGINT and SIGTERM in every phase of every command: exit code 130 and one sentence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from fault_campaign.campaign import Campaign, Count
from fault_campaign.commands import COMMANDS, make_setting
from fault_campaign.disturbed import draw, goes_on, measure
from fault_campaign.processes import Ended, in_groups

STOPPED = 130
IMPORTS = (
    *("typer", "numpy", "torch", "torch.nn", "pydantic", "normattn.cli.app"),
    *(
        "normattn.cli.options",
        "normattn.cli.train",
        "normattn.lab.training",
        "safetensors",
        "tokenizers",
        "rich",
    ),
)
_AT_IMPORT = """
import os, sys
module, number = sys.argv[1], int(sys.argv[2])
sys.argv[0:3] = ["normattn"]
def send(event, arguments):
    if event == "import" and arguments[0] == module:
        os.kill(os.getpid(), number)
        module_seen.append(module)
module_seen = []
def once(event, arguments):
    if not module_seen:
        send(event, arguments)
sys.addaudithook(once)
from normattn.__main__ import main
main()
"""


def run(campaign: Campaign) -> Iterator[Count]:
    """Imports in new processes, all other phases in forks."""
    setting = make_setting(campaign.folder / "setting", foreign=campaign.full)
    kinds = [signal.SIGINT, signal.SIGTERM]
    importing = Count("a command stopped during imports ends with exit code 130 and one sentence")
    for module in IMPORTS if campaign.full else ("numpy",):
        for kind in kinds:
            line = ["train", "--preset", str(setting.preset), "--out", str(campaign.folder / "no")]
            end = _stopped_at_import(module, kind, line)
            importing.check(end.code == STOPPED and end.orderly, f"{module}, {kind}: {end.shown}")
    yield importing
    stopped = Count(
        "a command stopped in any other phase ends with exit code 130 and one sentence, or is done"
    )
    again = Count("a stopped command resumes and gives the same files")
    names = [each.name for each in COMMANDS] if campaign.full else ["train", "generate"]
    measured = [measure(setting, each) for each in COMMANDS if each.name in names]
    trials = draw(setting, measured, 150 if campaign.full else 8, kinds, campaign.random)
    for number, (trial, end) in enumerate(
        zip(trials, in_groups([each.work for each in trials]), strict=True)
    ):
        held = end.code == 0 or (end.code == STOPPED and end.orderly)
        stopped.check(held, f"{trial.moment}: {end.shown}")
        if end.code == STOPPED and number % 4 == 0:
            found = goes_on(setting, trial)
            again.check(found is None, str(found))
        if not campaign.has_time:
            break
    yield from (stopped, again)


def _stopped_at_import(module: str, kind: signal.Signals, line: list[str]) -> Ended:
    source = Path(__file__).parents[3] / "src"
    done = subprocess.run(
        [sys.executable, "-c", _AT_IMPORT, module, str(int(kind)), *line],
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    return Ended(done.returncode, done.stderr)
