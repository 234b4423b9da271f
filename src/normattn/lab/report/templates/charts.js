// A switch shows all columns of a table.
for (const more of document.querySelectorAll("input.more")) {
  const table = more.closest(".table");
  more.addEventListener("change", () => table.classList.toggle("wide", more.checked));
}

// Charts: each figure is a Vega-Lite specification, drawn as SVG without eval and without network.
const VALUES = JSON.parse(document.getElementById("values").textContent);
const failures = [];

// The panels of a chart below each other, each with its own labels, at most `width` wide.
function stacked(spec, width) {
  const { hconcat, concat, ...rest } = JSON.parse(JSON.stringify(spec), (key, value) =>
    value === false && (key === "labels" || key === "ticks") ? undefined
      : value?.orient === "top" && value.columns ? { ...value, columns: 2 } : value);
  const panels = (hconcat || concat).map((panel) => ({ ...panel, width: Math.min(panel.width, width) }));
  return { ...rest, concat: panels, columns: 1 };
}

async function draw(place, spec) {
  const show = (drawn) => vegaEmbed(place, drawn, { actions: false, renderer: "svg", ast: true });
  const beyond = () => place.scrollWidth - place.clientWidth;
  await show(spec);
  if (beyond() <= 0 || !(spec.concat || spec.hconcat)) return;
  const width = place.clientWidth - 60;
  await show(stacked(spec, width));
  if (beyond() > 0) await show(stacked(spec, Math.max(140, width - beyond())));
}

for (const host of document.querySelectorAll("figure[data-chart]")) {
  const place = host.querySelector(".chart");
  draw(place, VALUES.charts[Number(host.dataset.chart)])
    .then(() => { host.dataset.drawn = "yes"; })
    .catch((error) => { failures.push(String(error)); place.textContent = String(error); });
}
