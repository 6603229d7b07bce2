// Exploration: dots that answer, the heat map of two chosen fields, a table that sorts.
for (const figure of document.querySelectorAll(".scatter")) {
  const readout = figure.closest("section").querySelector(".readout");
  const words = (dot) => dot.dataset.info.split(" · ");
  figure.addEventListener("pointermove", (event) => {
    const dot = event.target.closest("[data-info]");
    if (!dot) tip.hidden = true;
    else point(event, words(dot)[0], words(dot).slice(1).join(" · "));
  });
  figure.addEventListener("pointerleave", () => { tip.hidden = true; });
  figure.addEventListener("click", (event) => {
    const dot = event.target.closest("[data-info]");
    for (const other of document.querySelectorAll(".scatter circle")) other.classList.toggle("on", !!dot && other.dataset.info === dot.dataset.info);
    readout.textContent = dot ? dot.dataset.info : "";
  });
}

const maps = [...document.querySelectorAll(".map")], choices = [...document.querySelectorAll(".choose select")];
function transpose(map) {
  const table = map.querySelector("table"), grid = [...table.rows].map((row) => [...row.cells]);
  const [head, body] = [document.createElement("thead"), document.createElement("tbody")];
  grid[0].forEach((_, i) => {
    const row = (i ? body : head).insertRow();
    for (const cells of grid) row.append(cells[i]);
  });
  table.replaceChildren(head, body);
  [map.dataset.x, map.dataset.y] = [map.dataset.y, map.dataset.x];
  const name = `${map.dataset.y} down, ${map.dataset.x} across`;
  table.setAttribute("aria-label", name);
  map.querySelector("figcaption").textContent = name;
}
function choose(changed) {
  let [x, y] = choices.map((each) => each.value);
  if (x === y) { // the other one gives way
    const other = choices[changed === choices[0] ? 1 : 0];
    other.value = [...other.options].map((option) => option.value).find((value) => value !== x);
    [x, y] = choices.map((each) => each.value);
  }
  for (const map of maps) {
    const { x: a, y: b } = map.dataset;
    if (a === y && b === x) transpose(map);
    map.hidden = !(map.dataset.x === x && map.dataset.y === y);
  }
}
for (const each of choices) each.addEventListener("change", () => choose(each));

for (const table of document.querySelectorAll(".sortable table")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const units = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9 };
  const value = (cell) => {
    const match = cell.textContent.match(/^([+-]?[\d.,]+)\s*(B|kB|MB|GB|%)?$/);
    return match ? Number(match[1].replaceAll(",", "")) * (units[match[2]] || 1) : cell.textContent;
  };
  const before = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  heads.forEach((head, i) => {
    const button = Object.assign(document.createElement("button"), { textContent: head.textContent });
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending", rows = [...body.rows];
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      rows.sort((p, q) => (down ? -1 : 1) * before(value(p.cells[i]), value(q.cells[i])));
      body.append(...rows);
    });
  });
}
