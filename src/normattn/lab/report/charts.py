"""Draw figures as Vega-Lite charts, for report.html and PNG files. Altair is slow to import."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from statistics import median
from typing import Any

import altair as alt

from normattn.lab.report.figures import Curves, Figure, Grid, Intervals, Line, Panel, Point
from normattn.lab.stats import Estimate

COLOURS = (
    *("#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7"),
    *("#56B4E9", "#8C6D31", "#7F7F7F", "#332288", "#44AA99", "#AA4466", "#999933"),
)
"""Okabe and Ito's palette for colour-blind readers, without its pale yellow."""
PIXELS_PER_POINT = 2.0
"""Resolution of PNG files."""
PANEL_SIZES = {1: (620, 330), 2: (440, 280), 3: (300, 240)}
"""Width and height of a panel, by the number of panels side by side."""
ROW_HEIGHT, CELL_WIDTH, LETTER_WIDTH = 20, 64, 6
TITLE_WIDTH = 46
"""Characters in a line of a title, to fit on a phone."""
DIGITS = 6
"""Significant digits of a number in a chart; pictures and tooltips show fewer."""
MANY_LINES, HIGHLIGHTED = 6, 4
"""With more than `MANY_LINES` lines, all but `HIGHLIGHTED` are faint until one is selected."""
MOST_DOTS = 40
"""Lines with more points are drawn without dots; tooltips still show their values."""
WIDE = 5
"""Intervals wider than this many times the median do not extend the y axis."""
_CONFIG: dict[str, Any] = {
    "background": "white",
    "font": "DejaVu Sans, Segoe UI, Roboto, sans-serif",
    "view": {"stroke": None},
    "axis": {"gridColor": "#E5E5E5", "labelFontSize": 11, "titleFontSize": 11, "labelLimit": 320},
    "legend": {"labelFontSize": 11, "labelLimit": 260, "symbolStrokeWidth": 2, "title": None},
    "title": {"fontSize": 13, "anchor": "start"},
}
_TOOLTIPS = [alt.Tooltip(f"{name}:Q", format=",.4~g") for name in ("value", "low", "high")]


def vega_lite(figure: Figure) -> dict[str, Any]:
    """The figure as a Vega-Lite specification that contains its data."""
    draw: dict[type, Callable[[Any], Any]] = {Curves: _curves, Intervals: _intervals, Grid: _grid}
    with alt.data_transformers.enable("default", max_rows=None, consolidate_datasets=False):
        spec: dict[str, Any] = draw[type(figure)](figure).configure(**_CONFIG).to_dict()
    return spec


def png(figure: Figure) -> bytes:
    """The figure as the bytes of a PNG file."""
    import vl_convert

    image: bytes = vl_convert.vegalite_to_png(vega_lite(figure), scale=PIXELS_PER_POINT)
    return image


# Lines


def _curves(figure: Curves) -> Any:
    """Panels of lines with bands, up to three side by side; the legend highlights lines."""
    panels = [panel for panel in figure.panels if any(line.points for line in panel.lines)]
    lines: dict[str, Line] = {}
    for line in (line for panel in panels for line in panel.lines if line.points):
        lines.setdefault(line.label, line)
    families = [line.family or line.label for line in lines.values()]
    order = list(dict.fromkeys((*figure.first, *families)))
    colours = dict(zip(order, cycle(COLOURS), strict=False))
    channels = {
        "color": _legend(alt.Color, lines, [colours[name] for name in families]),
        "strokeDash": _legend(
            alt.StrokeDash,
            lines,
            [[6, 3] if line.dashed or line.control else [1, 0] for line in lines.values()],
        ),
    }
    many = max(len(panel.lines) for panel in panels) > MANY_LINES
    highlighted = [{"line": name} for name in _highlighted(panels, figure.featured)]
    selection = alt.selection_point(
        name="chosen",
        fields=["line"],
        bind="legend",
        toggle="true",
        value=highlighted if many else alt.Undefined,
    )
    shared = _limits([line for panel in panels for line in panel.lines], panels[0].log_y)
    columns = {1: 1, 2: 2, 4: 2}.get(len(panels), 3)
    width, height = PANEL_SIZES[columns]
    charts = []
    for panel in panels:
        limits = shared if figure.shared_y else _limits(panel.lines, panel.log_y)
        chart = _panel(panel, channels, selection, limits)
        charts.append(chart.properties(width=width, height=height))
    # Name the view of the selection, as Altair's default names count all views of the process.
    charts[0].layer[0].name = "first"
    charts[0] = charts[0].add_params(selection)  # other panels refer to it by name
    return alt.concat(*charts, columns=columns, title=alt.Title(_wrapped(figure.title), offset=14))


def _legend(channel: Any, lines: Mapping[str, Line], values: Sequence[Any]) -> Any:
    """The colours or dashes of the lines, with one legend above the panels."""
    legend = alt.Legend(symbolType="stroke", symbolOpacity=1, orient="top", columns=4)
    names = list(lines)
    scale = alt.Scale(domain=names, range=list(values))
    return channel("line:N", sort=names, scale=scale, legend=legend)


def _highlighted(panels: Sequence[Panel], featured: Sequence[str]) -> list[str]:
    """The lines to highlight: featured ones, the first of each panel, controls, some far apart."""
    drawn = {line.label for panel in panels for line in panel.lines}
    highlighted = [name for name in featured if name in drawn]
    considered: set[str] = set()
    for panel in panels:
        ends = {line.label: line.points[-1].value for line in panel.lines if line.points}
        ends = {name: value for name, value in ends.items() if math.isfinite(value)}
        kept = {*highlighted, *[*ends][:1], *(line.label for line in panel.lines if line.control)}
        chosen = [name for name in ends if name in kept]
        candidates = [name for name in ends if name not in considered]
        while candidates and len(chosen) < HIGHLIGHTED:
            distance = {
                name: min((abs(ends[name] - ends[other]) for other in chosen), default=0.0)
                for name in candidates
            }
            chosen.append(max(candidates, key=distance.__getitem__))
            candidates.remove(chosen[-1])
        highlighted += [name for name in chosen if name not in highlighted]
        considered |= ends.keys()
    return highlighted


def _panel(
    panel: Panel, channels: Mapping[str, Any], selection: Any, limits: tuple[float, float]
) -> Any:
    """The bands, lines and dots of a panel, and a rule at the training length."""
    values = [
        {"line": line.label, "x": _number(point.x), **_ends(point)}
        for line in panel.lines
        for point in line.points
        if _number(point.value) is not None
    ]
    x = _x_axis(panel, values)
    scale = alt.Scale(
        type="log" if panel.log_y else "linear", domain=list(limits), zero=False, nice=False
    )
    y: dict[str, Any] = {"title": panel.y_title, "scale": scale}
    position = alt.Tooltip("x:Q", title=panel.x_title, format=",~g")
    tooltip = [alt.Tooltip("line:N", title="line"), position, *_TOOLTIPS]
    dots = 0.9 if max(len(line.points) for line in panel.lines) <= MOST_DOTS else 0.0

    def opacity(highlighted: float, other: float) -> Any:
        return alt.condition(selection, alt.value(highlighted), alt.value(other))

    base = _data(values).encode(x=x, color=channels["color"])
    layers: list[Any] = [
        base.mark_area(clip=True).encode(
            y=alt.Y("low:Q", **y), y2="high:Q", opacity=opacity(0.13, 0.0)
        ),
        base.mark_line(clip=True).encode(
            y=alt.Y("value:Q", **y), strokeDash=channels["strokeDash"], opacity=opacity(1.0, 0.15)
        ),
        base.mark_point(clip=True, filled=True, size=22).encode(
            y=alt.Y("value:Q", **y), tooltip=tooltip, opacity=opacity(dots, 0.0)
        ),
    ]
    if panel.train_length is not None:
        rule = _data([{"x": panel.train_length, "label": "training length"}]).encode(x="x:Q")
        layers.append(rule.mark_rule(color="#606060", strokeDash=[2, 3], clip=True))
        label = rule.mark_text(align="left", dx=4, y=12, color="#606060", clip=True)
        layers.append(label.encode(text="label:N"))
    chart = alt.layer(*layers)
    return chart.properties(title=panel.title) if panel.title else chart


def _x_axis(panel: Panel, values: Sequence[Mapping[str, Any]]) -> Any:
    """The x axis; where positions reach 2 L or more, it is logarithmic and starts at L/4."""
    ends = [point.x for line in panel.lines for point in line.points]
    length = panel.train_length
    by_position = length is not None and ends and max(ends) >= 2 * length
    integers = all(float(value["x"] or 0).is_integer() for value in values)
    log = panel.log_x or by_position
    return alt.X(
        "x:Q",
        title=panel.x_title,
        axis=alt.Axis(format=",~f", tickCount=6, tickMinStep=1 if integers else alt.Undefined),
        scale=alt.Scale(
            type="log" if log else "linear",
            base=2 if log else alt.Undefined,
            domainMin=length / 4 if length is not None and by_position else alt.Undefined,
            zero=False,
            nice=False,
        ),
    )


def _limits(lines: Sequence[Line], log: bool) -> tuple[float, float]:
    """The limits of the y axis, from values and intervals up to `WIDE`, without extreme starts."""
    points = [
        point
        for line in lines
        for point in line.points[2 if len(line.points) > 8 else 0 :]
        if math.isfinite(point.value) and (not log or point.value > 0)
    ]
    if not points:
        return (1.0, 2.0)
    ends = [(_number(point.low), _number(point.high)) for point in points]
    bands = [(a, b) for a, b in ends if a is not None and b is not None and (not log or a > 0)]
    widest = WIDE * median(high - low for low, high in bands) if bands else 0.0
    values = [point.value for point in points]
    values += [end for band in bands if band[1] - band[0] <= widest for end in band]
    low, high = min(values), max(values)
    if log:
        margin = (high / low) ** 0.06 if high > low else 1.5
        return (low / margin, high * margin)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    return (low - margin, high + margin)


# Values with intervals


def _intervals(figure: Intervals) -> Any:
    """Values with their intervals, rows sorted by the last column, without empty columns."""
    columns = [column for column in figure.columns if any(column.values)]
    last = [-math.inf if value is None else value.value for value in columns[-1].values]
    order = [label for _, label in sorted(zip(last, figure.rows, strict=True), key=lambda r: -r[0])]
    scale = alt.Scale(zero=False)
    if figure.symlog is not None:
        values = [v for column in columns for v in column.values if v is not None]
        ends = [end for v in values for end in (v.low, v.value, v.high) if end is not None]
        scale = alt.Scale(type="symlog", constant=figure.symlog, domain=[min(ends), max(ends)])
    charts = []
    for number, column in enumerate(columns):
        cells = zip(figure.rows, column.values, strict=True)
        data = _data([{"row": row, **_ends(value)} for row, value in cells if value is not None])
        labels = alt.Undefined if number == 0 else alt.Axis(labels=False, ticks=False)
        base = data.encode(y=alt.Y("row:N", sort=order, title=None, axis=labels))
        x: dict[str, Any] = {"title": None, "scale": scale, "axis": alt.Axis(tickCount=4)}
        layers: list[Any] = [
            base.mark_rule(color=COLOURS[2], opacity=0.55, strokeWidth=2).encode(
                x=alt.X("low:Q", **x), x2="high:Q"
            ),
            base.mark_point(filled=True, size=45, color=COLOURS[2], opacity=1).encode(
                x=alt.X("value:Q", **x), tooltip=[alt.Tooltip("row:N", title="row"), *_TOOLTIPS]
            ),
        ]
        if column.zero:
            zero = _data([{"zero": 0}]).mark_rule(color="#404040")
            layers.insert(0, zero.encode(x=alt.X("zero:Q", scale=scale)))
        width = 300 if len(columns) <= 2 else 180
        size = {"width": width, "height": ROW_HEIGHT * len(order)}
        charts.append(alt.layer(*layers).properties(**size, title=_wrapped(column.title, 34)))
    return alt.hconcat(*charts, title=alt.Title(_wrapped(figure.title), offset=14))


# Grids


def _grid(figure: Grid) -> Any:
    """Coloured cells with their texts; cells without texts are small."""
    values = [
        {"row": row, "column": column, "value": _number(value), "text": text}
        for row, line, texts in zip(figure.rows, figure.values, figure.texts, strict=True)
        for column, value, text in zip(figure.columns, line, texts, strict=True)
    ]
    texts = any(cell["text"] for cell in values)
    size = max(3, min(CELL_WIDTH, 640 // len(figure.columns)))
    widest = LETTER_WIDTH * max(map(len, figure.columns))
    base = _data(values).encode(
        x=alt.X(
            "column:N",
            sort=list(figure.columns),
            title=figure.x_title or None,
            axis=alt.Axis(orient="top", labelAngle=0 if widest < size else -45),
        ),
        y=alt.Y("row:N", sort=list(figure.rows), title=figure.y_title or None),
        tooltip=["row:N", "column:N", alt.Tooltip("value:Q", format=",.4~g"), "text:N"],
    )
    scale = alt.Scale(scheme="viridis", zero=False)
    colour = alt.Color("value:Q", scale=scale, legend=alt.Legend(title=figure.scale_title or None))
    has_value = "datum.value !== null"
    layers: list[Any] = [
        base.mark_rect(color="#EDEDED"),
        base.transform_filter(has_value).mark_rect().encode(color=colour),
    ]
    if texts:
        numbers = [cell["value"] for cell in values if isinstance(cell["value"], float)]
        low, high = min(numbers, default=0.0), max(numbers, default=0.0)
        # Colours below this value are too dark for black text.
        dark = f"{has_value} && datum.value < {low + 0.55 * (high - low)}"
        text_colour = alt.condition(dark, alt.value("white"), alt.value("black"))
        layers.append(base.mark_text(fontSize=10).encode(text="text:N", color=text_colour))
    height = alt.Step(ROW_HEIGHT if texts else size)
    return alt.layer(*layers).properties(
        width=alt.Step(size), height=height, title=_wrapped(figure.title)
    )


# Texts and numbers


def _wrapped(text: str, width: int = TITLE_WIDTH) -> list[str] | str:
    return textwrap.wrap(text, width) or ""


def _data(values: Sequence[Any]) -> Any:
    return alt.Chart(alt.Data(values=values))  # type: ignore[no-untyped-call]


def _ends(value: Point | Estimate) -> dict[str, float | None]:
    return {name: _number(getattr(value, name)) for name in ("value", "low", "high")}


def _number(value: float | None) -> float | None:
    """The number rounded to `DIGITS` digits; None where it is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")
