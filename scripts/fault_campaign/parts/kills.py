"""SIGKILL anywhere in a command, then the same command again: it resumes, with the same files."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from fault_campaign.campaign import Campaign, Count
from fault_campaign.commands import COMMANDS, make_setting
from fault_campaign.disturbed import draw, goes_on, measure
from fault_campaign.processes import in_groups


def run(campaign: Campaign) -> Iterator[Count]:
    """At least 200 kills in a full campaign, spread over the commands by their cost."""
    setting = make_setting(campaign.folder / "setting", foreign=campaign.full)
    names = ("train", "tokenise", "extend", "export", "report") if campaign.full else ("train",)
    measured = [measure(setting, each) for each in COMMANDS if each.name in names]
    trials = draw(setting, measured, 220 if campaign.full else 6, [signal.SIGKILL], campaign.random)
    killed = Count("a killed command leaves no partial file, and run again gives the same files")
    for trial, end in zip(trials, in_groups([each.work for each in trials]), strict=True):
        if end.code not in (0, -signal.SIGKILL):
            killed.failed(f"{trial.moment}: {end.shown}")
            continue
        found = goes_on(setting, trial)
        killed.check(found is None, str(found))
        if not campaign.has_time:
            break
    yield killed
