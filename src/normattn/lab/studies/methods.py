"""Which scores can be trained in a setting, and which inference-time methods a score supports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from normattn.errors import InputError
from normattn.lab.studies.language import TextSetting
from normattn.score.parts import parts
from normattn.score.spec import UNMODIFIED, ScoreSpec, is_unmodified

ALL = "all"
WITH_LOGN = ("NTK", "YaRN", "ReRoPE")
"""The methods that are also evaluated with inference-time log-n scaling."""


def canonical_scores(variants: Sequence[str], setting: TextSetting) -> tuple[str, ...]:
    """The printed names of the scores to train; raises `InputError` if one cannot be."""
    names = []
    for variant in variants:
        spec = ScoreSpec.parse(variant)
        if spec.method:
            raise InputError(
                f"{variant} holds {spec.method}, which is applied after training; "
                f"name {spec.variant_name} among --variants and {spec.method} among --methods"
            )
        _ = setting.run(spec.text).training_config  # raises where the score cannot be trained
        names.append(spec.text)
    return tuple(dict.fromkeys(names))


def canonical_methods(methods: Sequence[str], setting: TextSetting) -> tuple[str, ...]:
    """The printed names of the methods; raises `InputError` for an unknown one."""
    names = []
    for method in methods:
        if is_unmodified(method):
            names.append(UNMODIFIED)
            continue
        spec = ScoreSpec.parse("Baseline").with_method(method)
        if spec.train_length not in (None, setting.train_length):
            raise InputError(
                f"{method} is for a training length of {spec.train_length}, but this table's is "
                f"{setting.train_length}"
            )
        if not spec.method_text:
            raise InputError(
                f"{method} changes nothing after training, so it is not an entry of --methods"
            )
        names.append(spec.method_text)
    return tuple(dict.fromkeys(names))


def applicable_methods(
    methods: Mapping[str, Sequence[str]], setting: TextSetting
) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """The supported methods of each score, and sentences on why the others are not supported."""
    applicable, skipped = {}, []
    for variant, requested in methods.items():
        spec = ScoreSpec.parse(variant, train_length=setting.train_length)
        reasons = _unsupported(spec, requested, setting.evaluation.factor)
        applicable[variant] = tuple(method for method in requested if method not in reasons)
        skipped += _sentences(spec, reasons)
    return applicable, skipped


def candidates() -> tuple[str, ...]:
    """All registered inference-time methods, then those combined with log-n scaling."""
    alone = [name for name, part in parts().items() if part.when != "training-time"]
    return (*alone, *(f"{name}-logn+" for name in WITH_LOGN if name in alone))


def inference_time_methods(spec: ScoreSpec, factor: float = 8.0) -> tuple[str, ...]:
    """The `candidates` that `spec` supports, as texts for `with_method`.

    `factor` is the stretch factor, which decides whether parameters are in range.
    """
    unsupported = _unsupported(spec, candidates(), factor)
    return tuple(method for method in candidates() if method not in unsupported)


def explain_unsupported(spec: ScoreSpec, factor: float = 8.0) -> tuple[str, ...]:
    """Sentences on which inference-time methods `spec` does not support, one for each reason."""
    return tuple(_sentences(spec, _unsupported(spec, candidates(), factor)))


def _unsupported(spec: ScoreSpec, methods: Sequence[str], factor: float) -> dict[str, str]:
    """The methods that `spec` does not support, each with its reason."""
    reasons = {}
    for method in methods:
        try:
            spec.with_method("" if method == UNMODIFIED else method).resolve(factor=factor)
        except InputError as error:
            reasons[method] = str(error)
    return reasons


def _sentences(spec: ScoreSpec, unsupported: Mapping[str, str]) -> list[str]:
    """A sentence for each reason, with all methods that it applies to."""
    groups: dict[str, list[str]] = {}
    for name, error in unsupported.items():
        rotary = any(
            part.needs_rotary for part in ScoreSpec.parse("Baseline").with_method(name).parts
        )
        statement, _, reason = error.partition(": ")
        generic = " cannot be combined with " in statement
        why = reason if generic or statement.endswith(" is not possible") else error
        if rotary and not spec.position.rotary:
            why = "it has no rotary positions"
        groups.setdefault(why, []).append(name)
    return [
        f"{spec.name} is not evaluated with {', '.join(names)}: {why}"
        for why, names in groups.items()
    ]
