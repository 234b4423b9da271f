"""What happens inside attention: entropy, logits, norms, sinks, cosines; per layer and head."""

from normattn.kernels.cosines import BINS, CosineCounts
from normattn.lab.diagnostics.angles import Stage, unseen_angles
from normattn.lab.diagnostics.attention import MOST_TOKENS, attention_of, attention_weights
from normattn.lab.diagnostics.collector import Collector, collecting, layer_names
from normattn.lab.diagnostics.inspection import inspect_model
from normattn.lab.diagnostics.keys import (
    Seen,
    count_cosines,
    rank_correlation,
    received_attention,
    watching,
)
from normattn.lab.diagnostics.lines import DiagnosticsLine, read_diagnostics
from normattn.lab.diagnostics.mechanism import measure_mechanism
from normattn.lab.diagnostics.probe import DiagnosticsProbe

__all__ = [
    "BINS",
    "MOST_TOKENS",
    "Collector",
    "CosineCounts",
    "DiagnosticsLine",
    "DiagnosticsProbe",
    "Seen",
    "Stage",
    "attention_of",
    "attention_weights",
    "collecting",
    "count_cosines",
    "inspect_model",
    "layer_names",
    "measure_mechanism",
    "rank_correlation",
    "read_diagnostics",
    "received_attention",
    "unseen_angles",
    "watching",
]
