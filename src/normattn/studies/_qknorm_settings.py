"""What a preset of the QK-Norm study says: rows, the ladder, the Vision Transformers."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from normattn.studies._translation import TranslationSettings
from normattn.studies._vision import VARIANTS as VISION_SCORES
from normattn.sweep.settings import Settings, StudyPreset

SCORES = (
    *("Baseline", "QKLayerNorm", "QKRMSNorm", "QLayerNorm", "QRMSNorm", "KLayerNorm", "KRMSNorm"),
    *("QNA", "KNA", "CosA", "QKNorm2020", "QKBatchNorm", "QKInstanceNorm"),
)
"""The table's rows unless said."""
LADDER = ("Baseline", "QKRMSNorm", "QKLayerNorm", "KNA")
RATES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
VARIED = ("score", "decoder_score", "cross_score")
"""The settings of a model that the tables vary."""


def _refuse_varied(training: dict[str, Any]) -> dict[str, Any]:
    """`training` itself; `ValueError` where it sets what the tables vary."""
    if "seed" in training or any(name in training.get("model", {}) for name in VARIED):
        raise ValueError("scores and the seed are varied by the tables, not set by a preset")
    return training


class LadderSettings(Settings):
    """Which `scores` are trained at which multiples of the learning rate, the `rates`.

    `training` is laid over the preset's: the ladder's trainings may be shorter. `max_sentences` of
    the test set are read at the end.
    """

    scores: tuple[str, ...] = LADDER
    rates: tuple[Annotated[float, Field(gt=0)], ...] = RATES
    training: dict[str, Any] = Field(default_factory=dict)
    max_sentences: int | None = Field(default=None, ge=2)

    _no_varied_field = field_validator("training")(_refuse_varied)

    @field_validator("rates")
    @classmethod
    def _rising(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value or list(value) != sorted(set(value)):
            raise ValueError(f"rates must rise, got {list(value)}")
        return value


class VisionSettings(Settings):
    """The Vision Transformers: `training` is a `VisionTrainingConfig` less score and seed.

    `seeds` says how many are trained of each row, where --seeds does not (None: as many as of the
    tables); `ladder` are the scores that are also trained at the multiples `rates` of the learning
    rate, with the tables' seeds.
    """

    training: dict[str, Any]
    seeds: int | None = Field(default=None, ge=1)
    scores: tuple[str, ...] = VISION_SCORES
    ladder: tuple[str, ...] = ()
    rates: tuple[Annotated[float, Field(gt=1)], ...] = RATES[1:]

    _no_varied_field = field_validator("training")(_refuse_varied)


class QKNormPreset(StudyPreset):
    """One whole setting of the study; `training` holds fields of `TranslationConfig`.

    Scores and seeds are no part of `training`: they are what the tables vary. Without `ladder` or
    `vision` that part is left out.
    """

    training: dict[str, Any]
    scores: tuple[str, ...] = SCORES
    evaluation: TranslationSettings = TranslationSettings()
    ladder: LadderSettings | None = None
    vision: VisionSettings | None = None

    _no_varied_field = field_validator("training")(_refuse_varied)
