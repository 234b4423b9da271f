// Tables: a click on a heading sorts: ascending, descending, as written.
for (const box of document.querySelectorAll(".table")) {
  const body = box.querySelector("tbody");
  const written = [...body.rows];
  const heads = [...box.querySelectorAll("thead th")];
  const next = { ascending: "descending", descending: "none", none: "ascending" };

  const key = (row, place) => {
    const cell = row.cells[place];
    return cell.dataset.order === undefined ? cell.textContent.trim() : Number(cell.dataset.order);
  };
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  const missing = (value, numeric) => value === "–" || value === "" || (numeric && typeof value !== "number");

  heads.forEach((head, place) => {
    head.querySelector("button").addEventListener("click", () => {
      const direction = next[head.getAttribute("aria-sort") || "none"];
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      if (direction !== "none") head.setAttribute("aria-sort", direction);
      const numeric = written.some((row) => typeof key(row, place) === "number");
      const sorted = direction === "none" ? written : [...written].sort((a, b) => {
        const [left, right] = [key(a, place), key(b, place)];
        const absent = missing(left, numeric) - missing(right, numeric);  // rows without a value stay below
        return absent || (direction === "ascending" ? compare(left, right) : compare(right, left));
      });
      body.append(...sorted);
    });
  });

  box.querySelector("input.more")?.addEventListener("change", (event) => box.classList.toggle("wide", event.target.checked));
}
