"""Command lines with random options, each in a fork."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import chdir
from itertools import pairwise
from pathlib import Path

from fault_campaign.campaign import Campaign, Count
from fault_campaign.commands import Setting, make_setting, work_of
from fault_campaign.limits import limited
from fault_campaign.processes import in_groups

VALUES = (
    *("", "0", "-1", "1", "2", "1.5", "nan", "inf", "-inf", "1e999", "9" * 25, "9" * 5000, "x"),
    *("[" * 300, "x" * 300, "\udcff", "~nobody-here/x", "/dev/zero", "/dev/null/x", "a,b", "1,1"),
    *("100000000", "99999999", "KNA", "YaRN", "ReRoPE(window=9)", "KNA-YaRN(factor=1e999)"),
    *("model.dim=9999999999", "steps=0", "a=[[[[1]]]]", "model.layers=99999999", "no.such=1"),
)
OPTIONS = {
    "train": "--score --steps --length --dim --layers --heads --placement "
    "--batch-size --lr --precision --seed --preset --set --corpus",
    "evaluate": "--methods --protocols --multiples --max-windows --seed",
    "generate": "--method --max-new-tokens --temperature --top-k --top-p --stop --seed",
    "inspect": "--text --method --length --windows --bins --attention --out --seed",
    "report": "--out --colour",
    "extend": "--lengths --methods --factor --window --dtype --seed --text",
    "reproduce keynorm": "--variants --methods --seeds --preset --set --corpus --jobs",
    "reproduce window": "--seeds --preset --set --corpus",
}


def run(campaign: Campaign) -> Iterator[Count]:
    """Lines of one to three options, for commands that need little work."""
    setting = make_setting(campaign.folder / "setting", foreign=False)
    ended = Count(
        "a command line ends with exit code 0, or 2 and one sentence, within 20 s and 2 GB, and "
        "writes only where it should"
    )
    source = campaign.random
    lines = [_line(source, setting) for _ in range(1_000 if campaign.full else 24)]
    here = campaign.folder / "here"
    here.mkdir()
    with chdir(here):
        ends = in_groups([limited(work_of(each)) for each in lines])
        for line, end in zip(lines, ends, strict=True):
            held = end.code == 0 or (end.code == 2 and end.orderly and len(end.said) < 4000)
            ended.check(held, f"{[each[:40] for each in line]}: {end.shown}")
            if not campaign.has_time:
                break
    left = {path.name for path in here.iterdir()} - set(_told(lines))
    ended.check(not left, f"nobody was told to write {sorted(left)}")
    yield ended


def _told(lines: list[list[str]]) -> Iterator[str]:
    """The names in the current directory that `--out` gives."""
    for line in lines:
        for option, value in pairwise(line):
            if option == "--out" and value:
                yield Path(value).parts[0]


def _line(source: random.Random, setting: Setting) -> list[str]:
    name = source.choice(list(OPTIONS))
    line = name.split()
    if name in ("evaluate", "generate", "inspect", "report"):
        line.append(str(source.choice([setting.run, setting.run, setting.text, "/nowhere"])))
    if name == "extend":
        line.append(str(source.choice([setting.run / "model", setting.text, "/dev/zero"])))
    if name == "generate":
        line += ["--prompt", "word1"]
    if name == "report":
        line += ["--out", str(setting.folder / "report")]
    if name in ("train", "reproduce keynorm", "reproduce window"):
        line.append("--plan")
    if name.startswith("reproduce"):
        # Larger presets are measured in subprocesses first, which takes seconds.
        line += ["--preset", str(setting.preset)]
    options = OPTIONS[name].split()
    for option in source.sample(options, min(len(options), source.randint(1, 3))):
        line += [option, source.choice(VALUES)]
    return line
