"""What the RealFormer study measures in one trained encoder, as JSON: sums, never rates."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from normattn.reports.record_file import read_file, write_file

FloatRows = tuple[tuple[float, ...], ...]
Part = Literal["table", "grid"]
_WHAT = "of the RealFormer study"


class Setting(BaseModel):
    """What was trained: the row of the table and all that rows differ in.

    `part` "table" is a row of the table, "grid" a cell of the robustness grid. `size` names the
    model's size, `row` the placement and score as the table calls them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    part: Part
    row: str
    size: str
    seed: int
    placement: str
    score: str
    shared: bool
    layers: int = Field(ge=1)
    dim: int = Field(ge=1)
    parameters: int = Field(ge=1)
    steps: int = Field(ge=1)
    learning_rate: float
    dropout: float
    warmup: int


class Depth(BaseModel):
    """What is seen layer by layer: sums over the texts of each document (the first axis).

    `correct`: hits after each layer, the last of them the model's own; exits are scored on `tokens`
    too. `variance` (layers + 1): variance of the residual stream over its features, mean over
    tokens, of what the first layer reads and of each layer's output. `entropy`: of attention, in
    nats, mean over heads and tokens. `agreement` (layers − 1): 1 − the total variation distance
    between the attention of a layer and of the one below, head by head, and `agreement_mean` of the
    mean over heads. `gradients`: for each batch of texts the norm of the loss's gradient by each
    layer's parameters; `gradients_start`: before training; both empty where layers share weights.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    correct: tuple[tuple[int, ...], ...]
    variance: FloatRows
    entropy: FloatRows
    agreement: FloatRows
    agreement_mean: FloatRows
    gradients: FloatRows
    gradients_start: FloatRows


class EncoderRecord(BaseModel):
    """One trained encoder on the held-out texts; `data` and `weights` are fingerprints.

    `documents` names each document, `windows` counts its texts, `tokens` its chosen tokens and
    `correct` the hits among them; `loss` is their sum in nats and `unigram_loss` that of the words'
    frequencies in the training text. `depth` is None in the robustness grid.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal[1] = 1
    setting: Setting
    weights: str
    data: str
    train_length: int = Field(ge=1)
    documents: tuple[str, ...] = Field(min_length=1)
    windows: tuple[int, ...]
    tokens: tuple[int, ...]
    correct: tuple[int, ...]
    loss: tuple[float, ...]
    unigram_loss: tuple[float, ...]
    depth: Depth | None = None

    @model_validator(mode="after")
    def _consistent(self) -> EncoderRecord:
        count = len(self.documents)
        for name in ("windows", "tokens", "correct", "loss", "unigram_loss"):
            if len(getattr(self, name)) != count:
                raise ValueError(f"{name} is not of {count} documents")
        if self.depth is not None:
            layers = self.setting.layers
            widths = {"correct": layers, "variance": layers + 1, "entropy": layers}
            widths |= {"agreement": layers - 1, "agreement_mean": layers - 1}
            for name, width in widths.items():
                rows = getattr(self.depth, name)
                if len(rows) != count or any(len(row) != width for row in rows):
                    raise ValueError(f"depth.{name} is not of {count} documents by {width}")
        return self


class Failure(BaseModel):
    """A training whose loss stopped being finite: at which step, and where it began."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal[1] = 1
    setting: Setting
    step: int
    where: str


def write_encoder(path: Path, record: EncoderRecord | Failure) -> None:
    """Write one record, whole or not at all."""
    write_file(path, record)


def read_encoder(path: Path) -> EncoderRecord:
    """Read one record; `InputError` names the file when it cannot be used."""
    return read_file(path, EncoderRecord, _WHAT)


def read_failure(path: Path) -> Failure:
    """Read what was left of a training that diverged; raises as `read_encoder`."""
    return read_file(path, Failure, _WHAT)
