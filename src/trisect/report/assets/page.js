"use strict";
/* Makes the page easier to use; everything it says is there without it. */
(() => {
  const all = (selector, from = document) => Array.from(from.querySelectorAll(selector));

  /* Tables are sorted by a click on a heading; numbers as numbers. */
  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  };
  const compare = (a, b) => {
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1; /* what was not measured comes last */
    return typeof a === "number" ? a - b : a.localeCompare(b);
  };
  for (const table of all("table.sortable")) {
    const headings = all("thead th", table);
    headings.forEach((heading, column) => {
      const sorter = document.createElement("button");
      sorter.type = "button";
      sorter.textContent = heading.textContent;
      heading.replaceChildren(sorter);
      sorter.addEventListener("click", () => {
        const down = heading.getAttribute("aria-sort") === "ascending";
        headings.forEach((other) => other.removeAttribute("aria-sort"));
        heading.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = all("tbody tr", table);
        rows.sort((a, b) => compare(value(a, column), value(b, column)) * (down ? -1 : 1));
        rows.forEach((row) => table.tBodies[0].append(row));
      });
    });
  }
})();
