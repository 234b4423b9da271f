"""What a configuration asks to look into while it trains."""

from __future__ import annotations

from normattn.diagnostics import DiagnosticsProbe
from normattn.training import LoopConfig
from normattn.training.reports import Probe


def diagnostics_probes(config: LoopConfig) -> tuple[Probe, ...]:
    """A probe of every layer's attention where `inspect_every` asks for one."""
    return (DiagnosticsProbe(config.inspect_every),) if config.inspect_every else ()
