"""What happens inside attention: entropy, logits, norms, sinks, cosines; per layer and head."""

from normattn.diagnostics.collecting import Collector, collecting, layer_names
from normattn.diagnostics.cosines import count_cosines
from normattn.diagnostics.inspection import inspect_model
from normattn.diagnostics.mechanism import measure_mechanism
from normattn.diagnostics.probe import DiagnosticsProbe
from normattn.diagnostics.ranks import rank_correlation
from normattn.diagnostics.received import received_attention
from normattn.diagnostics.watching import Seen, watching
from normattn.kernels.cosines import BINS, CosineCounts

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
