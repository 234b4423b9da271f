"""What a run ran on: versions, threads, processor. A change at a resume is recorded and said."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from normattn.errors import InputError
from normattn.io import read_object, write_json
from normattn.terminal import warn

PACKAGES = ("normattn", "torch", "numpy", "tokenizers", "safetensors")


def describe_environment(**extra: Any) -> dict[str, Any]:
    """Everything that the digits of a run may depend on, as JSON values; `extra` is added.

    Keys: python, one version per package, threads (torch's, in this process), cpu (the name),
    cpu_capability (the vector instructions that torch uses), platform.
    """
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "threads": torch.get_num_threads(),
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "platform": f"{sys.platform}-{platform.machine()}",
        **extra,
    }


def record_environment(path: Path, current: dict[str, Any], step: int) -> list[str]:
    """Store `current` in the file `path`; return the differences from the last one stored.

    The file holds `{"started": …, "resumed": [{"step": …, "environment": …}]}`; a resume is added
    only where something changed. A damaged file is begun anew, with a warning, because a run's
    results do not depend on it. Each difference reads "torch 2.12.0 → 2.13.0".
    """
    if step == 0 or not path.exists():
        write_json(path, {"started": current, "resumed": []})
        return []
    stored = _stored(path)
    last = stored["resumed"][-1]["environment"] if stored["resumed"] else stored["started"]
    changed = [
        f"{key} {last.get(key, 'unknown')} → {current.get(key, 'unknown')}"
        for key in [*current, *(key for key in last if key not in current)]
        if last and last.get(key) != current.get(key)
    ]
    if changed or not last:
        resumed = [*stored["resumed"], {"step": step, "environment": current}]
        write_json(path, {**stored, "resumed": resumed})
    return changed


def _stored(path: Path) -> dict[str, Any]:
    """What is on record; where that is damaged, a record that begins anew, and a warning."""
    try:
        stored = read_object(path)
        begun, resumed = stored["started"], stored["resumed"]
        whole = isinstance(begun, dict) and isinstance(resumed, list)
        if whole and all(isinstance(record["environment"], dict) for record in resumed):
            return stored
        problem = f"{path} is damaged: expected started and resumed"
    except (LookupError, TypeError):
        problem = f"{path} is damaged: expected started and resumed"
    except InputError as error:
        problem = str(error)
    warn(f"warning: {problem}; what the run ran on before is lost")
    return {"started": {}, "resumed": []}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _cpu_name() -> str:
    """The processor's name; Linux keeps it in /proc/cpuinfo, where `platform` does not look."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", errors="replace")
    except OSError:
        return platform.processor() or "unknown"
    names = (line.partition(":")[2] for line in text.splitlines() if line.startswith("model name"))
    return next(names, "").strip() or platform.processor() or "unknown"
