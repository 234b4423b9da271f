"""How a query and a key become a score: specification, normalisation, scale, rotary position."""

from normattn.score.module import FarPair, Prepared, Score
from normattn.score.positions import Positions
from normattn.score.spec import ScoreSpec

__all__ = ["FarPair", "Positions", "Prepared", "Score", "ScoreSpec"]
