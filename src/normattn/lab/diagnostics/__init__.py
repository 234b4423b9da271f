"""What happens inside attention: entropy, logits, norms, sinks, cosines; per layer and head."""

from normattn.kernels.cosines import BINS, CosineCounts
from normattn.lab.diagnostics.collecting import Collector, collecting, layer_names
from normattn.lab.diagnostics.cosines import count_cosines
from normattn.lab.diagnostics.inspection import inspect_model
from normattn.lab.diagnostics.key_norms import rank_correlation, received_attention
from normattn.lab.diagnostics.mechanism import measure_mechanism
from normattn.lab.diagnostics.probe import DiagnosticsProbe
from normattn.lab.diagnostics.watching import Seen, watching

__all__ = [
    "BINS",
    "Collector",
    "CosineCounts",
    "DiagnosticsProbe",
    "Seen",
    "collecting",
    "count_cosines",
    "inspect_model",
    "layer_names",
    "measure_mechanism",
    "rank_correlation",
    "received_attention",
    "watching",
]
