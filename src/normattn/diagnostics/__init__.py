"""What happens inside attention: key norms, the attention keys receive, cosines."""

from normattn.diagnostics.cosines import BINS, CosineCounts, count_cosines
from normattn.diagnostics.mechanism import measure_mechanism
from normattn.diagnostics.ranks import rank_correlation
from normattn.diagnostics.received import received_attention
from normattn.diagnostics.watching import Seen, watching

__all__ = [
    "BINS",
    "CosineCounts",
    "Seen",
    "count_cosines",
    "measure_mechanism",
    "rank_correlation",
    "received_attention",
    "watching",
]
