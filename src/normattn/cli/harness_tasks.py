"""The tasks of lm-evaluation-harness in `tasks/*.yaml`: made from local text, without downloads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import datasets
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import bits_per_byte, mean
from lm_eval.api.task import ConfigurableTask

from normattn.cli.harness_text import retrieval_documents, segment_documents

Aggregate = Callable[[Sequence[Any]], float]
_BITS = "bits_per_byte"


class _Pieces(ConfigurableTask):
    """A text whose end is scored piece by piece, each behind the true text before it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    @abstractmethod
    def documents(self, metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The task's documents."""

    def download(self, dataset_kwargs: Any = None, **kwargs: Any) -> None:
        """Make the documents; nothing is downloaded."""
        made = self.documents(self.config.metadata or {})
        self.dataset = {"test": datasets.Dataset.from_list(made)}

    def doc_to_text(self, doc: Mapping[str, Any], doc_to_text: Any = None) -> str:
        """The text up to the first piece that is scored."""
        return str(doc["context"])

    def doc_to_target(self, doc: Mapping[str, Any], doc_to_target: Any = None) -> str:
        """The first piece that is scored."""
        return str(doc["pieces"][0])

    def construct_requests(self, doc: dict[str, Any], ctx: str, **kwargs: Any) -> list[Instance]:
        """One request for every scored piece: those at even places."""
        for unused in ("apply_chat_template", "chat_template"):
            kwargs.pop(unused, None)
        pieces = doc["pieces"]
        return [
            Instance(
                request_type="loglikelihood",
                doc=doc,
                arguments=(ctx + "".join(pieces[:at]), pieces[at]),
                idx=number,
                **kwargs,
            )
            for number, at in enumerate(range(0, len(pieces), 2))
        ]

    @property
    def _metrics(self) -> set[str]:
        """Their names follow the lengths that were asked for."""
        unknown = (0.0, False)
        return {
            name
            for doc in self.task_docs
            for name in self.process_results(doc, [unknown] * len(doc["pieces"]))
        }

    def aggregation(self) -> dict[str, Aggregate]:
        """Means over documents; bits per byte over all bytes."""
        return {metric: bits_per_byte if _BITS in metric else mean for metric in self._metrics}

    def higher_is_better(self) -> dict[str, bool]:
        """True for shares of right answers."""
        return {metric: metric.startswith(("acc", "exact")) for metric in self._metrics}


class _Retrieval(_Pieces):
    """`acc_LENGTH` and `acc_LENGTH_depth_PERCENT`: the share of samples answered as a whole.

    An answer is right when each of its tokens is the model's first choice.
    """

    kind = ""

    def documents(self, metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Samples at every length and depth."""
        return retrieval_documents(self.kind, metadata)

    def process_results(
        self, doc: Mapping[str, Any], results: Sequence[tuple[float, bool]]
    ) -> dict[str, float]:
        """Whether all answers are right, over all and at this length and depth."""
        right = float(all(correct for _, correct in results))
        length, depth = doc["length"], doc["depth"]
        return {"acc": right, f"acc_{length}": right, f"acc_{length}_depth_{depth}": right}


class Passkey(_Retrieval):
    """One statement, asked for at the end."""

    kind = "passkey"


class MultiKey(_Retrieval):
    """Four statements, one of them asked for."""

    kind = "multi_key"


class VariableTracking(_Retrieval):
    """A chain of three assignments, followed back to the value."""

    kind = "variable_tracking"


class KeyValue(_Retrieval):
    """As many statements as fill the text, one of them asked for."""

    kind = "key_value"


class Copy(_Retrieval):
    """One statement of a passage, to be repeated whole."""

    kind = "copy"


class LastSegment(_Pieces):
    """`loss_LENGTH`, in nats per token, and `bits_per_byte_LENGTH` of the same last segment."""

    def documents(self, metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The same segments behind contexts of every length."""
        return segment_documents(metadata)

    def process_results(
        self, doc: Mapping[str, Any], results: Sequence[tuple[float, bool]]
    ) -> dict[str, Any]:
        """The segment's loss at this length of context."""
        total, size = results[0][0], len(doc["pieces"][0].encode())
        length = doc["length"]
        return {
            f"loss_{length}": -total / doc["tokens"],
            f"{_BITS}_{length}": (total, size),
        }
