"""The model card of an exported run: what it is, how it was made, what was measured."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from normattn import __version__
from normattn.lab.report.markdown import aligned
from normattn.lab.runs import RunDirectory, read_metrics
from normattn.lab.training.loop_config import LoopConfig
from normattn.models.flops import parameter_count

_MODEL_FIELDS = ("score", "layers", "dim", "heads", "kv_heads", "block", "placement", "norm")
_TRAINING_FIELDS = ("steps", "batch_size", "precision", "seed")


@dataclass(frozen=True)
class Card:
    """Everything that the card says; the same run gives the same text.

    `task` and `auto` are transformers' names of what the model does and of its Auto class; `table`
    is the report's, if anything was evaluated.
    """

    name: str
    config: LoopConfig
    run: RunDirectory
    task: str
    auto: str
    tokeniser: bool
    table: str | None
    licence: str | None

    def text(self, model: nn.Module) -> str:
        """README.md."""
        parts = [
            self._header(),
            f"# {self.name}",
            self._summary(model),
            "## Use",
            self._use(),
            "## Data",
            self._data(),
            "## Settings",
            self._settings(),
            "## Training",
            self._final(),
            "![Training loss by step](figures/training_loss.png)",
            *([] if self.table is None else ["## Evaluation", self._evaluation(self.table)]),
            "## Licence",
            self._licence(),
        ]
        return "\n\n".join(parts) + "\n"

    def _header(self) -> str:
        fields = ["library_name: transformers", f"pipeline_tag: {self.task}", "tags:"]
        fields += ["- normattn"]
        if self.licence is not None:
            fields.insert(0, f"license: {json.dumps(self.licence)}")
        return "\n".join(["---", *fields, "---"])

    def _summary(self, model: nn.Module) -> str:
        settings = self.config.model  # type: ignore[attr-defined]
        return (
            f"{type(model).__name__} of normattn with the attention score `{settings.score.name}`: "
            f"{parameter_count(model):,} parameters, {settings.layers} layers of width "
            f"{settings.dim}, trained to read {settings.train_length} tokens."
        )

    def _use(self) -> str:
        lines = [
            "import normattn.hf  # pip install 'normattn[hf]': makes the model known",
            f"from transformers import {self.auto}" + ", AutoTokenizer" * self.tokeniser,
            "",
            f'model = {self.auto}.from_pretrained("{self.name}")',
        ]
        if self.tokeniser:
            lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{self.name}")')
        return "\n".join(["```python", *lines, "```"])

    def _data(self) -> str:
        data: Any = self.config.data  # type: ignore[attr-defined]
        # The last part of a path: where it lay on one machine tells nobody anything.
        corpus = str(data.corpus)
        corpus = Path(corpus).name if "/" in corpus and ":" not in corpus else corpus
        held = "Held-out documents were never trained on."
        if getattr(data, "synthetic", False):
            held = "The tokens are generated; there is no text and no tokeniser."
        return f"Corpus: `{corpus}`. {held}"

    def _settings(self) -> str:
        fields = self.config.model_dump(mode="json")
        rows = [(name, fields["model"].get(name)) for name in _MODEL_FIELDS]
        rows.append(("train_length", fields["model"]["train_length"]))
        rows += [(name, fields.get(name)) for name in _TRAINING_FIELDS]
        rows += [(name, _words(fields[name])) for name in ("optimiser", "schedule")]
        shown = [[name, str(value)] for name, value in rows if value is not None]
        return aligned(["setting", "value"], shown)

    def _final(self) -> str:
        status, lines = self.run.status, read_metrics(self.run.path / "metrics.jsonl")
        steps = status.step if status is not None else 0
        said = f"{steps:,} steps."
        if lines:
            last = lines[-1]
            shown = [f"loss {last['loss']:.4f}"]
            if isinstance(last.get("accuracy"), float):
                shown.append(f"accuracy {100 * last['accuracy']:.1f} %")
            said += f" Step {last['step']:,}, on its own batch: {', '.join(shown)}."
        return f"{said} Trained and exported by normattn {__version__}."

    def _evaluation(self, table: str) -> str:
        """The report's table under this heading, and where its figures are."""
        body = re.sub(r"^# .*\n+", "", table, count=1)
        body = re.sub(r"^(#+) ", r"#\1 ", body, flags=re.MULTILINE).strip()
        body = re.sub(r"\]\((?!https?:)", "](evaluation/", body)
        return f"{body}\n\nThe numbers and figures are in [evaluation](evaluation)."

    def _licence(self) -> str:
        if self.licence is None:
            return "Not stated: whoever made the model has said nothing about how it may be used."
        return f"{self.licence}, as stated by whoever made the model."


def _words(fields: dict[str, Any]) -> str:
    """Settings in one line, those that are unset left out."""
    return ", ".join(f"{key} {value}" for key, value in fields.items() if value is not None)
