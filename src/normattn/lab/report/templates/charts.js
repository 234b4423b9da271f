// Charts: each figure is a Vega-Lite specification, drawn as SVG without eval and without network.
const VALUES = JSON.parse(document.getElementById("values").textContent);
const failures = [];

for (const host of document.querySelectorAll("figure[data-chart]")) {
  const options = { actions: false, renderer: "svg", ast: true };
  vegaEmbed(host.querySelector(".chart"), VALUES.charts[Number(host.dataset.chart)], options)
    .then(() => { host.dataset.drawn = "yes"; })
    .catch((error) => { failures.push(String(error)); host.querySelector(".chart").textContent = String(error); });
}
