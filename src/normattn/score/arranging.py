"""Parts in their slots: at most one in each, and a position where none was named."""

from __future__ import annotations

from collections.abc import Container, Iterable

from normattn.errors import InputError
from normattn.score.part import Part, Slot
from normattn.score.registry import find


def unasked_position(slots: Container[Slot]) -> Part:
    """RoPE by default, NoPE beside a bias, which is a position of its own."""
    return find("NoPE" if Slot.BIAS in slots else "RoPE")()


def spelled(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """The parts that a name spells, in its order.

    All but the position that stands there unasked, in the order of slots, but log-n of a method
    behind what it is added to: `ReRoPE-logn+`.
    """
    silent = unasked_position({part.slot for part in parts})
    shown = (part for part in parts if part != silent)
    return tuple(sorted(shown, key=lambda part: part.slot is Slot.LOGN and part.when == "post-hoc"))


def arrange(parts: Iterable[Part]) -> tuple[Part, ...]:
    """One part per slot, in the order of slots; a position that was not named is put in.

    Raises `InputError` for two parts of one slot, and where no variant is named.
    """
    slots: dict[Slot, Part] = {}
    for part in parts:
        if part.slot in slots:
            first = slots[part.slot].name
            raise InputError(
                f"{first} and {part.name} cannot be combined: both choose the {part.slot}"
            )
        slots[part.slot] = part
    if Slot.VARIANT not in slots:
        raise InputError("a score needs a variant first, e.g. Baseline, KNA or CosA")
    slots.setdefault(Slot.POSITION, unasked_position(slots))
    return tuple(slots[slot] for slot in Slot if slot in slots)
