"""A score spelt out for the oracle: what each pair (i, j) does, as scalars from the formulas."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

FEATURE = {"LayerNorm": "layer", "RMSNorm": "rms", "BatchNorm": "batch", "InstanceNorm": "instance"}
L2_SIDES = {"QNA": "Q", "KNA": "K", "CosA": "QK", "QKNorm2020": "QK"}
_TEMPERATURES = {"Temperature": (0.1, 0, 0), "Temperature(beta=0.7,length=2,shift=1)": (0.7, 2, 1)}
# What is written in the brackets of a part; of a method else its factor.
_SHAPES = {
    "RoPE": ",direction={direction}",
    "XPos": ",gamma={gamma},scale={decay}",
    "PoPE": "",
    "PartialRoPE": ",fraction={fraction},side={side}",
    "PRoPE": ",fraction={fraction}",
    "HoPE": ",length={train_length}",
}
_METHODS = {
    "ABF": "base=500000.0",
    "ClippedRoPE": "",
    "DroPE": "",
    "ReRoPE": "window={window}",
    "NTKMixed": "factor={factor},b={b}",
    "Llama3": "factor={factor},low={low},high={high}",
    "LeakyReRoPE": "window={window},s={leak}",
    "SelfExtend": "window={window},group={group}",
    "StreamingLLM": "window={window},sinks={sinks}",
    "DualChunk": "size={window},local={group},beyond={beyond}",
}
REGIMES = ("ReRoPE", "LeakyReRoPE", "SelfExtend", "StreamingLLM", "DualChunk")


@dataclass(frozen=True)
class Recipe:
    """One score. `method` is a RoPE scaling, a remapping or nothing; `shape` a rotary position.

    `position` is the layout of the rotation, or "none". `near` is the width of a sliding window.
    """

    variant: str = "Baseline"
    logn: str = ""
    position: str = "half"
    method: str = ""
    train_length: int = 6
    base: float = 10000.0
    factor: float = 4.0
    window: int = 3
    b: float = 0.625
    c: float = 3.0
    eps: float = 1e-6
    gain: bool = True
    across: str = "head"
    shape: str = "RoPE"
    gamma: float = 0.4
    decay: float = 8.0
    fraction: float = 0.5
    side: str = "first"
    direction: str = "forward"
    low: float = 0.3
    high: float = 0.8
    factors: tuple[float, ...] = ()
    leak: float = 2.5
    group: int = 2
    beyond: int = 0
    sinks: int = 2
    rotate_first: bool = False
    bias: str = ""
    cap: float | None = None
    sink: bool = False
    near: int | None = None
    packed: bool = False
    clip: int | None = None
    chunk: int | None = None
    normaliser: str = ""

    @property
    def text(self) -> str:
        """How a user would write it."""
        fields, method = "", _METHODS.get(self.method, "factor={factor}")
        if {self.kind("Q"), self.kind("K")} & {"layer", "rms"}:
            fields = "gain={gain},across={across},eps={eps}"
        elif self.leaks:
            fields = "gain={gain},eps={eps}"
        elif self.variant == "CosA":
            fields = "c={c}"
        if self.method == "LongRoPE" and self.factors:
            method += ",factors=" + ":".join(map(str, self.factors))
        if self.clip is not None:
            method = "clip={clip}"
        position = "base={base},layout={position}" + _SHAPES[self.shape]
        words = [self._part(self.variant, fields), self.logn]
        words += ["RotateFirst" if self.rotate_first else ""]
        if self.position != "none":
            words += [self._part(self.shape, position)]
        else:
            words += ["" if self.bias else "NoPE"]
        words += [self._part(self.method, method) if self.method else ""]
        words += [self.bias, "" if self.cap is None else f"SoftCap(cap={self.cap})"]
        words += ["Sink" if self.sink else "", self.normaliser]
        words += ["" if self.near is None else f"SlidingWindow(window={self.near})"]
        words += ["" if self.chunk is None else f"Chunked(size={self.chunk})"]
        words += ["Packed" if self.packed else ""]
        return "-".join(filter(None, words)) + f"@{self.train_length}"

    def _part(self, name: str, fields: str) -> str:
        inside = fields.format(**{**vars(self), "gain": str(self.gain).lower()})
        return f"{name}({inside})" if inside else name

    def kind(self, side: str) -> str:
        """Which normalisation the side ("Q" or "K") gets; empty for none."""
        if self.variant in L2_SIDES:
            return "l2" if side in L2_SIDES[self.variant] else ""
        for title, kind in FEATURE.items():
            if self.variant.endswith(title):
                return kind if side in self.variant.removesuffix(title) else ""
        return ""

    @property
    def leaks(self) -> bool:
        """Whether statistics run over tokens."""
        return {self.kind("Q"), self.kind("K")} & {"batch", "instance"} != set()

    @property
    def whole_rows(self) -> bool:
        """Whether the bias is no function of the distance alone."""
        return self.bias.startswith(("FIRE", "CoPE"))

    @property
    def needs_causal(self) -> bool:
        """Whether it is defined for causal attention only."""
        causal = self.whole_rows or self.normaliser.startswith(("StickBreaking", "Selective"))
        return causal or self.method in (*REGIMES, "DynamicNTK")

    @property
    def folds(self) -> bool:
        """Whether the score is the product of two vectors, over all keys before."""
        more = self.bias or self.cap is not None or self.sink or self.near is not None
        more = more or self.chunk is not None or self.shape == "PoPE" or self.normaliser
        return not (more or self.method in REGIMES or self.packed)


def rotary_dim(recipe: Recipe, d: int) -> int:
    """How many of the features rotate."""
    if recipe.position == "none":
        return 0
    if recipe.shape != "PartialRoPE":
        return 2 * d if recipe.shape == "PoPE" else d
    return max(2, 2 * math.floor(recipe.fraction * d / 2))


def start(recipe: Recipe, d: int) -> int:
    """The first feature that rotates."""
    return d - rotary_dim(recipe, d) if recipe.side == "last" else 0


@functools.cache
def frequencies(recipe: Recipe, d: int, block: int = 0) -> list[float]:
    """θ'_m, m = 0 … d/2 − 1, for d features that rotate and rows of the given block."""
    whole, pairs = _stretched(recipe, d, block), range(d // 2)
    if recipe.shape == "PRoPE":
        turning = [m < math.floor(recipe.fraction * d / 2) for m in pairs]
    elif recipe.shape == "HoPE":
        turns = [recipe.train_length * recipe.base ** (-2 * m / d) for m in pairs]
        turning = [m == 0 or turns[m] >= 2 * math.pi for m in pairs]
    else:
        turning = [True] * len(pairs)
    sign = -1 if recipe.direction == "backward" else 1
    return [sign * theta if turns else 0.0 for theta, turns in zip(whole, turning, strict=True)]


def _stretched(recipe: Recipe, d: int, block: int) -> list[float]:
    s, base, length = recipe.factor, recipe.base, recipe.train_length
    plain = [base ** (-2 * m / d) for m in range(d // 2)]
    if recipe.method == "" or recipe.method in REGIMES:
        return plain
    if recipe.method == "PI":
        return [theta / s for theta in plain]
    if recipe.method == "ABF":
        return [500000.0 ** (-2 * m / d) for m in range(d // 2)]
    if recipe.method == "NTK":
        return [(base * s ** (d / (d - 2))) ** (-2 * m / d) for m in range(d // 2)]
    if recipe.method == "NTKOld":
        return [(base * s) ** (-2 * m / d) for m in range(d // 2)]
    if recipe.method == "DynamicNTK":
        n = length * (block + 1)
        larger = base * (s * max(n, length) / length - (s - 1)) ** (d / (d - 2))
        return [larger ** (-2 * m / d) for m in range(d // 2)]
    if recipe.method == "NTKMixed":
        a = math.log(s) / (d / 2) ** recipe.b
        return [theta * math.exp(-a * (m + 1) ** recipe.b) for m, theta in enumerate(plain)]
    if recipe.method == "LongRoPE":
        factors = recipe.factors or [s ** (2 * m / (d - 2)) for m in range(d // 2)]
        return [theta / factor for theta, factor in zip(plain, factors, strict=True)]
    if recipe.method == "Llama3":
        return [_llama3(recipe, theta) for theta in plain]
    if recipe.method == "DroPE":
        return [0.0] * (d // 2)
    if recipe.method == "ClippedRoPE":
        return _clipped(recipe, plain)
    assert recipe.method == "YaRN"
    return _yarn(recipe, d, plain)


def _llama3(recipe: Recipe, theta: float) -> float:
    """The three cases of the published code, by wavelength."""
    length, s, low, high = recipe.train_length, recipe.factor, recipe.low, recipe.high
    wavelength = 2 * math.pi / theta
    if wavelength < length / high:
        return theta
    if wavelength > length / low:
        return theta / s
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * theta / s + smooth * theta


def _clipped(recipe: Recipe, plain: list[float]) -> list[float]:
    """A raised cosine over the lowest frequencies, by default those below one rotation in L."""
    slow = [theta for theta in plain if 2 * math.pi / theta > recipe.train_length]
    clip = min(len(slow) if recipe.clip is None else recipe.clip, len(plain))
    first = len(plain) - clip
    return [
        theta * math.cos(math.pi / 2 * (m - first) / (clip - 1)) ** 2 if m > first else theta
        for m, theta in enumerate(plain)
    ]


def _yarn(recipe: Recipe, d: int, plain: list[float]) -> list[float]:
    def dim(r: float) -> float:
        turns = recipe.train_length / (2 * math.pi * r)
        return d * math.log(turns) / (2 * math.log(recipe.base))

    low: float = min(max(math.floor(dim(32)), 0), d - 1)
    high: float = min(max(math.ceil(dim(1)), 0), d - 1)
    if low == high:
        high += 0.001
    result = []
    for m, theta in enumerate(plain):
        ramp = min(max((m - low) / (high - low), 0.0), 1.0)
        result.append(ramp * theta / recipe.factor + (1 - ramp) * theta)
    return result


@functools.cache
def decays(recipe: Recipe, d: int) -> list[float]:
    """ln of what pair m is multiplied by per token of distance."""
    if recipe.shape != "XPos":
        return [0.0] * (d // 2 if recipe.shape == "PoPE" else rotary_dim(recipe, d) // 2)
    gamma = recipe.gamma
    zeta = [(2 * m / d + gamma) / (1 + gamma) for m in range(d // 2)]
    return [math.log(each) / recipe.decay for each in zeta]


def growth(recipe: Recipe, n: int) -> float:
    """What the slot of log-n makes of λ for n visible keys, SSMax aside, which learns per head."""
    length = recipe.train_length
    if recipe.logn == "YaRNTemperature":
        return (1 + 0.1 * math.log(max(1.0, n / length))) ** 2
    if recipe.logn == "SqrtLogN":
        return math.sqrt(math.log(n) / math.log(length))
    if recipe.logn.startswith("Temperature"):
        beta, step, shift = _TEMPERATURES[recipe.logn]
        return 1 + beta * math.log(1 + (n - 1 + shift) // (step or length))
    return 1.0


def scale(recipe: Recipe, d: int, n: int) -> float:
    """λ for n visible keys, but for what is learned."""
    length = recipe.train_length
    if recipe.variant in ("QNA", "KNA", "QKNorm2020"):
        value = 1.0
    elif recipe.variant == "CosA":
        value = recipe.c * math.log(n if recipe.logn == "logn" else length / 2)
    else:
        value = 1 / math.sqrt(d)
    if recipe.logn == "logn" and recipe.variant != "CosA":
        value *= math.log(n) / math.log(length)
    if recipe.logn == "logn+":
        value *= max(1.0, math.log(n) / math.log(length))
    value *= growth(recipe, n)
    if recipe.method == "YaRN":
        value *= (0.1 * math.log(recipe.factor) + 1) ** 2
    if recipe.method == "LongRoPE":
        value *= 1 + math.log(recipe.factor) / math.log(length)
    return value


def rotated_at(recipe: Recipe, i: int, j: int) -> tuple[float, float]:
    """The positions at which query i and key j are rotated for this pair."""
    w = recipe.window
    if recipe.method == "DualChunk":
        chunks, last = i // w - j // w, w + recipe.group - 1 + recipe.beyond
        if chunks == 0:
            return i % w, j % w
        return (min(i % w + w, last) if chunks == 1 else last), j % w
    if i - j < w or recipe.method not in REGIMES:
        return i, j
    if recipe.method == "ReRoPE":
        return w, 0
    if recipe.method == "LeakyReRoPE":
        return (i + w * (recipe.leak - 1)) / recipe.leak, j / recipe.leak
    if recipe.method == "SelfExtend":
        g = recipe.group
        return i // g + w - w // g, j // g
    # The place in a cache that holds the sinks and w recent tokens.
    return min(i, recipe.sinks + w - 1), j


def sees(recipe: Recipe, i: int, j: int) -> bool:
    """Whether a window lets query i see key j."""
    if recipe.chunk is not None:
        return i // recipe.chunk == j // recipe.chunk
    if recipe.near is not None:
        return abs(i - j) < recipe.near
    if recipe.method == "StreamingLLM":
        return i - j < recipe.window or j < recipe.sinks
    return True


def alibi(head: int, heads: int) -> float:
    """The slope of a head, by the recursion of the paper's code."""

    def slopes(count: int) -> list[float]:
        if math.log2(count).is_integer():
            start = 2 ** (-(2 ** -(math.log2(count) - 3)))
            return [start * start**n for n in range(count)]
        lower = 2 ** math.floor(math.log2(count))
        return slopes(lower) + slopes(2 * lower)[0::2][: count - lower]

    return slopes(heads)[head]
