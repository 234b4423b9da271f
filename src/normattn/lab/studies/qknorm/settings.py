"""What a preset of the QK-Norm study says: the scores, the learning-rate sweep, the images."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from normattn.lab.studies.qknorm.images import SCORES as IMAGE_SCORES
from normattn.lab.studies.qknorm.rows import TRAINED_WITH
from normattn.lab.studies.qknorm.translation import TranslationSettings
from normattn.lab.sweep.settings import StudyPreset, merged
from normattn.settings import Settings

SCORES = (
    *("Baseline", "QKLayerNorm", "QKRMSNorm", "QLayerNorm", "QRMSNorm", "KLayerNorm", "KRMSNorm"),
    *("QNA", "KNA", "CosA", "QKNorm2020", "QKBatchNorm", "QKInstanceNorm"),
    *("Baseline+QK-Clip", "Baseline+Muon", "QKRMSNorm+Muon", "Baseline+Muon+QK-Clip"),
)
"""The table's rows unless said."""
SWEPT = ("Baseline", "QKRMSNorm", "QKLayerNorm", "KNA", *SCORES[-4:])
"""The rows of the learning-rate sweep unless said."""
MULTIPLES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
VARIED = ("score", "decoder_score", "cross_score")
"""The settings of a model that the tables vary."""


def _refuse_varied(training: dict[str, Any]) -> dict[str, Any]:
    """`training` itself; `ValueError` where it sets what the tables vary."""
    if "seed" in training or any(name in training.get("model", {}) for name in VARIED):
        raise ValueError("scores and the seed are varied by the tables, not set by a preset")
    return training


class Rates(Settings):
    """Which `scores` are trained at which `multiples` of the learning rate."""

    scores: tuple[str, ...] = SWEPT
    multiples: tuple[Annotated[float, Field(gt=0)], ...] = MULTIPLES

    @field_validator("multiples")
    @classmethod
    def _rising(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value or list(value) != sorted(set(value)):
            raise ValueError(f"multiples must rise, got {list(value)}")
        return value


class TranslationRates(Rates):
    """The sweep of the translation models.

    `training` is laid over the preset's: these trainings may be shorter. `max_sentences` of the
    test set are read at the end.
    """

    training: dict[str, Any] = Field(default_factory=dict)
    max_sentences: int | None = Field(default=None, ge=2)

    _no_varied_field = field_validator("training")(_refuse_varied)


class ImageRates(Rates):
    """The sweep of the Vision Transformers, beside the table's trainings at ×1."""

    scores: tuple[str, ...] = ()
    multiples: tuple[Annotated[float, Field(gt=1)], ...] = MULTIPLES[1:]


class VisionSettings(Settings):
    """The Vision Transformers: `training` is a `VisionTrainingConfig` less score and seed.

    `seeds` says how many are trained of each row, where --seeds does not (None: as many as of the
    tables); the sweep `rates` has the tables' seeds.
    """

    training: dict[str, Any]
    seeds: int | None = Field(default=None, ge=1)
    scores: tuple[str, ...] = IMAGE_SCORES
    rates: ImageRates = ImageRates()

    _no_varied_field = field_validator("training")(_refuse_varied)


class QKNormPreset(StudyPreset):
    """One whole setting of the study; `training` holds fields of `TranslationConfig`.

    Scores and seeds are no part of `training`: they are what the tables vary. Without `rates` or
    `vision` that part is left out. `trained_with`: the settings behind each name that a row may add
    to its score with a +, laid over those of `normattn.lab.studies.qknorm.rows`.
    """

    training: dict[str, Any]
    scores: tuple[str, ...] = SCORES
    evaluation: TranslationSettings = TranslationSettings()
    rates: TranslationRates | None = None
    vision: VisionSettings | None = None
    trained_with: dict[str, dict[str, Any]] = Field(default_factory=dict, validate_default=True)

    @field_validator("trained_with")
    @classmethod
    def _complete(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        return {
            name: _refuse_varied(training) for name, training in merged(TRAINED_WITH, value).items()
        }

    _no_varied_field = field_validator("training")(_refuse_varied)
