"""`normattn export`: a finished run as a folder that transformers loads, with a model card."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from torch import nn

from normattn import __version__, io
from normattn.cli import options
from normattn.cli.report_runs import measured_of_runs
from normattn.errors import InputError
from normattn.io import read_object, write_bytes
from normattn.lab.data.tokeniser import PAD, SEPARATOR, UNKNOWN, Tokeniser, WordPieces
from normattn.lab.report.tables import markdown_table
from normattn.lab.report.terminal import print_line
from normattn.lab.report.view import View
from normattn.lab.runs import RunDirectory, check_unchanged, read_metrics, require_finished
from normattn.lab.stats import MeasurementStore
from normattn.lab.studies import find
from normattn.lab.studies.language import standalone_store
from normattn.lab.studies.lm_report import history_figure
from normattn.lab.sweep.collect import history, training_identity
from normattn.lab.sweep.run import EVALUATIONS
from normattn.lab.training import TrainingConfig
from normattn.lab.training.config import LoopConfig
from normattn.lab.training.tasks.base import MODEL
from normattn.lab.training.tasks.classification import LABELS, VOCABULARY, ClassificationConfig
from normattn.lab.training.tasks.text import MaskedConfig
from normattn.models.flops import parameter_count
from normattn.models.pretrained import load_any
from normattn.terminal import warn

MASK = "<|mask|>"
_RUN_KINDS: dict[str, tuple[type[LoopConfig], str, str]] = {
    TrainingConfig.kind: (TrainingConfig, "text-generation", "AutoModelForCausalLM"),
    MaskedConfig.kind: (MaskedConfig, "fill-mask", "AutoModelForMaskedLM"),
    ClassificationConfig.kind: (
        *(ClassificationConfig, "text-classification", "AutoModelForSequenceClassification"),
    ),
}
"""The settings class, transformers' task and Auto class of each kind of run."""
_MODEL_FIELDS = ("score", "layers", "dim", "heads", "kv_heads", "block", "placement", "norm")
_TRAINING_FIELDS = ("steps", "batch_size", "precision", "seed")
_CARD = """---
{data}
---

# {name}

{kind} of normattn with the attention score `{score}`: {parameters:,} parameters,
training length {length} tokens. Corpus: `{corpus}`.

## Use

```python
import normattn.hf  # pip install 'normattn[hf]': makes the model known
from transformers import {imports}

model = {auto}.from_pretrained("{name}")
{tokeniser}```

## Training

{settings}

{steps:,} steps. {final}Exported by normattn {version}.

![Training loss by step](figures/training_loss.png)

{evaluation}## Licence

{licence}
"""


def export_run(args: options.Export) -> None:
    """Write the model of the finished run in `args.run`, with its tokeniser and model card."""
    run, out = args.run, args.out
    if importlib.util.find_spec("transformers") is None:
        raise InputError("exporting a run needs transformers: pip install normattn[hf]")
    stored = RunDirectory.existing(run)
    if stored.kind not in _RUN_KINDS:
        raise InputError(
            f"{run} holds a run of kind {stored.kind!r}, for whose model transformers has no "
            f"class; export takes a run of kind {', '.join(map(repr, _RUN_KINDS))}"
        )
    require_finished(run, "be exported")
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; the export is written to a directory")
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty; choose a new or empty directory for the export")
    config: Any = _RUN_KINDS[stored.kind][0].parse(stored.config, str(run / "config.json"))
    model = load_any(run / MODEL, config.model).eval()
    losses = View(history(run, training_identity(config.model.score.variant_name, config.seed)))

    def fill(folder: Path) -> None:
        from normattn.lab.report import charts  # Altair is slow to import.

        tokeniser = _write_model(model, config, run, folder)
        write_bytes(folder / "figures" / "training_loss.png", charts.png(history_figure(losses)))
        evaluation = _write_evaluation(run, config, folder)
        card = _model_card(args, config, model, tokeniser, evaluation)
        (folder / "README.md").write_text(card, encoding="utf-8")

    io.write_directory(out, fill)
    print_line(f"model, tokeniser and card: {out}")
    auto = _RUN_KINDS[stored.kind][2]
    print_line(f"load it: import normattn.hf; transformers.{auto}.from_pretrained({str(out)!r})")


def _model_card(
    args: options.Export, config: Any, model: nn.Module, tokeniser: bool, evaluation: str
) -> str:
    from huggingface_hub import ModelCardData  # It comes with transformers.

    _, task, auto = _RUN_KINDS[config.kind]
    corpus, fields = str(config.data.corpus), config.model_dump(mode="json")
    rows = [(name, fields["model"].get(name)) for name in _MODEL_FIELDS]
    rows += [(name, fields.get(name)) for name in _TRAINING_FIELDS]
    for group in ("optimiser", "schedule"):
        rows.append((group, ", ".join(f"{k} {v}" for k, v in fields[group].items() if v)))
    known = [(name, str(value)) for name, value in rows if value is not None]
    final, lines, name = "", read_metrics(args.run / "metrics.jsonl"), args.out.resolve().name
    if lines:
        last = lines[-1]
        final = f"Loss {last['loss']:.4f} at step {last['step']:,}, on its own batch. "
    licence = f"{args.licence}, as stated by whoever exported the model."
    facts: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": task}
    return _CARD.format(
        data=ModelCardData(license=args.licence, tags=["normattn"], **facts).to_yaml(),
        name=name,
        kind=type(model).__name__,
        score=config.model.score.name,
        parameters=parameter_count(model),
        length=config.model.train_length,
        # Without the path of its folder.
        corpus=Path(corpus).name if "/" in corpus and ":" not in corpus else corpus,
        imports=f"{auto}, AutoTokenizer" if tokeniser else auto,
        auto=auto,
        tokeniser=f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n' if tokeniser else "",
        settings=markdown_table(("setting", "value"), known),
        steps=config.steps,
        final=final,
        version=__version__,
        evaluation=evaluation,
        licence=licence if args.licence else "Not stated.",
    )


def _write_model(model: nn.Module, config: Any, run: Path, folder: Path) -> bool:
    """Write the model and its tokeniser; return whether there is a tokeniser."""
    # transformers is optional and slow to import.
    from normattn.hf import wrap

    labels: dict[str, Any] = {}
    if isinstance(config, ClassificationConfig):
        names = read_object(check_unchanged(run / LABELS))["labels"]
        labels["id2label"] = dict(enumerate(names))
        labels["label2id"] = {name: number for number, name in enumerate(names)}
    wrapped, tokeniser = wrap(model, **labels), _tokeniser(config, run)
    if tokeniser is not None:
        tokeniser.save_pretrained(folder)
        generation = [wrapped.generation_config] if isinstance(config, TrainingConfig) else []
        for settings in (wrapped.config, *generation):
            settings.pad_token_id = tokeniser.pad_token_id
            settings.eos_token_id = tokeniser.eos_token_id
    wrapped.save_pretrained(folder)
    return tokeniser is not None


def _tokeniser(config: Any, run: Path) -> Any:
    """The tokeniser of a run in transformers' format; None for generated tokens."""
    if isinstance(config, ClassificationConfig):
        data, vocabulary = config.data, check_unchanged(run / VOCABULARY)
        return _fast(
            WordPieces.load(vocabulary, data.lower_case).tokenizer,
            split_special_tokens=True,
            padding_side="right",
            model_max_length=data.max_tokens,
            unk_token=UNKNOWN,
            pad_token=PAD,
        )
    if config.data.synthetic:
        return None
    mask = config.model.mask_id if isinstance(config, MaskedConfig) else None
    return as_transformers(check_unchanged(run / "tokeniser.json"), mask)


def as_transformers(file: Path, mask_id: int | None = None) -> Any:
    """The `PreTrainedTokenizerFast` of a tokeniser that `Tokeniser.save` wrote.

    It gives the same ids for every text; `<|doc|>` in a text is encoded as plain letters. The
    separator is the end-of-text and padding token; padding is on the left. With `mask_id`, that of
    a masked model, `<|mask|>` in a text is the mask and `<|doc|>` the separator, because
    transformers splits both into letters or neither (`split_special_tokens`). Raises `InputError`
    for a missing or damaged file, and for a mask that is not the next id after the tokens.
    """
    from tokenizers import Tokenizer

    saved = Tokeniser.load(file)
    if mask_id not in (None, saved.vocab_size):
        raise InputError(
            f"the mask has the id {mask_id}, but {file} ends at {saved.vocab_size - 1}: the ids "
            "between have no token, so transformers' tokeniser cannot place it"
        )
    return _fast(
        Tokenizer.from_file(str(file)),
        split_special_tokens=mask_id is None,
        padding_side="left",
        eos_token=SEPARATOR,
        pad_token=SEPARATOR,
        **({} if mask_id is None else {"mask_token": MASK}),
    )


def _fast(tokeniser: Any, **options: Any) -> Any:
    import transformers

    tokeniser_class: Any = transformers.PreTrainedTokenizerFast
    return tokeniser_class(
        tokenizer_object=tokeniser,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **options,
    )


def _write_evaluation(run: Path, config: Any, folder: Path) -> str:
    """Write tables and figures of comparable evaluations; return the card's section, or ""."""
    stores = (MeasurementStore(run / EVALUATIONS), standalone_store(run))
    if not isinstance(config, TrainingConfig) or not any(map(len, stores)):
        return ""
    try:
        measured = measured_of_runs([(None, run)])
    except InputError as error:
        warn(f"normattn: the model card has no evaluation: {error}")
        return ""
    results = folder / "evaluation"
    figures = find("reading").report(measured, results, {}).figures
    table = re.sub(r"^# .*\n+", "", (results / "table.md").read_text("utf-8"), count=1)
    table = re.sub(r"^(#+) ", r"#\1 ", table, flags=re.MULTILINE).strip()
    table = re.sub(r"\]\((?!https?:)", "](evaluation/", table)
    images = [f"![{p.stem.replace('_', ' ')}](evaluation/figures/{p.name})" for p in figures]
    end = "The numbers and figures are in [evaluation](evaluation)."
    return "\n\n".join(["## Evaluation", table, *images, end, ""])
