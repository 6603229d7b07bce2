"use strict";
const tip = document.getElementById("tip");

// Shows a box beside the pointer: a name in bold, then the rest.
function point(event, name, rest) {
  tip.hidden = false;
  tip.replaceChildren(Object.assign(document.createElement("b"), { textContent: name }), rest);
  const x = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8), above = event.clientY - tip.offsetHeight - 12;
  tip.style.left = `${Math.max(8, x)}px`;
  tip.style.top = `${above < 8 ? event.clientY + 18 : above}px`;
}

// Tables with a search field: words in any column, and kinds where there are boxes for them.
for (const filters of document.querySelectorAll(".filters")) {
  const rows = [...filters.closest("section").querySelectorAll("tbody tr")], count = filters.querySelector(".count");
  const search = filters.querySelector("[type=search]"), kinds = [...filters.querySelectorAll("[type=checkbox]")];
  const apply = () => {
    const words = search.value.toLowerCase().split(/\s+/), allowed = new Set(kinds.filter((k) => k.checked).map((k) => k.value));
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !((!kinds.length || allowed.has(row.dataset.kind)) && words.every((word) => text.includes(word)));
      shown += !row.hidden;
    }
    count.textContent = `${shown} of ${rows.length} shown`;
  };
  filters.addEventListener("input", apply);
  apply();
}
