"""The record of a run's data, and training that continues from a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from normattn.errors import InputError
from normattn.io import expand_path, read_object, write_json
from normattn.lab.data.tokeniser import Tokeniser
from normattn.lab.data.tokens import TokenData
from normattn.models import CausalLM
from normattn.models.config import StackConfig
from normattn.models.pretrained import CONFIG_FILE, Model, load_as
from normattn.settings import Settings
from normattn.terminal import warn

CORPUS_FILE = "corpus.json"
TOKENISER_FILE = "tokeniser.json"


def record_corpus(data: Any, out: Path) -> None:
    """Write `corpus.json` at the start of a run; `InputError` if it exists with other data.

    The file has the `fingerprint` of the data and, for tokens, the `sources` of the text. The files
    of a corpus may change while a run is stopped; a resumed run would mix token ids. Warns of an
    empty test split.
    """
    if not len(data.test):
        warn(
            "warning: the test split has no document, so the trained model cannot be evaluated: "
            "use more documents, or a larger data.test_fraction"
        )
    refuse_other_data(data, out, "begun")
    sources = dict(getattr(data, "sources", {}))
    write_json(out / CORPUS_FILE, {"fingerprint": data.fingerprint, "sources": sources})


def refuse_other_data(data: Any, run: Path, was: str = "trained") -> None:
    """Raise `InputError` if the run in `run` was trained on other data than `data`.

    Token ids would differ, and test documents might have been trained on. A run without a
    `corpus.json`, from an old version, passes.
    """
    record = run / CORPUS_FILE
    if record.is_file() and read_object(record).get("fingerprint") != data.fingerprint:
        raise InputError(
            f"{run} was {was} on other data: {record} has another fingerprint than the current "
            "corpus; restore the corpus, or train in a new directory"
        )


KEPT_MODELS = "kept"
"""The folder of a run with the models of the steps in `keep`."""


class Continuation(Settings):
    """The saved model that training continues from, and how.

    - start: the folder of the saved model.
    - weights: the SHA-256 of its weights, which identify it if the folder moves.
    - method: inference-time components that are active in training, such as "PI(factor=4)". They
      are not saved with the model.
    - length: tokens of a training sequence, None for the model's train_length. What the score
      derives from its training length (log-n, a window) does not change.
    - trained: the score of the saved model if `model.score` replaces it, else None. Parameters that
      only the new score has, such as gains, are initialised.
    """

    start: str
    weights: str = Field(pattern=r"^[0-9a-f]{64}$")
    method: str = ""
    length: int | None = Field(default=None, ge=2)
    # Not dumped if None, so that older runs keep their digests.
    trained: Annotated[str | None, Field(exclude_if=lambda score: score is None)] = None

    @classmethod
    def from_model(
        cls, start: Path, method: str = "", length: int | None = None, trained: str | None = None
    ) -> Continuation:
        """Continue from the model saved in `start`, with its present weights."""
        digest = read_object(start / CONFIG_FILE).get("weights_sha256")
        if not isinstance(digest, str):
            raise InputError(f"{start / CONFIG_FILE} does not describe a saved model")
        return cls(start=str(start), weights=digest, method=method, length=length, trained=trained)

    def saved_config(self, model: Any) -> Any:
        """Return the settings of the saved model: `model` with the score it was trained with."""
        if self.trained is None:
            return model
        return type(model)(**{**model.model_dump(mode="json"), "score": self.trained})

    def check(self, model: StackConfig) -> None:
        """Raise `InputError` if the method cannot be applied to the model's score."""
        if not model.causal and (self.method or self.length):
            raise InputError("continued: a masked language model goes on without method and length")
        model.score.with_method(self.method).resolve(train_length=model.train_length)


def refuse_other_tokeniser(continued: Continuation | None, data: TokenData) -> None:
    """Raise `InputError` if the saved model's run has another tokeniser than `data`."""
    if continued is None:
        return
    start = expand_path(continued.start)
    run = start.parent.parent if start.parent.name == KEPT_MODELS else start.parent
    saved = run / TOKENISER_FILE
    current = None if data.tokeniser is None else data.tokeniser.fingerprint
    if saved.is_file() and Tokeniser.load(saved).fingerprint != current:
        raise InputError(
            f"the model in {start} was trained with the tokeniser {saved}, and this corpus has "
            "another: token ids would mean other tokens; continue on the corpus that it was "
            "trained on"
        )


def new_model(kind: type[Model], config: Any, continued: Continuation | None) -> Model:
    """Return the initial model: a new one, or the saved model of `continued`.

    Raises `InputError` if the saved model has other settings or weights than configured, or
    parameters that the new score does not have.
    """
    if continued is None:
        return kind(config)
    start = expand_path(continued.start)
    weights = Continuation.from_model(start).weights
    if weights != continued.weights:
        raise InputError(
            f"the model in {start} holds other weights than those that this run started with "
            f"({weights[:12]}… there, {continued.weights[:12]}… in its configuration)"
        )
    model = load_as(kind, start)
    trained: Any = model.config
    if trained != continued.saved_config(config):
        raise InputError(
            f"the model in {start} has other settings than `model` says; continued training uses "
            "them as they were saved"
        )
    if continued.trained is not None:
        saved, model = model, kind(config)
        _, unexpected = model.load_state_dict(saved.state_dict(), strict=False)
        if unexpected:
            raise InputError(
                f"a model trained with {trained.score} cannot continue with {config.score}, "
                f"which does not have {', '.join(unexpected)}"
            )
    if isinstance(model, CausalLM):
        model.using(continued.method)
    return model
