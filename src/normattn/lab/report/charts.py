"""Draw figures with Altair: each is one Vega-Lite chart, for the HTML report and for PNG files.

Importing this does not import Altair; drawing does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from normattn.lab.report.figure import (
    Curves,
    Density,
    DensityRow,
    Figure,
    Grid,
    IntervalColumn,
    Intervals,
    Line,
    Panel,
)
from normattn.lab.report.palette import LINES, line_colour, ranked

PIXELS_PER_POINT = 2.0
"""Resolution of PNG files."""
PANEL_WIDTH, PANEL_HEIGHT, ROW_HEIGHT, CELL_WIDTH = 300, 250, 20, 64
DIGITS = 6
"""Significant digits of a number in a chart: more than a picture or a tooltip shows."""
MANY_LINES, HIGHLIGHTED = 6, 4
"""A chart of more lines than the first draws all but the second faintly, until one is chosen."""
_WIDE = 5
"""Intervals wider than so many times the median do not stretch the y axis."""
_COLOUR = LINES[2]
_CONFIG: dict[str, Any] = {
    "background": "white",
    "font": "DejaVu Sans, Segoe UI, Roboto, sans-serif",
    "view": {"stroke": None},
    "axis": {"gridColor": "#E5E5E5", "labelFontSize": 11, "titleFontSize": 11, "labelLimit": 320},
    "legend": {
        "labelFontSize": 11,
        "labelLimit": 260,
        "symbolStrokeWidth": 2,
        "symbolOpacity": 1,
        "title": None,
    },
    "title": {"fontSize": 13, "anchor": "start"},
}


def vega_lite(figure: Figure) -> dict[str, Any]:
    """The figure as a Vega-Lite specification with its data inside; equal figures, equal values."""
    import altair as alt

    with alt.data_transformers.enable("default", max_rows=None, consolidate_datasets=False):
        return _without_generated_names(_chart(figure).configure(**_CONFIG).to_dict())


def png(figure: Figure) -> bytes:
    """The figure as the bytes of a PNG file."""
    import vl_convert

    image: bytes = vl_convert.vegalite_to_png(vega_lite(figure), scale=PIXELS_PER_POINT)
    return image


def _chart(figure: Figure) -> Any:
    match figure:
        case Curves():
            return _curves(figure)
        case Intervals():
            return _intervals(figure)
        case Grid():
            return _grid(figure)
        case Density():
            return _density(figure)


def _curves(figure: Curves) -> Any:
    """Panels of lines with bands, up to three beside each other; the legend highlights lines."""
    import altair as alt

    panels = [panel for panel in figure.panels if any(line.points for line in panel.lines)]
    lines = {line.label: line for panel in panels for line in panel.lines if line.points}
    places = ranked((line.family or line.label for line in lines.values()), figure.first)
    names = list(lines)
    families = [LINES[line_colour(places[line.family or line.label])] for line in lines.values()]
    dashes = [[6, 3] if line.dashed else [1, 0] for line in lines.values()]
    legend = alt.Legend(symbolType="stroke")
    colour = alt.Color(
        "line:N", sort=names, scale=alt.Scale(domain=names, range=families), legend=legend
    )
    dash = alt.StrokeDash(
        "line:N", sort=names, scale=alt.Scale(domain=names, range=dashes), legend=legend
    )
    started = [{"line": name} for name in names[:HIGHLIGHTED]]
    chosen = alt.selection_point(
        name="chosen",
        fields=["line"],
        bind="legend",
        toggle="true",
        value=started if len(lines) > MANY_LINES else alt.Undefined,
    )
    shared = _limits([line for panel in panels for line in panel.lines], panels[0].log_y)
    charts = []
    for panel in panels:
        limits = shared if figure.shared_y else _limits(panel.lines, panel.log_y)
        charts.append(_panel(panel, colour, dash, chosen, limits))
    charts[0] = charts[0].add_params(chosen)  # the other panels follow it by its name
    columns = {1: 1, 2: 2, 4: 2}.get(len(charts), 3)
    return alt.concat(*charts, columns=columns, title=figure.title)


def _panel(panel: Panel, colour: Any, dash: Any, chosen: Any, limits: tuple[float, float]) -> Any:
    import altair as alt

    start = _first_x(panel)
    values = [
        {
            "line": line.label,
            "x": _number(point.x),
            "value": _number(point.value),
            "low": _number(point.low),
            "high": _number(point.high),
        }
        for line in panel.lines
        for point in line.points
        if _number(point.value) is not None
    ]
    x = alt.X(
        "x:Q",
        title=panel.x_title,
        axis=alt.Axis(format="~s" if panel.log_x else ",~f", tickCount=6),
        scale=alt.Scale(
            type="log" if panel.log_x or start else "linear",
            base=2 if panel.log_x or start else alt.Undefined,
            domainMin=start or alt.Undefined,
            zero=False,
            nice=False,
        ),
    )
    scale = alt.Scale(
        type="log" if panel.log_y else "linear", domain=list(limits), zero=False, nice=False
    )
    interpolate: Any = "step-after" if panel.steps else "linear"
    base = _chart_of(values).encode(x=x)
    y = alt.Y("value:Q", title=panel.y_title, scale=scale)
    tooltip = [
        alt.Tooltip("line:N", title="line"),
        alt.Tooltip("x:Q", title=panel.x_title, format=",~g"),
        alt.Tooltip("value:Q", title=panel.y_title, format=",.4~g"),
        alt.Tooltip("low:Q", title="low", format=",.4~g"),
        alt.Tooltip("high:Q", title="high", format=",.4~g"),
    ]
    band = base.mark_area(clip=True, interpolate=interpolate).encode(
        y=alt.Y("low:Q", title=panel.y_title, scale=scale),
        y2="high:Q",
        color=colour,
        opacity=alt.condition(chosen, alt.value(0.13), alt.value(0.0)),
    )
    lines = base.mark_line(clip=True, interpolate=interpolate).encode(
        y=y,
        color=colour,
        strokeDash=dash,
        opacity=alt.condition(chosen, alt.value(1.0), alt.value(0.18)),
    )
    points = base.mark_point(clip=True, filled=True, size=22).encode(
        y=y,
        color=colour,
        tooltip=tooltip,
        opacity=alt.condition(chosen, alt.value(0.9), alt.value(0.1)),
    )
    layers: list[Any] = [band, lines, points]
    if panel.shaded is not None and values:
        first = min(value["x"] for value in values)  # type: ignore[type-var]
        area = _chart_of([{"x": first, "shaded": panel.shaded}]).encode(x=x, x2="shaded:Q")
        layers.insert(0, area.mark_rect(color="#000000", opacity=0.06, clip=True))
    if panel.marks:
        marks = [{"x": mark.x, "label": mark.label} for mark in panel.marks]
        rule = _chart_of(marks).encode(x="x:Q")
        layers.append(rule.mark_rule(color="#606060", strokeDash=[2, 3], clip=True))
        layers.append(
            rule.mark_text(align="left", dx=4, y=12, color="#606060", clip=True).encode(
                text="label:N"
            )
        )
    drawn = alt.layer(*layers).properties(width=PANEL_WIDTH, height=PANEL_HEIGHT)
    return drawn.properties(title=panel.title) if panel.title else drawn


def _first_x(panel: Panel) -> float | None:
    """Where a plot by position starts: a quarter of the training length, so that L is near a third.

    None for other plots.
    """
    ends = [point.x for line in panel.lines for point in line.points]
    if not panel.marks or not ends or max(ends) < 2 * panel.marks[0].x:
        return None
    return panel.marks[0].x / 4


def _limits(lines: Sequence[Line], log: bool) -> tuple[float, float]:
    """The y axis: all values, and the intervals that are not far wider than the others.

    The first points of a long line, where a training or a text begins, may leave the axis.
    """
    points = [
        point
        for line in lines
        for point in line.points[2 if len(line.points) > 8 else 0 :]
        if math.isfinite(point.value) and (not log or point.value > 0)
    ]
    if not points:
        return (1.0, 2.0)
    bands = [
        (low, high)
        for low, high in ((_number(point.low), _number(point.high)) for point in points)
        if low is not None and high is not None and (not log or low > 0)
    ]
    middle = median(high - low for low, high in bands) if bands else 0.0
    ends = [end for band in bands if band[1] - band[0] <= _WIDE * middle for end in band]
    values = [*(point.value for point in points), *ends]
    low, high = min(values), max(values)
    if log:
        room = (high / low) ** 0.06 if high > low else 1.5
        return (low / room, high * room)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    return (low - room, high + room)


def _intervals(figure: Intervals) -> Any:
    """Values with their intervals, the rows sorted by the first quantity."""
    import altair as alt

    first = figure.columns[0].values
    order = sorted(
        range(len(figure.rows)),
        key=lambda row: -math.inf if (value := first[row]) is None else value.value,
        reverse=True,
    )
    rows = [figure.rows[row] for row in order]
    scale = alt.Scale(zero=False)
    if figure.symlog is not None:
        ends = [
            end
            for column in figure.columns
            for value in column.values
            if value is not None
            for end in (value.low, value.value, value.high)
            if end is not None
        ]
        scale = alt.Scale(type="symlog", constant=figure.symlog, domain=[min(ends), max(ends)])
    width = PANEL_WIDTH if len(figure.columns) <= 2 else 180
    charts = []
    for number, column in enumerate(figure.columns):
        axis = alt.Undefined if number == 0 else alt.Axis(labels=False, ticks=False)
        y = alt.Y("row:N", sort=rows, title=None, axis=axis)
        charts.append(
            _interval_column(column, figure.rows, y, scale).properties(
                width=width, height=ROW_HEIGHT * len(rows), title=_lines(column.title, 34)
            )
        )
    return alt.hconcat(*charts, title=figure.title)


def _interval_column(column: IntervalColumn, rows: Sequence[str], y: Any, scale: Any) -> Any:
    import altair as alt

    values = [
        {
            "row": row,
            "value": _number(value.value),
            "low": _number(value.low),
            "high": _number(value.high),
        }
        for row, value in zip(rows, column.values, strict=True)
        if value is not None
    ]
    base = _chart_of(values).encode(y=y)
    rule = base.mark_rule(color=_COLOUR, opacity=0.55, strokeWidth=2).encode(
        x=alt.X("low:Q", title=None, scale=scale, axis=alt.Axis(tickCount=4)), x2="high:Q"
    )
    tooltip = [
        alt.Tooltip("row:N", title="row"),
        *(alt.Tooltip(f"{name}:Q", format=",.4~g") for name in ("value", "low", "high")),
    ]
    point = base.mark_point(filled=True, size=45, color=_COLOUR, opacity=1).encode(
        x=alt.X("value:Q", title=None, scale=scale), tooltip=tooltip
    )
    layers: list[Any] = [rule, point]
    if column.zero:
        zero = _chart_of([{"zero": 0}])
        layers.insert(0, zero.mark_rule(color="#404040").encode(x=alt.X("zero:Q", scale=scale)))
    return alt.layer(*layers)


def _grid(figure: Grid) -> Any:
    """Coloured cells with their texts; a grid without texts is drawn small."""
    import altair as alt

    values = [
        {
            "row": row,
            "column": column,
            "value": None if value is None or (figure.log and value <= 0) else _number(value),
            "text": figure.texts[r][c],
        }
        for r, row in enumerate(figure.rows)
        for c, column in enumerate(figure.columns)
        for value in [figure.values[r][c]]
    ]
    known = [cell["value"] for cell in values if isinstance(cell["value"], float)]
    texts = any(cell["text"] for cell in values)
    size = max(3, min(CELL_WIDTH, 640 // len(figure.columns)))
    base = _chart_of(values).encode(
        x=alt.X(
            "column:N",
            sort=list(figure.columns),
            title=figure.x_title or None,
            axis=alt.Axis(orient="top", labelAngle=0 if size >= CELL_WIDTH else -45),
        ),
        y=alt.Y("row:N", sort=list(figure.rows), title=figure.y_title or None),
    )
    scale = alt.Scale(type="log" if figure.log else "linear", scheme="viridis", zero=False)
    tooltip = ["row:N", "column:N", alt.Tooltip("value:Q", format=",.4~g"), "text:N"]
    has_value = "datum.value !== null"
    colour = alt.Color("value:Q", scale=scale, legend=alt.Legend(title=figure.scale_title or None))
    layers: list[Any] = [
        base.mark_rect(color="#EDEDED").encode(tooltip=tooltip),
        base.transform_filter(has_value).mark_rect().encode(color=colour, tooltip=tooltip),
    ]
    properties: dict[str, Any] = {
        "width": {"step": size},
        "height": {"step": ROW_HEIGHT if texts else size},
        "title": figure.title,
    }
    if texts:
        dark = f"{has_value} && datum.value < {_middle(known, figure.log)}"
        ink = alt.condition(dark, alt.value("white"), alt.value("black"))
        layers.append(base.mark_text(fontSize=10).encode(text="text:N", color=ink))
    return alt.layer(*layers).properties(**properties)


def _middle(values: Iterable[float], log: bool) -> float:
    """The value whose colour is of medium lightness."""
    known = list(values)
    if not known:
        return 0.0
    low, high = min(known), max(known)
    return low * (high / low) ** 0.55 if log else low + 0.55 * (high - low)


def _density(figure: Density) -> Any:
    """Distributions below each other on one x axis."""
    import altair as alt

    values = [value for row in figure.rows for value in _bins(row)]
    names = list(dict.fromkeys(value["version"] for value in values))
    base = _chart_of(values).mark_area(interpolate="step-after", fillOpacity=0.2, line=True)
    return (
        base.encode(
            x=alt.X("x:Q", title=figure.x_title, scale=alt.Scale(nice=False)),
            y=alt.Y("height:Q", title=None, axis=None, stack=None),
            color=alt.Color(
                "version:N",
                sort=names,
                scale=alt.Scale(domain=names, range=[LINES[2], LINES[4]][: len(names)]),
                legend=alt.Legend(orient="top") if len(names) > 1 else None,
            ),
        )
        .properties(width=420, height=38)
        .facet(
            row=alt.Row(
                "row:N",
                sort=[row.label for row in figure.rows],
                title=None,
                header=alt.Header(labelAngle=0, labelAlign="left", labelLimit=320),
            ),
            spacing=4,
            title=figure.title,
        )
    )


def _bins(row: DensityRow) -> list[dict[str, Any]]:
    """The row's bins as points, scaled to its highest."""
    highest = max((max(heights, default=0.0) for heights in row.heights), default=0.0) or 1.0
    return [
        {
            "row": row.label,
            "version": name,
            "x": _number(row.low + (row.high - row.low) * place / len(heights)),
            "height": _number(height / highest),
        }
        for heights, name in zip(row.heights, row.names, strict=True)
        for place, height in enumerate((*heights, 0.0))
    ]


def _chart_of(values: Sequence[Any]) -> Any:
    """A chart of these data points."""
    import altair as alt

    return alt.Chart(alt.Data(values=values))  # type: ignore[no-untyped-call]


def _number(value: float | None) -> float | None:
    """A finite number of `DIGITS` digits, or None."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{DIGITS}g}")


def _lines(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width) or [""]


def _without_generated_names(specification: dict[str, Any]) -> dict[str, Any]:
    """The specification without the counters that Altair puts into the names of views."""
    names: dict[str, str] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: walk(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [walk(inner) for inner in value]
        if isinstance(value, str) and value.startswith("view_") and value[5:].isdigit():
            return names.setdefault(value, f"view_{len(names)}")
        return value

    walked: dict[str, Any] = walk(specification)
    return walked
