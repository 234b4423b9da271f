// What a reader does, and what the report then shows; written as JSON to an attribute of <html>.
const seen = { failures: [] };
addEventListener("error", (event) => seen.failures.push(event.message));
addEventListener("securitypolicyviolation", (event) => seen.failures.push(event.violatedDirective));
addEventListener("load", () => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  seen.hidden = all("#table-0 .extra").filter((cell) => cell.offsetParent === null).length;
  document.querySelector("#table-0 input.more")?.click();
  seen.shown = all("#table-0 .extra").filter((cell) => cell.offsetParent !== null).length;
  const finish = (rounds) => {
    const figures = all("figure");
    if (rounds && figures.some((figure) => !figure.dataset.drawn)) return setTimeout(finish, 100, rounds - 1);
    seen.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
    seen.scrolled = all("figure .chart").map((chart) => chart.scrollWidth - chart.clientWidth);
    seen.drawn = figures.map((figure) => all("svg path", figure).length);
    seen.numbers = all("svg [d]").filter((one) => /NaN|undefined|Infinity/.test(one.getAttribute("d"))).length;
    seen.failures.push(...failures);
    document.documentElement.dataset.seen = JSON.stringify(seen);
  };
  finish(300);
});
