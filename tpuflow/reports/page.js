"use strict";
// Draws the report from the JSON beside it. No library, no network; every chart is SVG made here, as wide as its place on the page.
const data = JSON.parse(document.getElementById("data").textContent);
const LEFT = 74, PHASES = ["forward", "backward", "update"].filter((p) => data.timeline.phase.includes(p));
let sought = "";

const escape = (s) => String(s).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]];
const seconds = (s) => { const [size, unit] = UNITS.find(([u]) => Math.abs(s) >= u) || [1e-9, "ns"]; return `${(s / size).toPrecision(4)} ${unit}`; };
const inUnit = (units, digits, n) => { const found = units.find(([size]) => n >= size); return found ? `${(n / found[0]).toFixed(digits)} ${found[1]}` : count(n); };
const bytes = (n) => n < 2 ** 10 ? `${count(n)} B` : inUnit([[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]], 2, n);
const operations = (n) => inUnit([[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]], 1, n);
const percent = (x) => `${(100 * x).toFixed(1)} %`;
const count = (n) => String(Number.isInteger(n) ? n : Number(n.toPrecision(4)));
const color = (name) => `var(--${name})`;
const place = (selector) => document.querySelector(selector);
const width = (selector) => Math.max(place(selector).clientWidth, 260);
const svg = (width, height, body) => `<svg viewBox="0 0 ${width} ${height}" role="img">${body}</svg>`;
const rect = (x, y, w, h, fill, title, extra = "") =>
  `<rect x="${x.toFixed(2)}" y="${y.toFixed(2)}" width="${Math.max(w, 0.4).toFixed(2)}" height="${h.toFixed(2)}" fill="${fill}" ${extra}>` +
  (title ? `<title>${escape(title)}</title>` : "") + "</rect>";
const text = (x, y, s, attributes = "") => `<text x="${x.toFixed(1)}" y="${y.toFixed(1)}" ${attributes}>${escape(s)}</text>`;
const line = (x1, y1, x2, y2, extra = "") => `<line class="axis" x1="${x1}" y1="${y1}" x2="${x2}" y2="${y2}" ${extra}/>`;
const found = (...words) => !sought || words.some((w) => w && w.toLowerCase().includes(sought));

function legend(selector, names) {
  place(selector).innerHTML = names.map((n) => `<span><i style="background:${color(n)}"></i>${escape(n)}</span>`).join("");
}

// ---- timeline: `view` is the part of the step that is shown, in seconds

const view = { from: 0, to: data.timeline.seconds };

function timeline() {
  const t = data.timeline, queues = data.queue_names, wide = width("#timeline .chart"), { from, to } = view;
  const lanes = ["kernels", ...queues.filter((_, q) => t.busy.some((b) => b[q] > 0))];
  const rows = 22, height = 26 + lanes.length * rows, marks = Math.max(2, Math.floor(wide / 180)), out = [];
  const x = (s) => LEFT + (s - from) / (to - from) * (wide - LEFT);
  for (let i = 0; i < marks; i++) {
    const s = from + (to - from) * i / marks;
    out.push(line(x(s), 14, x(s), height), text(x(s), 10, seconds(s), 'class="soft"'));
  }
  lanes.forEach((name, n) => out.push(text(0, 26 + n * rows + 13, name)));
  let drawn = -1;
  for (let i = firstEnding(t, from); i < t.start.length && t.start[i] < to; i++) {
    const a = Math.max(x(t.start[i]), LEFT, drawn), b = Math.min(x(t.start[i] + t.duration[i]), wide);
    if (b <= a || b - drawn < 0.35) continue;
    const tip = `${data.layer_names[t.layer[i]]}: ${t.what[i]}\n${seconds(t.duration[i])}, ${t.phase[i]}, bound by ${t.bound[i]}\n${t.source[i]}`;
    out.push(rect(a, 26, b - a, rows - 5, color(t.phase[i]), tip));
    lanes.slice(1).forEach((name, n) => {
      const busy = t.busy[i][queues.indexOf(name)], end = Math.min(x(t.start[i] + busy), wide);
      if (busy > 0 && end > a) out.push(rect(a, 26 + (n + 1) * rows, end - a, rows - 5, color(name), `${name}: ${seconds(busy)}\n${tip}`));
    });
    drawn = b;
  }
  place("#timeline .chart").innerHTML = svg(wide, height, out.join(""));
  legend("#timeline .legend", PHASES);
}

function firstEnding(t, after) {
  let low = 0, high = t.start.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (t.start[middle] + t.duration[middle] < after) low = middle + 1; else high = middle;
  }
  return low;
}

function show(from, to) {
  const whole = data.timeline.seconds, size = Math.min(Math.max(to - from, whole / 1e6), whole);
  view.from = Math.min(Math.max(from, 0), whole - size);
  view.to = view.from + size;
  timeline();
}

function moveTimeline() {
  const target = place("#timeline .chart");
  const zoom = (at, by) => show(at - (at - view.from) * by, at + (view.to - at) * by);
  const at = (event) => {
    const box = target.getBoundingClientRect();
    return view.from + (event.clientX - box.left - LEFT) / (box.width - LEFT) * (view.to - view.from);
  };
  target.addEventListener("wheel", (event) => { event.preventDefault(); zoom(at(event), event.deltaY > 0 ? 1.25 : 0.8); }, { passive: false });
  let held = null;
  target.addEventListener("pointerdown", (event) => { held = at(event); });
  window.addEventListener("pointerup", () => { held = null; });
  target.addEventListener("pointermove", (event) => { if (held !== null) { const by = held - at(event); show(view.from + by, view.to + by); } });
  target.addEventListener("dblclick", () => show(0, data.timeline.seconds));
  place("#timeline .tools").addEventListener("click", (event) => zoom((view.from + view.to) / 2, Number(event.target.dataset.zoom || 1)));
}

// ---- layers: a tree by module path that folds

const OPEN_ROWS = 40;
const folded = new Set();

function treeOf(lines) {
  const root = { path: "", name: "", depth: -1, children: new Map(), seconds: {}, total: 0, kernels: 0, macs: 0, hbm_bytes: 0 };
  for (const l of lines) {
    let node = root;
    add(node, l);
    for (const name of l.layer.split("/")) {
      const path = node.path ? `${node.path}/${name}` : name, depth = node.depth + 1;
      if (!node.children.has(name)) node.children.set(name, { path, name, depth, children: new Map(), seconds: {}, total: 0, kernels: 0, macs: 0, hbm_bytes: 0 });
      node = node.children.get(name);
      add(node, l);
    }
  }
  return root;
}

function add(node, l) {
  for (const [phase, s] of Object.entries(l.seconds)) node.seconds[phase] = (node.seconds[phase] || 0) + s;
  for (const key of ["total", "kernels", "macs", "hbm_bytes"]) node[key] += l[key];
}

const inOrder = (node) => [...node.children.values()].sort((a, b) => b.total - a.total);
const nodes = (node) => inOrder(node).flatMap((n) => [n, ...nodes(n)]);
const TREE = treeOf(data.layers);

function fold(depth) {
  folded.clear();
  nodes(TREE).filter((n) => n.children.size && n.depth >= depth).forEach((n) => folded.add(n.path));
}

function foldToFit() {
  const all = nodes(TREE), deepest = Math.max(...all.map((n) => n.depth));
  let depth = deepest;
  while (depth > 0 && all.filter((n) => n.depth <= depth).length > OPEN_ROWS) depth--;
  fold(depth);
}

function shown(node) {
  return inOrder(node).flatMap((n) => {
    const below = sought || !folded.has(n.path) ? shown(n) : [];
    return below.length || found(n.path) ? [n, ...below] : [];
  });
}

function layers() {
  const most = Math.max(...inOrder(TREE).map((n) => n.total)), whole = TREE.total || 1;
  const bar = (n) => PHASES.filter((p) => n.seconds[p]).map((p) =>
    `<i style="width:${(100 * n.seconds[p] / most).toFixed(2)}%;background:${color(p)}" title="${escape(`${n.path}, ${p}: ${seconds(n.seconds[p])}`)}"></i>`).join("");
  const body = shown(TREE).map((n) => `<tr><td class="name" style="--depth:${n.depth}" title="${escape(n.path)}">` +
    `<button data-path="${escape(n.path)}" aria-expanded="${!folded.has(n.path)}" ${n.children.size ? "" : "disabled"}>${folded.has(n.path) ? "▸" : "▾"}</button>${escape(n.name)}</td>` +
    `<td class="bar">${bar(n)}</td>` + [seconds(n.total), percent(n.total / whole), count(n.kernels), operations(n.macs), bytes(n.hbm_bytes)].map((s) => `<td class="number">${s}</td>`).join("") + "</tr>");
  const head = ["time", "share", "kernels", "MACs", "HBM"].map((s) => `<th class="number">${s}</th>`).join("");
  place("#layers .table").innerHTML = `<table><thead><tr><th>layer</th><th></th>${head}</tr></thead><tbody>${body.join("")}</tbody></table>`;
  legend("#layers .legend", PHASES);
}

function foldLayers() {
  place("#layers .table").addEventListener("click", (event) => {
    const path = event.target.dataset.path;
    if (path === undefined) return;
    if (!folded.delete(path)) folded.add(path);
    layers();
  });
  place("#layers .tools").addEventListener("click", (event) => {
    if (event.target.dataset.fold) { fold(Number(event.target.dataset.fold)); layers(); }
  });
}

function queues() {
  const rows = 20, wide = width("#queues .chart"), most = Math.max(wide - LEFT - 130, 40), out = [];
  data.queues.forEach((q, n) => {
    out.push(text(0, n * rows + 13, q.queue), rect(LEFT, n * rows + 2, most, rows - 6, color("line"), ""));
    out.push(rect(LEFT, n * rows + 2, Math.min(q.share, 1) * most, rows - 6, color(q.queue), `${q.queue}: ${seconds(q.seconds)}`));
    out.push(text(LEFT + most + 8, n * rows + 13, `${seconds(q.seconds)}  ${percent(q.share)}`, 'class="soft"'));
  });
  place("#queues .chart").innerHTML = svg(wide, data.queues.length * rows + 2, out.join(""));
}

// ---- roofline

function roofline() {
  const wide = width("#roofline .chart"), points = data.kernels.filter((k) => k.intensity > 0 && k.flops_per_second > 0), height = 380, bottom = height - 30;
  const peaks = Object.entries(data.peaks), top = Math.max(...peaks.map(([, f]) => f));
  const xs = points.map((k) => k.intensity), ys = points.map((k) => k.flops_per_second);
  const [x0, x1] = [Math.min(0.1, ...xs) / 2, Math.max(1000, ...xs) * 2], [y0, y1] = [Math.min(top / 1e4, ...ys) / 2, top * 2];
  const scale = (v, a, b, from, to) => from + (Math.log10(v) - Math.log10(a)) / (Math.log10(b) - Math.log10(a)) * (to - from);
  const x = (v) => scale(v, x0, x1, 60, wide - 10), y = (v) => scale(v, y0, y1, bottom, 10), out = [];
  for (let e = Math.ceil(Math.log10(x0)); e <= Math.log10(x1); e++) {
    out.push(line(x(10 ** e), 10, x(10 ** e), bottom), text(x(10 ** e), bottom + 14, `${Number((10 ** e).toPrecision(1))}`, 'class="soft" text-anchor="middle"'));
  }
  for (let e = Math.ceil(Math.log10(y0)); e <= Math.log10(y1); e++) {
    out.push(line(60, y(10 ** e), wide - 10, y(10 ** e)), text(0, y(10 ** e) + 4, `${Number((10 ** (e - 9)).toPrecision(1))} G`, 'class="soft"'));
  }
  out.push(text(wide - 10, bottom + 26, "operations for each byte of HBM", 'class="soft" text-anchor="end"'), text(64, 20, "operations a second", 'class="soft"'));
  for (const [name, flops] of peaks) {
    const knee = flops / data.bandwidth;
    out.push(`<polyline fill="none" stroke="var(--ink)" stroke-width="1.5" points="${x(x0)},${y(data.bandwidth * x0)} ${x(knee)},${y(flops)} ${x(x1)},${y(flops)}"/>`);
    out.push(text(wide - 12, y(flops) - 4, `${name} ${(flops / 1e12).toFixed(1)} TFLOP/s`, 'text-anchor="end"'));
  }
  for (const k of points) {
    const r = Math.max(2, 60 * Math.sqrt(k.share));
    out.push(`<circle cx="${x(k.intensity).toFixed(1)}" cy="${y(k.flops_per_second).toFixed(1)}" r="${r.toFixed(1)}" fill="${color(k.phase)}" fill-opacity="0.45">` +
      `<title>${escape(`${k.layer}: ${k.what}\n${seconds(k.seconds)}, ${k.intensity.toPrecision(3)} operations a byte, ${(k.flops_per_second / 1e9).toPrecision(3)} GFLOP/s`)}</title></circle>`);
  }
  place("#roofline .chart").innerHTML = svg(wide, height, out.join(""));
  legend("#roofline .legend", PHASES);
}

// ---- memory

function memory() {
  const m = data.memory, wide = width("#memory .chart"), ticks = m.places.length, height = 260, bottom = height - 18;
  const most = Math.max(m.planned_bytes, 1), x = (i) => LEFT + i / Math.max(ticks, 1) * (wide - LEFT), y = (n) => bottom - n / most * (bottom - 20);
  const out = [], base = new Array(ticks).fill(0), names = Object.keys(m.live_bytes), peak = x(m.peak_tick + 0.5);
  for (let i = 0; i <= 4; i++) out.push(line(LEFT, y(most * i / 4), wide, y(most * i / 4)), text(0, y(most * i / 4) + 4, bytes(most * i / 4), 'class="soft"'));
  for (const name of names) {
    const low = [], high = [];
    m.live_bytes[name].forEach((n, i) => {
      low.push(`${x(i).toFixed(1)},${y(base[i]).toFixed(1)}`, `${x(i + 1).toFixed(1)},${y(base[i]).toFixed(1)}`);
      base[i] += n;
      high.push(`${x(i).toFixed(1)},${y(base[i]).toFixed(1)}`, `${x(i + 1).toFixed(1)},${y(base[i]).toFixed(1)}`);
    });
    out.push(`<polygon points="${high.join(" ")} ${low.reverse().join(" ")}" fill="${color(name)}"><title>${escape(name)}</title></polygon>`);
  }
  out.push(line(peak, 14, peak, bottom, 'style="stroke:var(--ink);stroke-dasharray:4 3"'));
  out.push(text(peak, 10, `${bytes(m.peak_bytes)} live, at block ${m.peak_place}`, `text-anchor="${peak > wide / 2 ? "end" : "start"}"`));
  place("#memory .chart").innerHTML = svg(wide, height, out.join(""));
  legend("#memory .legend", names);

  const boxes = m.map.map((b) => {
    const tip = `${b.type} ${bytes(b.bytes)}, ${b.category}\n${b.layer || b.name}\n${b.source}`;
    return rect(x(b.first), 10 + (1 - (b.address + b.bytes) / most) * 330, x(b.last + 1) - x(b.first), Math.max(b.bytes / most * 330, 0.5), color(b.category), tip,
      'stroke="var(--paper)" stroke-width="0.3"');
  });
  place("#memory .map").innerHTML = svg(wide, 350, text(0, 18, bytes(most), 'class="soft"') + text(0, 338, "address 0", 'class="soft"') + boxes.join(""));
}

// ---- tables: columns are [heading, field, format]; a format makes a column of numbers

function table(selector, columns, rows) {
  const target = place(selector);
  let order = null, down = true;
  function draw() {
    const kept = rows.filter((r) => found(r.layer, r.what, r.source, r.name));
    const sorted = order === null ? kept : kept.sort((a, b) => (a[order] > b[order] ? 1 : a[order] < b[order] ? -1 : 0) * (down ? -1 : 1));
    const head = columns.map(([name, key, format]) => `<th data-key="${escape(key)}" ${format ? 'class="number"' : ""}>${escape(name)}${order === key ? (down ? " ▾" : " ▴") : ""}</th>`).join("");
    const body = sorted.map((r) => "<tr>" + columns.map(([, key, format]) =>
      format ? `<td class="number">${escape(format(r[key]))}</td>` : `<td>${escape(r[key] ?? "")}</td>`).join("") + "</tr>").join("");
    target.innerHTML = `<table><thead><tr>${head}</tr></thead><tbody>${body}</tbody></table>`;
  }
  target.addEventListener("click", (event) => {
    const key = event.target.dataset.key;
    if (key) { down = order === key ? !down : true; order = key; draw(); }
  });
  draw();
  return draw;
}

function numbersTable() {
  if (!data.numerics.length) return () => {};
  const number = (v) => typeof v !== "number" ? String(v ?? "") : v && Math.abs(v) < 1e-3 ? v.toExponential(2) : count(v);
  const keys = [...new Set(data.numerics.flatMap(Object.keys))], name = (k) => k.replaceAll("_", " ");
  return table("#numerics .table", keys.map((k) => data.numerics.some((r) => typeof r[k] === "number") ? [name(k), k, number] : [name(k), k]), data.numerics);
}

const tables = [
  table("#memory .table", [["size", "bytes", bytes], ["category", "category"], ["type", "type"], ["layer", "layer"], ["source", "source"], ["name", "name"]], data.memory.at_peak),
  table("#kernels .table", [
    ["time", "seconds", seconds], ["share", "share", percent], ["times", "count", count], ["bound", "bound"], ["phase", "phase"], ["layer", "layer"], ["what", "what"],
    ["source", "source"], ["HBM", "hbm_bytes", bytes], ["VMEM", "vmem_bytes", bytes], ["MACs", "macs", operations],
  ], data.kernels),
  numbersTable(),
];
const charts = [timeline, queues, roofline, memory];

foldToFit();
layers();
charts.forEach((draw) => draw());
moveTimeline();
foldLayers();
place("#search").addEventListener("input", (event) => {
  sought = event.target.value.trim().toLowerCase();
  [layers, ...tables].forEach((draw) => draw());
});
window.addEventListener("resize", () => charts.forEach((draw) => draw()));
document.body.dataset.drawn = "yes";
