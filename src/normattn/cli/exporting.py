"""A finished run as a folder that transformers loads: model, tokeniser, model card."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from normattn import io
from normattn.cli.model_card import card_text
from normattn.cli.report_runs import of_runs
from normattn.errors import InputError
from normattn.io import read_object, write_bytes
from normattn.lab.report.charts import png
from normattn.lab.report.terminal import tell
from normattn.lab.report.view import View
from normattn.lab.runs import RunDirectory, require_finished, unchanged
from normattn.lab.stats import MeasurementStore
from normattn.lab.studies import find
from normattn.lab.studies.language import asked_alone
from normattn.lab.studies.lm_report import history_figure
from normattn.lab.sweep.collect import history
from normattn.lab.sweep.run import EVALUATIONS
from normattn.lab.training import TrainingConfig
from normattn.lab.training.config import LoopConfig
from normattn.lab.training.tasks.classification import (
    LABELS,
    VOCABULARY,
    ClassificationConfig,
    ClassificationWorkload,
)
from normattn.lab.training.tasks.text import CausalWorkload, MaskedConfig, MaskedWorkload
from normattn.lab.training.tasks.workload import MODEL
from normattn.models.pretrained import load_any
from normattn.terminal import warn

TOKENISER = "tokeniser.json"
CARD = "README.md"
_REFUSED = {
    "translation": "its model has two tokenisers and two stacks, which transformers' encoder-"
    "decoder interface of one vocabulary cannot hold",
    "vision": "its model reads pixels that its own data preparation has normalised, for which "
    "transformers wants an image processor that is not written",
}


@dataclass(frozen=True)
class _Kind:
    """How runs of one kind are exported: `task` is transformers' name of what the model does."""

    config: type[LoopConfig]
    task: str
    auto: str


_KINDS = {
    CausalWorkload.kind: _Kind(TrainingConfig, "text-generation", "AutoModelForCausalLM"),
    MaskedWorkload.kind: _Kind(MaskedConfig, "fill-mask", "AutoModelForMaskedLM"),
    ClassificationWorkload.kind: _Kind(
        ClassificationConfig, "text-classification", "AutoModelForSequenceClassification"
    ),
}


def export_run(run: Path, out: Path, licence: str | None = None) -> None:
    """Write the model of the finished run in `run` to `out`, with its tokeniser and README.md.

    `licence` stands in the card; None says that none is stated. What was evaluated is tabulated
    into `out`/evaluation. The same run gives the same files. Raises `InputError` for a directory
    that is no run, a run that has not finished or is of a kind that transformers cannot hold, and
    an `out` that holds anything.
    """
    if importlib.util.find_spec("transformers") is None:
        raise InputError("exporting a run needs transformers: pip install normattn[hf]")
    stored, kind = _opened(run)
    _check_empty(out)
    config = kind.config.parse(stored.config, str(run / "config.json"))
    model = load_any(run / MODEL, config.model).eval()  # type: ignore[attr-defined]

    variant = config.model.score.variant_name  # type: ignore[attr-defined]
    losses = View(history(run, variant, config.seed))

    def fill(folder: Path) -> None:
        tokeniser = _write_model(model, config, run, folder)
        table = _write_evaluation(run, config, folder)
        write_bytes(folder / "figures" / "training_loss.png", png(history_figure(losses)))
        card = card_text(
            out.resolve().name, run, config, model, kind.task, kind.auto, tokeniser, table, licence
        )
        (folder / CARD).write_text(card, encoding="utf-8")

    io.write_directory(out, fill)
    tell(f"model, tokeniser and card: {out}")
    tell(f"load it: import normattn.hf; transformers.{kind.auto}.from_pretrained({str(out)!r})")


def _opened(run: Path) -> tuple[RunDirectory, _Kind]:
    stored = RunDirectory.existing(run)
    kind = _KINDS.get(stored.kind)
    if kind is None:
        reason = _REFUSED.get(stored.kind, "transformers has no counterpart of its model")
        raise InputError(f"{run} holds a run of kind {stored.kind!r}: {reason}")
    require_finished(run, "be exported")
    return stored, kind


def _check_empty(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; the export is written to a directory")
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty; choose a new or empty directory for the export")


def _write_model(model: nn.Module, config: LoopConfig, run: Path, folder: Path) -> bool:
    """The model, and the tokeniser, if there is one, which is then told."""
    # Only here: transformers is slow to import, and not everyone has it.
    from normattn.hf import wrap

    wrapped, tokeniser = wrap(model, **_labels(run, config)), _tokeniser(config, run)
    if tokeniser is not None:
        tokeniser.save_pretrained(folder)
        wrapped.config.pad_token_id = tokeniser.pad_token_id
        wrapped.config.eos_token_id = tokeniser.eos_token_id
    if tokeniser is not None and isinstance(config, TrainingConfig):
        wrapped.generation_config.eos_token_id = tokeniser.eos_token_id
        wrapped.generation_config.pad_token_id = tokeniser.pad_token_id
    wrapped.save_pretrained(folder)
    return tokeniser is not None


def _tokeniser(config: LoopConfig, run: Path) -> Any:
    """That of a run, as one of transformers; None where its tokens are numbers."""
    from normattn.cli.exported_tokeniser import as_transformers, word_pieces_as_transformers

    if isinstance(config, ClassificationConfig):
        data = config.data
        vocabulary = unchanged(run / VOCABULARY)
        return word_pieces_as_transformers(vocabulary, data.lower_case, data.max_tokens)
    if config.data.synthetic:  # type: ignore[attr-defined]
        return None
    mask = config.model.mask_id if isinstance(config, MaskedConfig) else None
    return as_transformers(unchanged(run / TOKENISER), mask)


def _labels(run: Path, config: LoopConfig) -> dict[str, Any]:
    """The names of a classifier's labels, as transformers keeps them."""
    if not isinstance(config, ClassificationConfig):
        return {}
    names = read_object(unchanged(run / LABELS))["labels"]
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }


def _write_evaluation(run: Path, config: LoopConfig, folder: Path) -> str | None:
    """The table and figures of what was measured, and their files; None where nothing was.

    Evaluations that cannot be compared in one table are left out, with a warning on stderr.
    """
    stores = (MeasurementStore(run / EVALUATIONS), asked_alone(run))
    if not isinstance(config, TrainingConfig) or not any(map(len, stores)):
        return None
    try:
        measured = of_runs([(None, run)])
    except InputError as error:
        warn(f"normattn: the model card has no evaluation: {error}")
        return None
    results = folder / "evaluation"
    drawn = find("reading").report(measured, results, {}).figures
    shown = [f"![{path.stem.replace('_', ' ')}](figures/{path.name})" for path in drawn]
    return "\n\n".join([(results / "table.md").read_text(encoding="utf-8").strip(), *shown])
