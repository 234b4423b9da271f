"""`MaskedLM` as a masked language model of transformers."""

from __future__ import annotations

from typing import Any

from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_outputs import MaskedLMOutput

from normattn.hf.base_model import NormattnModel, as_asked, checked_ids, padding_of, refuse_inner
from normattn.hf.configuration import NormattnMaskedLMConfig
from normattn.models.masked_lm import MaskedLM


class NormattnForMaskedLM(NormattnModel):
    """The hidden tokens of a text; exits, where there are any, are kept and not read."""

    config_class = NormattnMaskedLMConfig
    model_class = MaskedLM

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Int[Tensor, "b t"] | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Logits (B, T, V), and the mean cross-entropy in nats of `labels` that are not −100.

        `attention_mask` (B, T) is 0 for padding, on either side. Raises `InputError` as
        `NormattnForCausalLM.forward`.
        """
        refuse_inner(output_attentions, output_hidden_states)
        ids = checked_ids(input_ids)
        logits = self.model(ids, padding_of(attention_mask, *ids.shape))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return as_asked(MaskedLMOutput(loss=loss, logits=logits), self.config, return_dict)

    def get_output_embeddings(self) -> Any:
        """The head; None where it is the embedding."""
        return self.model.head
