"""Processes that race for one run directory, with a pause before every rename."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fault_campaign.campaign import Campaign, Count
from fault_campaign.commands import COMMANDS, judged_files, make_setting, work_of
from fault_campaign.processes import Ended, race
from normattn.errors import InputError
from normattn.lab.runs import RunDirectory

RACERS = 4
HELD_SECONDS = 0.004


class Config(BaseModel):
    """The configuration in which racers differ."""

    seed: int


def run(campaign: Campaign) -> Iterator[Count]:
    """Rounds with different and with identical configurations."""
    rounds = 400 if campaign.full else 25
    holder = Count("the configuration on disk is that of the process with the lock")
    somebody = Count("of processes racing for an empty directory, one runs")
    loser = Count("the others end with one sentence and exit code 2")
    for identical in (False, True):
        for number in range(rounds):
            if not campaign.has_time:
                break
            place = campaign.folder / f"{'same' if identical else 'other'}-{number}"
            seeds = [0] * RACERS if identical else list(range(RACERS))
            ends = race([_racer(place, seed, campaign.seed + number * 8 + at)
                         for at, seed in enumerate(seeds)])  # fmt: skip
            _judge(place, seeds, ends, holder, somebody, loser)
    yield from (holder, somebody, loser)
    if campaign.full:
        yield from _commands_at_once(campaign)


def _commands_at_once(campaign: Campaign) -> Iterator[Count]:
    """Whole commands, each started several times at once with the same output."""
    setting = make_setting(campaign.folder / "setting")
    names = ("train", "tokenise", "export", "extend", "report", "inspect")
    done = Count("of identical commands at once, one does the work, and its files are complete")
    other = Count("of identical commands at once, the others are done too or end with one sentence")
    for command in (each for each in COMMANDS if each.name in names):
        alone = setting.place(f"alone-{command.name}")
        race([work_of(command.line(setting, alone))])
        expected = judged_files(alone, command.judged)
        for number in range(2 * command.share):
            if not campaign.has_time:
                break
            out = setting.place(f"{command.name}-at-once-{number}")
            ends = race([work_of(command.line(setting, out)) for _ in range(RACERS)])
            found = judged_files(out, command.judged)
            whole = found == expected if command.deterministic else set(found) == set(expected)
            some = any(end.code == 0 for end in ends)
            other_files = sorted({*found.items()} ^ {*expected.items()})[:2]
            done.check(some and whole, f"{out.parent.name}: {other_files} {_shown(ends)}")
            for end in ends:
                held = end.code == 0 or (end.code == 2 and end.orderly)
                other.check(held, f"{out.parent.name}: {end.shown}")
    yield from (done, other)


def _racer(place: Path, seed: int, chance: int) -> Callable[[], int]:
    """Open the run, hold its lock for a moment, and check the configuration on disk meanwhile."""

    def racer() -> int:
        _pause_before_renames(random.Random(chance))
        try:
            run = RunDirectory.open(place, Config(seed=seed), "race")
            with run.lock():
                found = {_seed_in(place)}
                run.set_status("running", 0, 1)
                time.sleep(HELD_SECONDS)
                found.add(_seed_in(place))
        except InputError as error:
            print(error, file=sys.stderr)
            return 2
        return 0 if found == {seed} else 9

    return racer


def _judge(
    place: Path, seeds: list[int], ends: list[Ended], holder: Count, somebody: Count, loser: Count
) -> None:
    somebody.check(any(end.code in (0, 9) for end in ends), f"{place.name}: {_shown(ends)}")
    for seed, end in zip(seeds, ends, strict=True):
        if end.code in (0, 9):
            same = end.code == 0 and _seed_in(place) == seed
            holder.check(same, f"{place.name}: {seed} ran, {_seed_in(place)} is on disk")
        else:
            sentence = end.code == 2 and len(end.said.strip().splitlines()) == 1
            loser.check(sentence, f"{place.name}: {end.code}, {end.said.strip()[-300:]}")


def _seed_in(place: Path) -> int:
    stored: dict[str, Any] = json.loads((place / "config.json").read_text())
    return int(stored["config"]["seed"])


def _shown(ends: list[Ended]) -> str:
    return "; ".join(f"{end.code}: {end.said.strip()[-120:]}" for end in ends)


def _pause_before_renames(chance: random.Random) -> None:
    """Let every rename in this process wait for up to two milliseconds."""

    def pause(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename":
            time.sleep(chance.random() * 0.002)

    sys.addaudithook(pause)
