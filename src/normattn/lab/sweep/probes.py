"""What a configuration asks to look into while it trains."""

from __future__ import annotations

from pathlib import Path

from normattn.lab.diagnostics import DiagnosticsProbe
from normattn.lab.training import LoopConfig
from normattn.lab.training.reports import Probe


def diagnostics_probes(config: LoopConfig, run: Path) -> tuple[Probe, ...]:
    """A probe of the run in `run`, at every layer, where `inspect_every` asks for one."""
    if not config.inspect_every:
        return ()
    return (DiagnosticsProbe(config.inspect_every, run=run),)
