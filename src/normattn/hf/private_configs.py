"""Private copies of the configurations that a model's modules hold, naming another attention.

transformers builds every module of a model on one configuration object, which a caller may share
between models. Neither that object nor another model may learn of what is done to one model.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_NAME = "_attn_implementation_internal"


class PrivateConfigs:
    """The modules' private configurations, until `restore` gives them their own ones back."""

    def __init__(self) -> None:
        self._replaced: list[tuple[nn.Module, Any, Any]] = []
        self._made: dict[int, tuple[Any, Any, dict[str, Any]]] = {}

    def replace(
        self,
        module: nn.Module,
        name_of: Callable[[str], str],
        change: Callable[[Any], None] | None = None,
    ) -> None:
        """Give a module a copy that names `name_of(its attention)`; nothing where it has none.

        Modules that share a configuration share its copy. `change` is applied to one of its own.
        """
        own = module.__dict__.get("config")
        if not hasattr(own, _NAME):
            return
        key = id(own) if change is None else -id(module)
        if key not in self._made:
            private = _copy(own, name_of)
            if change is not None:
                change(private)
            self._made[key] = own, private, copy.deepcopy(private.__dict__)
        self._replaced.append((module, own, self._made[key][1]))
        module.__dict__["config"] = self._made[key][1]

    def restore(self) -> None:
        """Give every module its own configuration back, with what a caller changed meanwhile."""
        for module, own, private in reversed(self._replaced):
            if module.__dict__.get("config") is private:
                module.__dict__["config"] = own
        for own, private, before in self._made.values():
            _carry_over(own, private.__dict__, before)
        self._replaced, self._made = [], {}

    def attentions(self) -> set[str]:
        """The attentions that the copies name now: a caller may have set another."""
        return {str(private._attn_implementation) for _, private, _ in self._made.values()}


def _copy(config: Any, name_of: Callable[[str], str]) -> Any:
    """A copy of a configuration, and of that of its text, that names another attention."""
    private = copy.deepcopy(config)
    for part in {id(part): part for part in (private, private.get_text_config())}.values():
        setattr(part, _NAME, name_of(str(part._attn_implementation or "eager")))
    return private


def _carry_over(own: Any, now: dict[str, Any], before: dict[str, Any]) -> None:
    """Set on `own` what differs between two states of its copy; not which attention it names."""
    for name, value in now.items():
        if name == _NAME:
            continue
        inner, old = own.__dict__.get(name), before.get(name)
        if hasattr(value, _NAME) and hasattr(old, _NAME) and hasattr(inner, _NAME):
            _carry_over(inner, value.__dict__, old.__dict__)
        elif name not in before or value != old:
            own.__dict__[name] = value


@contextmanager
def renamed_attention(
    model: nn.Module, name_of: Callable[[str], str], but: Collection[nn.Module] = ()
) -> Iterator[None]:
    """Let every module of a model name another attention while inside, whatever happens there.

    A compiled model runs uncompiled meanwhile.
    """
    configs = PrivateConfigs()
    try:
        for module in model.modules():
            if module not in but:
                configs.replace(module, name_of)
        if "torch._dynamo" in sys.modules:
            with torch.compiler.set_stance("force_eager"):
                yield
        else:
            yield
    finally:
        configs.restore()
