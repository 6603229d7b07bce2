// Timelines: pan, zoom, hover and keys. Times are cycles; everything in a chart carries its own in data attributes.
const pen = document.createElement("canvas").getContext("2d"), widths = new Map();
function textWidth(text) {
  if (!widths.has(text)) widths.set(text, pen.measureText(text).width);
  return widths.get(text);
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].map((f) => f * power).find((step) => step >= least);
}

function timeline(figure) {
  const svg = figure.querySelector(".chart"), readout = figure.querySelector(".readout"), d = figure.dataset;
  const [start, end, from, to, mhz] = [d.start, d.end, d.from, d.to, d.mhz].map(Number);
  const boxes = [...svg.querySelectorAll("[data-s]")].map((g) => ({
    g, rect: g.querySelector("rect"), text: g.querySelector("text"), info: g.dataset.info, labels: g.dataset.labels.split("|"),
    s: Number(g.dataset.s), e: Number(g.dataset.e), waits: g.classList.contains("op") && g.dataset.info.startsWith("wait"),
  }));
  const ops = boxes.filter((b) => b.info && !b.waits).sort((a, b) => a.s - b.s);
  const axis = svg.querySelector(".axis"), bottom = Number(axis.dataset.bottom), clip = svg.querySelector("clipPath rect");
  const height = svg.viewBox.baseVal.height;
  pen.font = getComputedStyle(svg.querySelector("text")).font;
  let a = from, b = to, left = 140, right = 46, width = 1140, scale = 1, chosen = null, queued = false;

  function draw() {
    queued = false;
    width = Math.max(320, svg.clientWidth);
    left = width < 640 ? 120 : 140;
    right = width < 640 ? 38 : 46;
    const plot = width - left - right;
    scale = plot / (b - a);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    clip.setAttribute("x", left);
    clip.setAttribute("width", plot);
    for (const box of boxes) {
      const s = Math.max(box.s, a), e = Math.min(box.e, b), hidden = e <= s;
      box.g.style.display = hidden ? "none" : "";
      if (hidden) continue;
      const x = left + (s - a) * scale, w = (e - s) * scale;
      box.rect.setAttribute("x", x);
      box.rect.setAttribute("width", w > 3 ? w - 0.8 : Math.max(w, 0.8));
      box.text.setAttribute("x", x + w / 2);
      box.text.textContent = box.labels.find((label) => textWidth(label) + 5 < w) || "";
    }
    for (const g of svg.querySelectorAll(".area")) {
      const x = left - (a - start) * scale;
      g.setAttribute("transform", `translate(${x} ${g.dataset.base}) scale(${scale} ${-g.dataset.tall})`);
    }
    for (const text of svg.querySelectorAll(".name")) text.setAttribute("x", left - 8);
    for (const text of svg.querySelectorAll(".share")) text.setAttribute("x", width - right + 5);
    for (const base of svg.querySelectorAll(".base")) {
      base.setAttribute("x", left);
      base.setAttribute("width", plot);
    }
    drawAxis(plot);
    d.viewFrom = a;
    d.viewTo = b;
  }

  function drawAxis(plot) {
    const step = niceStep((b - a) / Math.max(2, plot / 110)), parts = [];
    for (let t = Math.ceil(a / step) * step; t <= b; t += step) {
      const x = left + (t - a) * scale;
      parts.push(`<path d="M${x} 24V${bottom}"/><text x="${x}" y="${bottom + 14}">${t.toLocaleString("en-US")}</text>`);
      parts.push(`<text class="us" x="${x}" y="16">${(t / mhz).toFixed(step / mhz < 0.1 ? 3 : 2)} us</text>`);
    }
    axis.innerHTML = parts.join("");
  }

  function show(x, y) {
    const span = Math.min(Math.max(y - x, 20), end - start);
    a = Math.min(Math.max(x, start), end - span);
    b = a + span;
    if (!queued) {
      queued = true;
      requestAnimationFrame(draw);
    }
  }
  const zoom = (factor, at) => show(at - (at - a) * factor, at + (b - at) * factor);
  const pan = (share) => show(a + share * (b - a), b + share * (b - a));
  const actions = {
    left: () => pan(-0.25), right: () => pan(0.25), in: () => zoom(0.6, (a + b) / 2), out: () => zoom(1 / 0.6, (a + b) / 2),
    view: () => show(from, to), all: () => show(start, end),
  };
  for (const button of figure.querySelectorAll("[data-do]")) button.addEventListener("click", actions[button.dataset.do]);

  function describe(box) {
    const [name, ...rest] = box.info.split(" · "), cycles = (t) => t.toLocaleString("en-US", { maximumFractionDigits: 0 });
    const times = `${cycles(box.s)} to ${cycles(box.e)} (${cycles(box.e - box.s)} cycles, ${((box.e - box.s) / mhz).toFixed(3)} us)`;
    return [name, [times, ...rest]];
  }
  function select(box) {
    if (chosen) chosen.g.classList.remove("on");
    chosen = box;
    if (!box) return;
    box.g.classList.add("on");
    const [name, rest] = describe(box);
    readout.textContent = `${name}: ${rest.join(" · ")}`;
  }
  function step(by) {
    const at = chosen ? ops.indexOf(chosen) + by : ops.findIndex((box) => box.s >= a);
    const box = ops[Math.min(Math.max(at, 0), ops.length - 1)];
    if (!box) return;
    if (box.s < a || box.e > b) show(box.s - (b - a) / 3, box.s + (2 * (b - a)) / 3);
    select(box);
  }

  let armed = false, drag = null;
  window.addEventListener("scroll", () => { armed = false; }, { passive: true });
  const cycle = (event) => a + (event.clientX - svg.getBoundingClientRect().left - left) / scale;
  svg.addEventListener("wheel", (event) => {
    if (!armed && !event.ctrlKey && document.activeElement !== svg) return; // the page is scrolling past
    const wide = b - a >= end - start, sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    if (!sideways && wide && event.deltaY > 0) return;
    event.preventDefault();
    if (sideways) pan((event.deltaX || event.deltaY) / 800);
    else zoom(Math.exp(event.deltaY / 500), Math.min(Math.max(cycle(event), a), b));
  }, { passive: false });
  svg.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, a, b };
    svg.setPointerCapture(event.pointerId);
    svg.classList.add("dragging");
  });
  svg.addEventListener("pointermove", (event) => {
    if (event.movementX || event.movementY) armed = true;
    if (drag) {
      const moved = (event.clientX - drag.x) / scale;
      show(drag.a - moved, drag.b - moved);
      tip.hidden = true;
      return;
    }
    const g = event.target.closest("[data-info]"), box = g && boxes.find((each) => each.g === g);
    tip.hidden = !box;
    if (!box) return;
    const [name, rest] = describe(box);
    point(event, name, rest.join(" · "));
  });
  const drop = (event) => {
    if (drag && event.type === "pointerup" && Math.abs(event.clientX - drag.x) < 4) {
      const g = document.elementFromPoint(event.clientX, event.clientY)?.closest("[data-info]");
      select(boxes.find((each) => each.g === g) || null);
    }
    drag = null;
    svg.classList.remove("dragging");
  };
  for (const kind of ["pointerup", "pointercancel"]) svg.addEventListener(kind, drop);
  svg.addEventListener("pointerleave", () => { tip.hidden = true; armed = false; });
  const keys = {
    ArrowLeft: actions.left, ArrowRight: actions.right, "+": actions.in, "=": actions.in, "-": actions.out, 0: actions.view,
    n: () => step(1), p: () => step(-1),
  };
  svg.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  new ResizeObserver(() => show(a, b)).observe(svg);
  draw();
}
document.querySelectorAll(".timeline").forEach(timeline);
