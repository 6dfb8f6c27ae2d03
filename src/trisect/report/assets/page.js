"use strict";
/* Makes the page easier to use; everything it says is there without it. */
(() => {
  const all = (selector, from = document) => Array.from(from.querySelectorAll(selector));

  /* The colours: as the system has them, light, or dark. */
  const root = document.documentElement;
  const themes = ["auto", "light", "dark"];
  const button = document.createElement("button");
  button.id = "theme";
  button.type = "button";
  const show = (theme) => {
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
    button.textContent = `Colours: ${theme}`;
  };
  const stored = () => {
    try { return localStorage.getItem("trisect-theme"); } catch { return null; } /* files may have no storage */
  };
  const store = (theme) => {
    try { localStorage.setItem("trisect-theme", theme); } catch { /* then it is forgotten */ }
  };
  let theme = themes.includes(stored()) ? stored() : "auto";
  show(theme);
  button.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    show(theme);
    store(theme);
  });
  document.getElementById("top").prepend(button);

  /* What a mark says: under the pointer, or by the arrow keys inside a figure. */
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.setAttribute("role", "status");
  tip.hidden = true;
  document.body.append(tip);
  const marks = new Map();
  for (const title of all("svg .mark > title")) {
    marks.set(title.parentElement, title.textContent);
    title.remove(); /* or the browser would show it a second time */
  }
  const hide = () => {
    tip.hidden = true;
    all(".current").forEach((mark) => mark.classList.remove("current"));
  };
  const point = (mark) => {
    hide();
    mark.classList.add("current");
    tip.textContent = marks.get(mark);
    tip.hidden = false;
    const box = mark.getBoundingClientRect();
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(8, Math.min(room, box.left + box.width / 2 - tip.offsetWidth / 2))}px`;
    const above = box.top - tip.offsetHeight - 8;
    tip.style.top = `${above > 0 ? above : box.bottom + 8}px`;
  };
  for (const [mark] of marks) {
    mark.addEventListener("pointerenter", () => point(mark));
    mark.addEventListener("pointerleave", hide);
  }
  for (const drawing of all(".drawing")) {
    const own = all(".mark", drawing).filter((mark) => marks.has(mark));
    let at = -1;
    drawing.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") { at = -1; hide(); }
      if (!step || !own.length) return;
      event.preventDefault();
      at = (at + step + own.length) % own.length;
      point(own[at]);
    });
    drawing.addEventListener("blur", () => { at = -1; hide(); });
  }

  /* Series come and go. */
  for (const group of all(".toggles")) {
    group.hidden = false;
    const figure = group.closest("figure");
    for (const toggle of all("button", group)) {
      toggle.addEventListener("click", () => {
        const on = toggle.getAttribute("aria-pressed") !== "true";
        toggle.setAttribute("aria-pressed", String(on));
        const number = toggle.dataset.toggle;
        all(`[data-series="${number}"]`, figure).forEach((series) => { series.style.display = on ? "" : "none"; });
      });
    }
  }

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
