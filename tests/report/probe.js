// What a reader does, and what the page then shows; told as JSON in an attribute of <html>.
const failures = [];
addEventListener("error", (event) => failures.push(event.message));
addEventListener("securitypolicyviolation", (event) => failures.push(event.violatedDirective));
addEventListener("load", () => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const column = (place) => all("#table-0 tbody tr").filter((row) => !row.hidden).map((row) => row.cells[place].textContent.trim());
  const press = (button) => button.click();
  const said = { failures };
  said.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  said.drawn = all("figure").map((figure) => all("svg path, svg rect, svg circle", figure).length);
  said.numbers = all("svg [d], svg [x], svg [cx]").filter((one) =>
    ["d", "x", "y", "cx", "cy", "width"].some((name) => /NaN|undefined|Infinity/.test(one.getAttribute(name) || ""))).length;
  said.overlaps = all("figure").map((figure) => all(".panel svg", figure).map((svg) => {
    const boxes = all(".end", svg).map((text) => text.getBoundingClientRect()).sort((a, b) => a.top - b.top);
    return boxes.slice(1).filter((box, place) => box.top < boxes[place].top + 10).length;
  })).flat().reduce((a, b) => a + b, 0);
  said.beyond = all(".panels:not(.wide) svg text").filter((text) =>
    text.getBoundingClientRect().right > document.documentElement.clientWidth + 1).length;
  said.elements = { img: all("img").length, script: all("script").length };

  const [score, accuracy] = all("#table-0 thead button");
  press(accuracy); said.ascending = column(0); said.sort = accuracy.parentElement.getAttribute("aria-sort");
  press(accuracy); said.descending = column(0);
  press(accuracy); said.written = column(0);
  press(score); said.byName = column(0); press(score); press(score);
  const field = document.querySelector("#table-0 input");
  field.value = "a 10"; field.dispatchEvent(new Event("input"));
  said.filtered = column(0); said.counted = document.querySelector("#table-0 output").textContent;
  field.value = ""; field.dispatchEvent(new Event("input"));

  const figure = document.querySelector("figure");
  const named = () => all(".end", figure).map((text) => text.textContent);
  const [first] = all(".legend button", figure);
  said.before = named().length;
  press(first); said.after = named(); said.pressed = first.getAttribute("aria-pressed");
  press(all(".legend .every", figure)[1]); said.none = named().length;
  press(all(".legend .every", figure)[0]); said.all = named().length;

  const tip = document.getElementById("tip");
  const svg = document.querySelector(".panel svg");
  svg.focus();
  for (const key of ["ArrowRight", "ArrowRight", "ArrowDown"]) svg.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  said.tip = tip.hidden ? "" : tip.textContent;
  said.tips = all(".panel svg").map((svg) => {
    const box = svg.getBoundingClientRect();
    svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2, clientY: box.top + box.height / 2 }));
    return tip.hidden ? "" : tip.textContent;
  });
  svg.dispatchEvent(new PointerEvent("pointerleave"));
  said.left = tip.hidden;
  document.documentElement.dataset.said = JSON.stringify(said);
});
