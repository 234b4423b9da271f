"""What happens inside attention: entropy, logits, norms, sinks, cosines; per layer and head."""

from normattn.lab.diagnostics.collector import (
    Collector,
    DiagnosticsProbe,
    collecting,
    layer_names,
)
from normattn.lab.diagnostics.inspection import inspect_model

__all__ = ["Collector", "DiagnosticsProbe", "collecting", "inspect_model", "layer_names"]
