// The four kinds of figures. Each draws into `host` what is not in `hidden`, for a width in pixels.
const VALUES = JSON.parse(document.getElementById("values").textContent);

function canvas(host, title, width, height) {
  const panel = html(host, "div", "panel");
  if (title) html(panel, "h4", "", title);
  return el(panel, "svg", { width, height, viewBox: `0 0 ${width} ${height}` });
}

// Early bins of a long line, and intervals over five times as wide as the middle one, run off the axis.
function limits(lines, log) {
  const shown = lines.flatMap((line) => line.points.slice(line.points.length > 8 ? 2 : 0));
  const width = ([, , low, high]) => (isNumber(low) && isNumber(high) ? high - low : 0);
  const widths = shown.map(width).sort((a, b) => a - b);
  const half = widths.length / 2;
  const middle = widths.length ? (widths[Math.ceil(half) - 1] + widths[Math.floor(half)]) / 2 : 0;
  const narrow = shown.filter((point) => !(middle > 0 && width(point) > 5 * middle));
  const known = [...lines.flatMap((line) => line.points.map((point) => point[1])), ...narrow.flatMap((point) => point.slice(1))]
    .filter((value) => isNumber(value) && (!log || value > 0));
  const [low, high] = known.length ? [Math.min(...known), Math.max(...known)] : [1, 2];
  if (log) return high > low ? [low / (high / low) ** 0.06, high * (high / low) ** 0.06] : [low / 1.5, high * 1.5];
  const pad = 0.06 * (high - low) || 0.05 * Math.abs(high) || 0.5;
  return [low - pad, high + pad];
}

function path(points, at, steps) {
  let text = "";
  points.forEach((point, place) => {
    const [x, y] = at(point);
    text += !text ? `M${x} ${y}` : steps ? `H${x}V${y}` : `L${x} ${y}`;
  });
  return text;
}

function curves(figure, host, hidden, room) {
  const every = figure.panels.flatMap((panel) => panel.lines);
  const columns = getComputedStyle(host).gridTemplateColumns.split(" ").length;
  const width = Math.floor((room - 24 * (columns - 1)) / columns);
  for (const panel of figure.panels) if (panel.lines.length) curvePanel(panel, figure.shared ? every : panel.lines, host, hidden, width);
}

function curvePanel(panel, within, host, hidden, width) {
  const names = Math.min(longest(panel.lines.map((line) => line.label)) + 22, 0.42 * width);
  const height = Math.max(250, 13 * panel.lines.length + 60);
  const [left, right, top, bottom] = [46, width - names, 18, height - 40];
  const svg = canvas(host, panel.title, width, height);
  const places = panel.lines.flatMap((line) => line.points.map((point) => point[0]));
  const marks = panel.marks.filter((mark) => !panel.logX || mark.x > 0);
  const [first, last] = [Math.min(...places), Math.max(...places)];
  const x = scale(first, last, left + 6, right - 6, panel.logX);
  const [low, high] = limits(within, panel.logY);
  const y = scale(low, high, bottom, top, panel.logY);
  axes(svg, panel, { x, y, left, right, top, bottom, low, high, first, last, places });
  for (const mark of marks) {
    if (mark.x < first || mark.x > last) continue;
    el(svg, "line", { class: "mark", x1: x(mark.x), x2: x(mark.x), y1: top, y2: bottom });
    el(svg, "text", { class: "soft", x: x(mark.x) + 4, y: bottom - 5 }, mark.label);
  }
  const hits = [];
  const clip = (value) => Math.min(bottom, Math.max(top, y(value)));
  const shown = panel.lines.filter((line) => !hidden.has(line.label));
  for (const line of shown) {
    const drawn = line.points.filter((point) => isNumber(point[1]) && (!panel.logY || point[1] > 0));
    const band = drawn.filter((point) => isNumber(point[2]) && isNumber(point[3]) && (!panel.logY || point[2] > 0));
    const ink = colour(line.colour);
    if (band.length > 1) {
      const above = path(band, (point) => [x(point[0]), clip(point[3])], panel.steps);
      const back = band.map((point) => [x(point[0]), clip(point[2])]).reverse();
      const below = back.map(([at, down], k) => (panel.steps && k ? `V${down}H${at}` : `L${at} ${down}`)).join("");
      el(svg, "path", { d: `${above}${below}Z`, fill: ink, opacity: 0.12 });
    }
    el(svg, "path", {
      d: path(drawn, (point) => [x(point[0]), y(point[1])], panel.steps), fill: "none", stroke: ink, "stroke-width": 1.75,
      "stroke-linejoin": "round", "stroke-dasharray": line.dashed ? "6 3" : "none",
    });
    for (const point of drawn) {
      if (drawn.length <= 12 && !panel.steps)
        el(svg, "circle", { cx: x(point[0]), cy: y(point[1]), r: 2.75, stroke: ink, fill: line.dashed ? "var(--ground)" : ink });
      hits.push({ x: x(point[0]), y: y(point[1]), group: line.label,
        text: `${line.label}\n${panel.x}: ${show(point[0])}\n${panel.y}: ${withInterval(point.slice(1))}` });
    }
  }
  const named = shown.map((line) => [line, line.points.findLast((point) => isNumber(point[1]))]).filter(([, end]) => end);
  const heights = spread(named.map(([, end]) => clip(end[1])), 13, top, bottom);
  named.forEach(([line, end], place) => {
    el(svg, "line", { x1: x(end[0]) + 2, y1: clip(end[1]), x2: right + 6, y2: heights[place], stroke: colour(line.colour), "stroke-width": 0.6 });
    const most = Math.floor((names - 10) / LETTER);
    const text = line.label.length > most ? `${line.label.slice(0, most - 1)}…` : line.label;
    el(svg, "text", { class: "end", x: right + 9, y: heights[place] + 4, style: `fill: color-mix(in srgb, ${colour(line.colour)} 75%, var(--ink))` }, text);
  });
  readable(svg, hits, `${panel.title || panel.y}: ${shown.length} lines`);
}

function axes(svg, panel, { x, y, left, right, top, bottom, low, high, first, last, places }) {
  for (const tick of panel.logY ? logTicks(low, high, 10) : ticks(low, high, (bottom - top) / 45)) {
    el(svg, "line", { class: "grid", x1: left, x2: right, y1: y(tick), y2: y(tick) });
    el(svg, "text", { class: "soft", x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, show(tick));
  }
  const distinct = [...new Set(places)].sort((a, b) => a - b);
  const wanted = panel.logX ? (distinct.length <= 6 ? distinct : logTicks(first, last, 2)) : ticks(first, last, (right - left) / 60);
  for (const tick of apart(wanted, x, (value) => LETTER * show(value).length + 10)) {
    el(svg, "line", { class: "grid", x1: x(tick), x2: x(tick), y1: top, y2: bottom });
    el(svg, "text", { class: "soft", x: x(tick), y: bottom + 15, "text-anchor": "middle" }, show(tick));
  }
  el(svg, "path", { class: "axis", fill: "none", d: `M${left} ${top}V${bottom}H${right}` });
  el(svg, "text", { x: (left + right) / 2, y: bottom + 33, "text-anchor": "middle" }, panel.x);
  el(svg, "text", { x: 2, y: 9 }, panel.y);
}

function intervals(figure, host, hidden, room) {
  const rows = figure.rows.map((label, place) => [label, place]).filter(([label]) => !hidden.has(label));
  const columns = Math.max(1, Math.min(figure.columns.length, Math.floor(room / 340)));
  const width = Math.floor((room - 24 * (columns - 1)) / columns);
  host.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
  const bend = figure.symlog;
  const on = (value) => (!bend || Math.abs(value) <= bend ? value / (bend || 1) : Math.sign(value) * (1 + Math.log10(Math.abs(value) / bend)));
  const bends = [0, ...[...Array(12).keys()].flatMap((power) => [bend * 10 ** power, -bend * 10 ** power])].sort((a, b) => a - b);
  const all = figure.columns.flatMap((column) => column.values.flat());
  for (const column of figure.columns) {
    const left = Math.min(longest(figure.rows) + 10, 0.45 * width);
    const [top, step] = [6, 20];
    const bottom = top + step * Math.max(1, rows.length);
    const svg = canvas(host, column.title, width, bottom + 24);
    const known = (bend ? all : column.values.flat()).filter(isNumber).concat(column.zero ? [0] : []).map(on);
    const [least, most] = known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
    const pad = 0.05 * (most - least) || 0.5;
    const place = scale(least - pad, most + pad, left, width - 12);
    const x = (value) => place(on(value));
    const wanted = bend ? bends.filter((value) => on(value) >= least - pad && on(value) <= most + pad) : ticks(least - pad, most + pad, (width - left) / 60);
    for (const tick of apart(wanted, x, (value) => LETTER * show(value).length + 8)) {
      el(svg, "line", { class: "grid", x1: x(tick), x2: x(tick), y1: top, y2: bottom });
      el(svg, "text", { class: "soft", x: x(tick), y: bottom + 15, "text-anchor": "middle" }, show(tick));
    }
    if (column.zero) el(svg, "line", { class: "axis", x1: x(0), x2: x(0), y1: top, y2: bottom });
    const hits = [];
    rows.forEach(([label, row], line) => {
      const y = top + step * (line + 0.5);
      const [value, low, high] = column.values[row] || [];
      const letters = Math.floor((left - 8) / LETTER);
      el(svg, "text", { x: left - 8, y: y + 4, "text-anchor": "end" }, label.length > letters ? `${label.slice(0, letters - 1)}…` : label);
      if (!isNumber(value)) return;
      const sure = isNumber(low) && isNumber(high);
      if (sure) el(svg, "line", { x1: x(low), x2: x(high), y1: y, y2: y, stroke: colour(2), "stroke-width": 3, opacity: 0.5 });
      el(svg, "circle", { cx: x(value), cy: y, r: 3.5, stroke: colour(2), fill: sure ? colour(2) : "var(--ground)" });
      hits.push({ x: x(value), y, group: "rows", text: `${label}\n${column.title}: ${withInterval([value, low, high])}` });
    });
    readable(svg, hits, `${column.title}: ${rows.length} rows`);
  }
}

function shade(share) {
  const place = Math.min(1, Math.max(0, share)) * (VALUES.cells.length - 1);
  const [below, part] = [Math.floor(place), place % 1];
  const [a, b] = [below, Math.min(below + 1, VALUES.cells.length - 1)].map((at) => [1, 3, 5].map((k) => parseInt(VALUES.cells[at].slice(k, k + 2), 16)));
  return a.map((from, channel) => Math.round(from + (b[channel] - from) * part));
}

function grid(figure, host, hidden, room) {
  const rows = figure.rows.map((label, place) => [label, place]).filter(([label]) => !hidden.has(label));
  const known = figure.values.flat().filter((value) => isNumber(value) && (!figure.log || value > 0));
  const share = scale(Math.min(...known), Math.max(...known), 0, 1, figure.log);
  const left = Math.min(longest(figure.rows) + 12, 170);
  const inside = longest(figure.texts.flat()) + 10;
  const cell = Math.max(inside, Math.min(110, (room - left - 60) / figure.columns.length), 14);
  const turned = longest(figure.columns) > cell;
  const top = (figure.x ? 18 : 4) + (turned ? 0.6 * longest(figure.columns) + 16 : 18);
  const step = 24;
  const bottom = top + step * rows.length;
  const width = left + cell * figure.columns.length + (turned ? 0.75 * longest(figure.columns.slice(-1)) : 0) + 4;
  const svg = canvas(host, "", width, bottom + 50);
  if (figure.x) el(svg, "text", { x: left, y: 11, class: "soft" }, figure.x);
  figure.columns.forEach((name, place) => {
    const x = left + cell * (place + 0.5);
    el(svg, "text", turned ? { transform: `translate(${x} ${top - 7}) rotate(-35)` } : { x, y: top - 6, "text-anchor": "middle" }, name);
  });
  const hits = [];
  rows.forEach(([label, at], line) => {
    const y = top + step * line;
    const letters = Math.floor((left - 8) / LETTER);
    el(svg, "text", { x: left - 8, y: y + 16, "text-anchor": "end" }, label.length > letters ? `${label.slice(0, letters - 1)}…` : label);
    figure.columns.forEach((name, place) => {
      const [value, text] = [figure.values[at][place], figure.texts[at][place]];
      const coloured = isNumber(value) && (!figure.log || value > 0);
      const [r, g, b] = coloured ? shade(share(value)) : [];
      const x = left + cell * place;
      el(svg, "rect", { x: x + 1, y: y + 1, width: cell - 2, height: step - 2, fill: coloured ? `rgb(${r} ${g} ${b})` : "var(--raised)" });
      const ink = !coloured ? "var(--ink)" : 0.2126 * r + 0.7152 * g + 0.0722 * b > 115 ? "#000" : "#fff";
      el(svg, "text", { x: x + cell / 2, y: y + 16, "text-anchor": "middle", style: `fill: ${ink}` }, text);
      const said = isNumber(value) ? `${figure.scale || "value"}: ${show(value)}` : text || "not measured";
      hits.push({ x: x + cell / 2, y: y + step / 2, group: label, text: `${label}\n${name}\n${said}` });
    });
  });
  if (known.length) colourScale(svg, figure, known, left, bottom + 12);
  readable(svg, hits, `${figure.title}: ${rows.length} rows, ${figure.columns.length} columns`);
}

function colourScale(svg, figure, known, left, top) {
  for (let k = 0; k < 60; k++) el(svg, "rect", { x: left + 2 * k, y: top, width: 2.2, height: 10, fill: `rgb(${shade(k / 59).join(" ")})` });
  el(svg, "text", { class: "soft", x: left, y: top + 24 }, `${show(Math.min(...known))} – ${show(Math.max(...known))}`);
  el(svg, "text", { class: "soft", x: left + 128, y: top + 10 }, figure.scale + (figure.log ? ", logarithmic" : ""));
}

function density(figure, host, hidden, room) {
  const rows = figure.rows.filter((row) => !hidden.has(row.label));
  const [left, step, top] = [Math.min(longest(figure.rows.map((row) => row.label)) + 10, 0.4 * room), 44, 22];
  const width = Math.min(room, 760);
  const bottom = top + step * rows.length;
  const svg = canvas(host, "", width, bottom + 42);
  const [low, high] = [Math.min(...figure.rows.map((row) => row.low)), Math.max(...figure.rows.map((row) => row.high))];
  const x = scale(low, high, left, width - 14);
  for (const tick of ticks(low, high, (width - left) / 70)) {
    el(svg, "line", { class: "grid", x1: x(tick), x2: x(tick), y1: top, y2: bottom });
    el(svg, "text", { class: "soft", x: x(tick), y: bottom + 15, "text-anchor": "middle" }, show(tick));
  }
  el(svg, "text", { x: (left + width) / 2, y: bottom + 33, "text-anchor": "middle" }, figure.x);
  const hits = [];
  rows.forEach((row, line) => {
    const base = top + step * (line + 1) - 2;
    const highest = Math.max(...row.heights.flat()) || 1;
    const letters = Math.floor((left - 8) / LETTER);
    el(svg, "text", { x: left - 8, y: base - 8, "text-anchor": "end" }, row.label.length > letters ? `${row.label.slice(0, letters - 1)}…` : row.label);
    el(svg, "line", { class: "grid", x1: left, x2: width - 14, y1: base, y2: base });
    row.heights.forEach((heights, version) => {
      const bin = (row.high - row.low) / heights.length;
      const tall = (height) => base - 0.88 * step * height / highest;
      const tops = heights.map((height, place) => `V${tall(height)}H${x(row.low + bin * (place + 1))}`).join("");
      const ink = colour(version % 2 ? 4 : 2);
      el(svg, "path", { d: `M${x(row.low)} ${base}${tops}V${base}Z`, fill: ink, "fill-opacity": 0.15, stroke: ink, "stroke-width": 1.2,
        "stroke-dasharray": version % 2 ? "4 2" : "none" });
      heights.forEach((height, place) => hits.push({ x: x(row.low + bin * (place + 0.5)), y: tall(height), group: `${row.label}\n${version}`,
        text: `${row.label}${row.names[version] ? `, ${row.names[version]}` : ""}\n${figure.x}: ${show(row.low + bin * place)} to ${show(row.low + bin * (place + 1))}\nheight: ${show(height)}` }));
    });
  });
  const names = figure.rows[0].names.filter(Boolean);
  names.forEach((name, version) => {
    const at = left + version * (longest(names) + 44);
    el(svg, "line", { x1: at, x2: at + 22, y1: 8, y2: 8, stroke: colour(version % 2 ? 4 : 2), "stroke-width": 2, "stroke-dasharray": version % 2 ? "4 2" : "none" });
    el(svg, "text", { x: at + 27, y: 12 }, name);
  });
  readable(svg, hits, `${figure.title}: ${rows.length} rows`);
}

const KINDS = { curves, intervals, grid, density };

// The names that switch something on and off: lines of a curve with their colour, rows of the others.
function entries(figure) {
  if (figure.kind === "density") return figure.rows.map((row) => [row.label]);
  if (figure.kind !== "curves") return figure.rows.map((label) => [label]);
  return [...new Map(figure.panels.flatMap((panel) => panel.lines).map((line) => [line.label, line])).entries()];
}

function legend(host, figure, hidden, redraw) {
  const names = entries(figure);
  const buttons = names.map(([label, line]) => {
    const button = html(host, "button");
    button.type = "button";
    if (line) {
      const swatch = el(button, "svg", { width: 22, height: 8, "aria-hidden": "true" });
      el(swatch, "line", { x1: 0, x2: 22, y1: 4, y2: 4, stroke: colour(line.colour), "stroke-width": 2.5, "stroke-dasharray": line.dashed ? "5 3" : "none" });
    }
    html(button, "span", "", label);
    button.addEventListener("click", () => { hidden.has(label) ? hidden.delete(label) : hidden.add(label); update(); });
    return button;
  });
  const update = () => {
    names.forEach(([label], place) => buttons[place].setAttribute("aria-pressed", String(!hidden.has(label))));
    redraw();
  };
  if (names.length > 3)
    for (const [text, labels] of [["all", []], ["none", names.map(([label]) => label)]]) {
      const button = html(host, "button", "every", text);
      button.type = "button";
      button.addEventListener("click", () => { hidden.clear(); labels.forEach((label) => hidden.add(label)); update(); });
    }
  update();
}

for (const host of document.querySelectorAll("figure[data-figure]")) {
  const figure = VALUES.figures[Number(host.dataset.figure)];
  const panels = host.querySelector(".panels");
  const hidden = new Set();
  let width = 0;
  if (figure.kind === "grid" || figure.kind === "density") panels.classList.add("wide");
  const redraw = () => {
    width = panels.clientWidth;
    panels.replaceChildren();
    KINDS[figure.kind](figure, panels, hidden, width);
  };
  legend(host.querySelector(".legend"), figure, hidden, redraw);
  new ResizeObserver(() => { if (panels.clientWidth !== width) redraw(); }).observe(panels);
}
