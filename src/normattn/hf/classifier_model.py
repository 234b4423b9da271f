"""`Classifier` as a sequence classifier of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import SequenceClassifierOutput

from normattn.errors import InputError
from normattn.hf.base_model import NormattnModel, as_asked, checked_ids, padding_of, refuse_inner
from normattn.hf.configuration import NormattnClassifierConfig
from normattn.models.classifier import Classifier


class NormattnForSequenceClassification(NormattnModel):
    """The labels of a text, each by itself, or one of them (`problem_type`)."""

    config_class = NormattnClassifierConfig
    model_class = Classifier

    def __init__(self, config: NormattnClassifierConfig, model: nn.Module | None = None) -> None:
        labels = config.settings["labels"]
        if config.num_labels != labels:
            raise InputError(
                f"num_labels is {config.num_labels}, but the model's settings say {labels} labels"
            )
        super().__init__(config, model)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Logits (B, K), and the loss of `labels` in nats.

        With `config.problem_type` "multi_label_classification" (default) labels are 0 or 1 as
        floats (B, K) and the loss is binary cross-entropy; with "single_label_classification" they
        are numbers (B,) and it is cross-entropy. Raises `InputError` for another problem type and
        labels of another shape.
        """
        refuse_inner(output_attentions, output_hidden_states)
        ids = checked_ids(input_ids)
        logits = self.model(ids, padding_of(attention_mask, *ids.shape))
        loss = None if labels is None else self._loss(logits.float(), labels)
        output = SequenceClassifierOutput(loss=loss, logits=logits)
        return as_asked(output, self.config, return_dict)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        kind = self.config.problem_type
        if kind == "multi_label_classification" and labels.shape == logits.shape:
            return F.binary_cross_entropy_with_logits(logits, labels.float())
        if kind == "single_label_classification" and labels.shape == logits.shape[:1]:
            return F.cross_entropy(logits, labels)
        raise InputError(
            f"labels of {tuple(labels.shape)} do not fit logits of {tuple(logits.shape)} with "
            f"problem_type {kind!r}: multi_label_classification takes 0 or 1 (B, K), "
            "single_label_classification numbers (B,)"
        )
