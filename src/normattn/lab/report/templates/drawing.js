// What every figure needs: SVG elements, scales, ticks, labels that do not collide, values under the pointer.
const NAMESPACE = document.getElementById("svg").namespaceURI;
const LETTER = 6.3;  // pixels of a letter at the size of a figure's text

function el(parent, name, attributes = {}, text) {
  const made = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function html(parent, name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

const isNumber = (value) => typeof value === "number";
const longest = (texts) => LETTER * Math.max(0, ...texts.map((text) => text.length));
const colour = (index) => `var(--c${index})`;

function show(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e9)) return value.toExponential(2);
  return Number.isInteger(value) ? value.toLocaleString("en") : value.toLocaleString("en", { maximumSignificantDigits: 4 });
}

function withInterval([value, low, high]) {
  return isNumber(low) && isNumber(high) ? `${show(value)} [${show(low)}, ${show(high)}]` : `${show(value)} (no interval)`;
}

function scale(low, high, from, to, log) {
  const place = log ? Math.log : (value) => value;
  const [a, b] = [place(low), place(high)];
  return (value) => from + (to - from) * (b === a ? 0.5 : (place(value) - a) / (b - a));
}

function ticks(low, high, most) {
  const rough = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) found.push(Number((k * step).toPrecision(12)));
  return found;
}

function logTicks(low, high, base) {
  const found = [];
  for (let power = Math.floor(Math.log(low) / Math.log(base)); base ** power <= high * (1 + 1e-9); power++)
    for (const factor of base === 10 && high / low < 1000 ? [1, 2, 5] : [1])
      if (factor * base ** power >= low * (1 - 1e-9) && factor * base ** power <= high * (1 + 1e-9)) found.push(factor * base ** power);
  return found;
}

// Only ticks whose texts leave room to each other.
function apart(found, position, room) {
  let last = -Infinity;
  return found.filter((tick) => position(tick) - last >= room(tick) && ((last = position(tick)), true));
}

// Heights at least `gap` apart, in low … high, in the order of what is wanted; as in plots/labels.py.
function spread(wanted, gap, low, high) {
  if (wanted.length > 1) gap = Math.min(gap, (high - low) / (wanted.length - 1));
  const order = wanted.map((_, i) => i).sort((a, b) => wanted[a] - wanted[b] || a - b);
  const bottom = ([mean, count]) => Math.min(Math.max(mean - gap * (count - 1) / 2, low), high - gap * (count - 1));
  const crowds = [];
  for (const i of order) {
    crowds.push([Math.min(Math.max(wanted[i], low), high), 1]);
    for (let n = crowds.length; n > 1; n = crowds.length) {
      const [[a, m], [b, k]] = [crowds[n - 2], crowds[n - 1]];
      if (bottom(crowds[n - 1]) - bottom(crowds[n - 2]) - gap * (m - 1) >= gap * (1 - 1e-9)) break;
      crowds.splice(n - 2, 2, [(a * m + b * k) / (m + k), m + k]);
    }
  }
  const heights = crowds.flatMap((crowd) => Array.from({ length: crowd[1] }, (_, place) => bottom(crowd) + gap * place));
  const result = [];
  order.forEach((i, place) => { result[i] = heights[place]; });
  return result;
}

const tip = document.getElementById("tip");

function tell(svg, hit) {
  tip.textContent = hit.text;
  tip.hidden = false;
  const box = svg.getBoundingClientRect();
  const [x, y] = [box.left + hit.x + scrollX, box.top + hit.y + scrollY];
  const right = document.documentElement.clientWidth + scrollX - tip.offsetWidth - 8;
  tip.style.left = `${Math.max(scrollX + 8, Math.min(x + 12, right))}px`;
  tip.style.top = `${Math.max(scrollY, y - tip.offsetHeight - 10)}px`;
}

// `hits` are {x, y, text, group}: the nearest to the pointer is told; arrow keys move along and across groups.
function readable(svg, hits, label) {
  svg.setAttribute("tabindex", "0");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  const ring = el(svg, "circle", { r: 5, fill: "none", stroke: "var(--ink)", "stroke-width": 1.5, visibility: "hidden" });
  let current = -1;
  const choose = (index) => {
    current = index;
    ring.setAttribute("cx", hits[index].x);
    ring.setAttribute("cy", hits[index].y);
    ring.setAttribute("visibility", "visible");
    tell(svg, hits[index]);
  };
  const leave = () => { ring.setAttribute("visibility", "hidden"); tip.hidden = true; };
  const nearest = (x, y, among) => among.reduce((best, index) => {
    const distance = Math.hypot(hits[index].x - x, hits[index].y - y);
    return distance < best[1] ? [index, distance] : best;
  }, [-1, Infinity])[0];
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const index = nearest(event.clientX - box.left, event.clientY - box.top, [...hits.keys()]);
    if (index >= 0) choose(index);
  });
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    if (!hits.length) return;
    const at = hits[Math.max(0, current)];
    const same = [...hits.keys()].filter((index) => hits[index].group === at.group);
    const groups = [...new Set(hits.map((hit) => hit.group))];
    const across = (by) => {
      const group = groups[(groups.indexOf(at.group) + by + groups.length) % groups.length];
      return nearest(at.x, at.y, [...hits.keys()].filter((index) => hits[index].group === group));
    };
    const along = (by) => same[Math.min(same.length - 1, Math.max(0, same.indexOf(current) + by))];
    const moves = {
      ArrowRight: () => along(1), ArrowLeft: () => along(-1), ArrowUp: () => across(-1), ArrowDown: () => across(1),
      Home: () => same[0], End: () => same.at(-1),
    };
    if (event.key === "Escape") leave();
    if (!(event.key in moves)) return;
    event.preventDefault();
    choose(current < 0 ? 0 : moves[event.key]());
  });
}
