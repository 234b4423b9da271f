"""What our three models have in common as models of transformers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import transformers
from jaxtyping import Bool
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.configuration import NormattnBaseConfig

# Half typed by transformers: taken as Any.
_Model: Any = transformers.PreTrainedModel


class NormattnModel(_Model):
    """A model of ours, `.model`, inside a `PreTrainedModel`.

    Made from its configuration (weights are then drawn as ours are), or around a model that is
    there already, which it shares. `save_pretrained` and `from_pretrained` are transformers', with
    the weights under `model.`; a post-hoc method that is switched on is not saved. A folder that
    lacks a weight is refused, where transformers would draw it at random. Methods after training
    are ours: `with model.model.using("YaRN", factor=4): …`.
    """

    base_model_prefix = "model"
    model: Any
    model_class: ClassVar[type[nn.Module]] = nn.Module
    _supports_sdpa = True

    def __init__(self, config: NormattnBaseConfig, model: nn.Module | None = None) -> None:
        super().__init__(config)
        self.model = type(self).model_class(config.ours) if model is None else model
        self.post_init()

    @classmethod
    def from_pretrained(cls, *source: Any, **options: Any) -> Any:
        """As transformers', but every weight must be there."""
        told = options.pop("output_loading_info", False)
        model, info = super().from_pretrained(*source, output_loading_info=True, **options)
        lacking = sorted(str(key) for key in (*info["missing_keys"], *info["mismatched_keys"]))
        if lacking:
            raise InputError(
                f"the weights in {source[0]} are not those of its configuration: {lacking[0]} is "
                "missing or has another shape"
            )
        return (model, info) if told else model

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: our models draw their weights when they are built."""

    def get_input_embeddings(self) -> Any:
        """The embedding of the tokens."""
        return self.model.embedding

    def set_input_embeddings(self, value: Any) -> None:
        """Put another embedding in its place."""
        self.model.embedding = value

    def resize_token_embeddings(self, *_: Any, **__: Any) -> Any:
        """Refused: the vocabulary is part of our configuration."""
        raise InputError(
            f"the vocabulary of {self.config.vocab_size} tokens is part of the model's settings; "
            "build a model with another vocab_size and copy the weights"
        )


def padding_of(mask: Tensor | None, rows: int, tokens: int) -> Bool[Tensor, "b s"] | None:
    """True where an attention mask (B, S) of `tokens` is 0; None where it nowhere is.

    Raises `InputError` for a mask of another shape or with other values than 0 and 1.
    """
    if mask is None:
        return None
    if mask.shape != (rows, tokens):
        raise InputError(
            f"attention_mask must be ({rows}, {tokens}), 1 for each token read so far and 0 for "
            f"padding, but it is {tuple(mask.shape)}"
        )
    padding = mask == 0
    if not bool((padding | (mask == 1)).all()):
        raise InputError("attention_mask must hold 1 for tokens and 0 for padding, nothing else")
    return padding if bool(padding.any()) else None


def refuse_inner(output_attentions: bool | None, output_hidden_states: bool | None) -> None:
    """Raise `InputError`: what is inside is seen through `normattn.lab.diagnostics`."""
    if output_attentions or output_hidden_states:
        raise InputError(
            "these models hand out neither attentions nor hidden states; see docs/diagnostics.md"
        )


def as_asked(output: Any, config: Any, return_dict: bool | None) -> Any:
    """The output, or a tuple of it where transformers' `return_dict` is off."""
    wanted = config.return_dict if return_dict is None else return_dict
    return output if wanted else output.to_tuple()


def checked_ids(ids: Tensor | None) -> Tensor:
    """The token ids; raises `InputError` where there are none."""
    if ids is None or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        description = "none" if ids is None else f"{ids.dtype} of {tuple(ids.shape)}"
        raise InputError(f"input_ids must be whole numbers (B, T), but they are {description}")
    return ids
