"""Training that goes on from a saved model: its weights, a method switched on, another length."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from normattn.errors import InputError
from normattn.models import CausalLM, CausalLMConfig
from normattn.models.pretrained import CONFIG_FILE, load_model
from normattn.structured import read_object

if TYPE_CHECKING:
    from normattn.training.config import TrainingConfig


class Continuation(BaseModel):
    """Where training goes on from, and how.

    start: the folder of a saved model. weights: the SHA-256 of its weights, which decide the run
    (the folder may move). method: post-hoc parts that are switched on while it trains, such as
    "PI(factor=4)"; they are no part of the saved model. length: tokens of a training sequence,
    None for the model's train_length; whatever the score takes from its training length (log-n,
    a window) stays as it was trained.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    start: str
    weights: str = Field(pattern=r"^[0-9a-f]{64}$")
    method: str = ""
    length: int | None = Field(default=None, ge=2)

    @classmethod
    def of(cls, start: Path, method: str = "", length: int | None = None) -> Continuation:
        """Go on from the model saved in `start`, with the weights that it holds now."""
        digest = read_object(start / CONFIG_FILE).get("weights_sha256")
        if not isinstance(digest, str):
            raise InputError(f"{start / CONFIG_FILE} does not describe a saved model")
        return cls(start=str(start), weights=digest, method=method, length=length)

    def check(self, model: CausalLMConfig) -> None:
        """Raise `InputError` when the method cannot be applied to the model's score."""
        model.score.with_method(self.method).resolve(train_length=model.train_length)


def new_model(config: TrainingConfig) -> CausalLM:
    """The model that training begins with: fresh weights, or those of `config.continued`.

    Raises `InputError` when the saved model has other settings or other weights than the
    configuration says.
    """
    if config.continued is None:
        return CausalLM(config.model)
    start = Path(config.continued.start)
    found = Continuation.of(start).weights
    if found != config.continued.weights:
        raise InputError(
            f"the model in {start} holds other weights than this run began with "
            f"({found[:12]}… there, {config.continued.weights[:12]}… in its configuration)"
        )
    model = load_model(start)
    if model.config != config.model:
        raise InputError(
            f"the model in {start} has other settings than `model` says; training that goes on "
            "takes them as they were saved"
        )
    model.using(config.continued.method)
    return model
