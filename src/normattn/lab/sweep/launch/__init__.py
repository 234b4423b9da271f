"""Where the cells of a sweep run: this machine, a Slurm cluster, a Ray cluster; each a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from normattn.errors import unknown
from normattn.lab.sweep.launch.base import Launcher
from normattn.lab.sweep.launch.local import Local
from normattn.lab.sweep.launch.ray_cluster import Ray
from normattn.lab.sweep.launch.slurm import Slurm
from normattn.lab.sweep.settings import validated

LAUNCHERS: dict[str, type[Launcher]] = {kind.name: kind for kind in (Local, Slurm, Ray)}
PREFIX = "launcher."


def launcher(name: str, settings: Mapping[str, Any]) -> Launcher:
    """The launcher called `name` with these settings; `InputError` names what it does not have."""
    if name not in LAUNCHERS:
        raise unknown("launcher", name, LAUNCHERS)
    return validated(LAUNCHERS[name], settings, f"the {name} launcher")


def apart(changes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the launcher (`launcher.NAME`, by NAME), and those of the study."""
    own = {k.removeprefix(PREFIX): v for k, v in changes.items() if k.startswith(PREFIX)}
    return own, {k: v for k, v in changes.items() if not k.startswith(PREFIX)}
