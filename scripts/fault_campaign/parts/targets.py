"""A folder that another program fills between a command's check and its rename."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fault_campaign.campaign import Campaign, Count
from fault_campaign.commands import Setting, make_setting, work_of
from fault_campaign.processes import in_groups

FILL_AT = ("tempfile.mkdtemp", "os.rename")


def run(campaign: Campaign) -> Iterator[Count]:
    """`export` and `extend --save`, into a new and an empty folder, filled at two moments."""
    setting = make_setting(campaign.folder / "setting", foreign=campaign.full)
    left = Count(
        "an output folder filled meanwhile is not changed, and the command ends with exit code 2 "
        "and one sentence"
    )
    commands = (_export, _extend) if campaign.full else (_export,)
    rounds = 5 if campaign.full else 1
    cases = [
        (command, event, there, campaign.folder / f"{command.__name__}-{event}-{there}-{number}")
        for number in range(rounds)
        for command in commands
        for event in FILL_AT
        for there in ("absent", "empty")
    ]
    works = []
    for command, event, there, place in cases:
        if there == "empty" and command is _export:
            place.mkdir()
        works.append(_filled_at(event, place, work_of(command(setting, place))))
    for (_, _, _, place), end in zip(cases, in_groups(works), strict=True):
        unchanged = [path.name for path in place.iterdir()] == ["thesis.tex"]
        leftovers = [path.name for path in place.parent.glob(f".{place.name}.*")]
        held = unchanged and not leftovers and end.code == 2 and end.orderly
        left.check(held, f"{place.name}: {leftovers} {end.shown}")
        if not campaign.has_time:
            break
    yield left


def _export(setting: Setting, place: Path) -> list[str]:
    return ["export", str(setting.run), str(place)]


def _extend(setting: Setting, place: Path) -> list[str]:
    """The command, with a separate directory of records."""
    records = place.with_name(f"records-of-{place.name}")
    options = ["--lengths", "16,32", "--methods", "PI", "--windows", "1"]
    line = ["extend", str(setting.model), "--text", str(setting.text), "--out", str(records)]
    return [*line, *options, "--no-passkey", "--save", str(place)]


def _filled_at(event: str, place: Path, work: Callable[[], int]) -> Callable[[], int]:
    """`work`, during which another program fills `place`."""

    def disturbed() -> int:
        def fill(found: str, arguments: tuple[Any, ...]) -> None:
            if found != event or (place / "thesis.tex").exists():
                return
            last = str(arguments[-1] if event == "tempfile.mkdtemp" else arguments[1])
            if not last.startswith((str(place), str(place.with_name(f".{place.name}.")))):
                return
            place.mkdir(exist_ok=True)
            (place / "thesis.tex").write_text("mine")

        sys.addaudithook(fill)
        return work()

    return disturbed
