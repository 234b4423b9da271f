"""How a query and a key become a score: specification, normalisation, scale, rotary position."""

from normattn.score.module import Score
from normattn.score.positions import Positions
from normattn.score.spec import ScoreSpec

__all__ = ["Positions", "Score", "ScoreSpec"]
