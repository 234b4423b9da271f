"""Which post-hoc methods a trained score can take: what `--methods all` means."""

from __future__ import annotations

from normattn.errors import InputError
from normattn.score.parts import parts
from normattn.score.spec import ScoreSpec

ALL = "all"
WITH_LOGN = ("NTK", "YaRN", "ReRoPE")
"""The methods that are also read together with post-hoc log-n scaling."""


def post_hoc_methods(spec: ScoreSpec, factor: float = 8.0) -> tuple[str, ...]:
    """Every registered post-hoc method that `spec` can take, as texts for `with_method`.

    Each part stands alone with its default parameters, in the order of slots and names; then come
    `NTK-logn+`, `YaRN-logn+` and `ReRoPE-logn+`. The model as it is is not among them. `factor` is
    what stretching methods stretch by; it only decides whether their parameters are in range.
    """
    return tuple(method for method in candidates() if refusal(spec, method, factor) is None)


def left_out(spec: ScoreSpec, factor: float = 8.0) -> tuple[str, ...]:
    """A sentence for each registered post-hoc method that `spec` cannot take."""
    reasons = ((method, refusal(spec, method, factor)) for method in candidates())
    return tuple(
        f"{spec.name} with {method} is left out: {why}"
        for method, why in reasons
        if why is not None
    )


def refusal(spec: ScoreSpec, method: str, factor: float = 8.0) -> str | None:
    """Why `spec` cannot take `method`; None when it can."""
    try:
        spec.with_method(method).resolve(factor=factor)
    except InputError as error:
        return str(error)
    return None


def candidates() -> tuple[str, ...]:
    """Every registered post-hoc method by itself, then those read with log-n scaling too."""
    alone = [name for name, part in parts().items() if part.when != "trained-in"]
    together = [f"{name}-logn+" for name in WITH_LOGN if name in alone]
    return (*alone, *together)
