"use strict";
for (const box of document.querySelectorAll(".table")) {
  const body = box.querySelector("tbody"), heads = [...box.querySelectorAll("th")];
  const input = box.querySelector("input"), count = box.querySelector("output");
  const rows = [...body.rows];
  const show = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = words.length ? row.textContent.toLowerCase() : "";
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    count.textContent = words.length ? `${shown} of ${rows.length}` : `${rows.length}`;
  };
  input.addEventListener("input", show);
  show();
  heads.forEach((head, column) => head.firstChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const collator = new Intl.Collator(undefined, { numeric: true });
    const keys = new Map(rows.map((row) => [row, row.cells[column].textContent]));
    rows.sort((one, other) => {
      const [a, b] = [keys.get(one), keys.get(other)], [x, y] = [Number(a), Number(b)];
      const order = a !== "" && b !== "" && !isNaN(x) && !isNaN(y) ? x - y : collator.compare(a, b);
      return down ? -order : order;
    });
    body.append(...rows);
  }));
}
