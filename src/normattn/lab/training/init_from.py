"""What a run leaves of its data, and training that continues from a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar, runtime_checkable

from pydantic import Field

from normattn.errors import InputError
from normattn.io import expand_path, read_object, write_json
from normattn.lab.data.tokeniser import Tokeniser
from normattn.lab.data.tokens import TokenData
from normattn.models import CausalLM, CausalLMConfig
from normattn.models.config import MaskedLMConfig
from normattn.models.masked_lm import MaskedLM
from normattn.models.pretrained import CONFIG_FILE, load_as
from normattn.settings import Settings

CORPUS_FILE = "corpus.json"
TOKENISER_FILE = "tokeniser.json"


@runtime_checkable
class HasFingerprint(Protocol):
    """Prepared data; the fingerprint is a hash of all of it."""

    @property
    def fingerprint(self) -> str:  # noqa: D102
        ...


def begin_corpus(data: object, out: Path) -> None:
    """Write `corpus.json` at the start of a run, or refuse to go on with other data than it says.

    It holds the `fingerprint` of the data and, of tokens, the `sources` of the text with their
    versions. Files behind a corpus can change while a run is stopped: it would go on with the ids
    of another tokeniser. Raises `InputError`.
    """
    if not isinstance(data, HasFingerprint):
        return
    refuse_other_data(data, out, "begun")
    sources = dict(data.sources) if isinstance(data, TokenData) else {}
    write_json(out / CORPUS_FILE, {"fingerprint": data.fingerprint, "sources": sources})


def refuse_other_data(data: HasFingerprint, run: Path, was: str = "trained") -> None:
    """`InputError` where the run in `run` was trained on other data than `data`.

    Its model would read the ids of another tokeniser, and documents that it has seen. A run from
    before there was a `corpus.json` says nothing, and passes.
    """
    record = run / CORPUS_FILE
    if record.is_file() and read_object(record).get("fingerprint") != data.fingerprint:
        raise InputError(
            f"{run} was {was} on other data: {record} has another fingerprint than the current "
            "corpus; restore the corpus, or train in a new directory"
        )


KEPT = "kept"
"""The folder of a run in which models of chosen steps lie."""
AnyConfig = TypeVar("AnyConfig", CausalLMConfig, MaskedLMConfig)
AnyModel = TypeVar("AnyModel", CausalLM, MaskedLM)


class Continuation(Settings):
    """Where training goes on from, and how.

    start: the folder of a saved model. weights: the SHA-256 of its weights, which decide the run
    (the folder may move). method: inference-time components, switched on while it trains, such as
    "PI(factor=4)"; they are no part of the saved model. length: tokens of a training sequence,
    None for the model's train_length; whatever the score takes from its training length (log-n,
    a window) stays as it was trained. trained: the score that the saved model was trained with,
    where `model.score` is another one, which takes its place from the first step on (None: they
    are one score); what the new score has beyond the old one, such as gains, starts fresh.
    """

    start: str
    weights: str = Field(pattern=r"^[0-9a-f]{64}$")
    method: str = ""
    length: int | None = Field(default=None, ge=2)
    # Left out of a dump where it is off: runs that were made before it stay the same.
    trained: Annotated[str | None, Field(exclude_if=lambda score: score is None)] = None

    @classmethod
    def of(
        cls,
        start: Path,
        method: str = "",
        length: int | None = None,
        trained: str | None = None,
    ) -> Continuation:
        """Go on from the model saved in `start`, with the weights that it holds now."""
        digest = read_object(start / CONFIG_FILE).get("weights_sha256")
        if not isinstance(digest, str):
            raise InputError(f"{start / CONFIG_FILE} does not describe a saved model")
        return cls(start=str(start), weights=digest, method=method, length=length, trained=trained)

    def saved(self, model: AnyConfig) -> AnyConfig:
        """The settings of the saved model: `model` with the score that it was trained with."""
        if self.trained is None:
            return model
        return type(model)(**{**model.model_dump(mode="json"), "score": self.trained})

    def check(self, model: CausalLMConfig) -> None:
        """Raise `InputError` when the method cannot be applied to the model's score."""
        model.score.with_method(self.method).resolve(train_length=model.train_length)


def refuse_other_tokeniser(continued: Continuation | None, data: TokenData) -> None:
    """`InputError` where the run that the saved model is of left another tokeniser than `data` has.

    Its weights know tokens by their ids. Nothing is compared where no tokeniser was saved.
    """
    if continued is None:
        return
    start = expand_path(continued.start)
    run = start.parent.parent if start.parent.name == KEPT else start.parent
    left = run / TOKENISER_FILE
    if not left.is_file():
        return
    now = None if data.tokeniser is None else data.tokeniser.fingerprint
    if Tokeniser.load(left).fingerprint != now:
        raise InputError(
            f"the model in {start} was trained with the tokeniser {left}, and this corpus has "
            "another: token ids would mean other tokens; continue on the corpus that it was "
            "trained on"
        )


def new_model(kind: type[AnyModel], config: Any, continued: Continuation | None) -> AnyModel:
    """The model of these settings that training begins with: fresh, or the one of `continued`.

    Raises `InputError` when the saved model has other settings or other weights than the
    configuration says, or holds what the new score has no place for.
    """
    if continued is None:
        return kind(config)
    start = expand_path(continued.start)
    weights = Continuation.of(start).weights
    if weights != continued.weights:
        raise InputError(
            f"the model in {start} holds other weights than those that this run started with "
            f"({weights[:12]}… there, {continued.weights[:12]}… in its configuration)"
        )
    model = load_as(kind, start)
    if model.config != continued.saved(config):
        raise InputError(
            f"the model in {start} has other settings than `model` says; continued training uses "
            "them as they were saved"
        )
    if continued.trained is not None:
        saved, model = model, kind(config)
        _, without_place = model.load_state_dict(saved.state_dict(), strict=False)
        if without_place:
            raise InputError(
                f"a model trained with {saved.config.score} cannot continue with {config.score}, "
                f"which does not have {', '.join(without_place)}"
            )
    if isinstance(model, CausalLM):
        model.using(continued.method)
    return model
