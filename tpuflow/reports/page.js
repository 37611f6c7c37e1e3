"use strict";
// Draws the report from the JSON beside it. No library, no network; every chart is SVG made here.
const data = JSON.parse(document.getElementById("data").textContent);
const WIDTH = 1200, LEFT = 150;
const COLORS = {
  forward: "#4477aa", backward: "#ee6677", update: "#228833", host: "#ccbb44", idle: "#bbbbbb",
  parameters: "#4477aa", optimizer: "#228833", gradients: "#ee6677", activations: "#66ccee",
  constants: "#aa3377", infeed: "#ccbb44", arguments: "#997700", results: "#bbbbbb",
  scalar: "#bbbbbb", matrix: "#ee6677", vector: "#4477aa", load: "#228833", store: "#ccbb44", link: "#aa3377", launch: "#888888",
};

const escape = (s) => String(s).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
const seconds = (s) => { const [size, unit] = UNITS.find(([u]) => Math.abs(s) >= u) || [1e-9, "ns"]; return `${(s / size).toPrecision(4)} ${unit}`; };
const bytes = (n) => n >= 2 ** 30 ? `${(n / 2 ** 30).toFixed(2)} GiB` : n >= 2 ** 20 ? `${(n / 2 ** 20).toFixed(2)} MiB` : `${(n / 1024).toFixed(1)} KiB`;
const percent = (x) => `${(100 * x).toFixed(1)} %`;
const place = (selector) => document.querySelector(selector);
const svg = (height, body) => `<svg viewBox="0 0 ${WIDTH} ${height}" role="img">${body}</svg>`;
const rect = (x, y, w, h, color, title, extra = "") =>
  `<rect x="${x.toFixed(2)}" y="${y.toFixed(2)}" width="${Math.max(w, 0.4).toFixed(2)}" height="${h.toFixed(2)}" fill="${color}" ${extra}>` +
  (title ? `<title>${escape(title)}</title>` : "") + "</rect>";
const text = (x, y, s, attributes = "") => `<text x="${x.toFixed(1)}" y="${y.toFixed(1)}" ${attributes}>${escape(s)}</text>`;
const line = (x1, y1, x2, y2, extra = "") => `<line class="axis" x1="${x1}" y1="${y1}" x2="${x2}" y2="${y2}" ${extra}/>`;
const shorten = (s, n) => s.length <= n ? s : "…" + s.slice(s.length - n + 1);

function legend(selector, names) {
  place(selector).innerHTML = names.map((n) => `<span><i style="background:${COLORS[n]}"></i>${escape(n)}</span>`).join("");
}

// ---- timeline

function timeline() {
  const target = place("#timeline .chart"), t = data.timeline, queues = data.queue_names;
  const lanes = ["kernels", ...queues.filter((_, q) => t.busy.some((b) => b[q] > 0))];
  const rows = 22, height = 26 + lanes.length * rows, whole = t.seconds;
  let from = 0, to = whole;
  const x = (s) => LEFT + (s - from) / (to - from) * (WIDTH - LEFT);
  const first = () => { let lo = 0, hi = t.start.length; while (lo < hi) { const mid = (lo + hi) >> 1; if (t.start[mid] + t.duration[mid] < from) lo = mid + 1; else hi = mid; } return lo; };

  function draw() {
    const out = [];
    for (let i = 0; i <= 6; i++) {
      const s = from + (to - from) * i / 6;
      out.push(line(x(s), 14, x(s), height), text(Math.min(x(s), WIDTH - 50), 10, seconds(s), 'class="soft"'));
    }
    lanes.forEach((name, n) => out.push(text(0, 26 + n * rows + 13, name)));
    let drawn = -1;
    for (let i = first(); i < t.start.length && t.start[i] < to; i++) {
      const a = Math.max(x(t.start[i]), LEFT), b = Math.min(x(t.start[i] + t.duration[i]), WIDTH);
      if (b <= a || b - drawn < 0.35) continue;
      const tip = `${data.layer_names[t.layer[i]]}: ${t.what[i]}\n${seconds(t.duration[i])}, ${t.phase[i]}, bound by ${t.bound[i]}\n${t.source[i]}`;
      out.push(rect(Math.max(a, drawn), 26, b - Math.max(a, drawn), rows - 5, COLORS[t.phase[i]], tip));
      lanes.slice(1).forEach((name, n) => {
        const busy = t.busy[i][queues.indexOf(name)];
        if (busy > 0) {
          const begin = Math.max(a, drawn), end = Math.min(x(t.start[i] + busy), WIDTH);
          if (end > begin) out.push(rect(begin, 26 + (n + 1) * rows, end - begin, rows - 5, COLORS[name], `${name}: ${seconds(busy)}\n${tip}`));
        }
      });
      drawn = b;
    }
    target.innerHTML = svg(height, out.join(""));
  }

  const at = (event) => {
    const box = target.getBoundingClientRect();
    return from + ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT) * (to - from);
  };
  const show = (a, b) => { const size = Math.min(Math.max(b - a, whole / 1e6), whole); from = Math.min(Math.max(a, 0), whole - size); to = from + size; draw(); };
  target.addEventListener("wheel", (event) => {
    event.preventDefault();
    const s = at(event), by = event.deltaY > 0 ? 1.25 : 0.8;
    show(s - (s - from) * by, s + (to - s) * by);
  }, { passive: false });
  let held = null;
  target.addEventListener("pointerdown", (event) => { held = at(event); });
  window.addEventListener("pointerup", () => { held = null; });
  target.addEventListener("pointermove", (event) => { if (held !== null) { const by = held - at(event); show(from + by, to + by); } });
  target.addEventListener("dblclick", () => show(0, whole));
  draw();
  legend("#timeline .legend", ["forward", "backward", "update"].filter((p) => t.phase.includes(p)));
}

// ---- bars

function layers() {
  const shown = data.layers.slice(0, 40), rows = 20, most = Math.max(...shown.map((l) => l.total));
  const left = 330, scale = (WIDTH - left - 130) / most, out = [];
  shown.forEach((l, n) => {
    let at = left;
    out.push(text(0, n * rows + 13, shorten(l.layer, 52)));
    for (const [phase, s] of Object.entries(l.seconds)) {
      out.push(rect(at, n * rows + 2, s * scale, rows - 6, COLORS[phase], `${l.layer}, ${phase}: ${seconds(s)}`));
      at += s * scale;
    }
    out.push(text(at + 6, n * rows + 13, `${seconds(l.total)}  ${percent(l.share)}`, 'class="soft"'));
  });
  const rest = data.layers.length - shown.length;
  if (rest > 0) out.push(text(0, shown.length * rows + 13, `and ${rest} more layers`, 'class="soft"'));
  place("#layers .chart").innerHTML = svg((shown.length + (rest > 0)) * rows + 4, out.join(""));
  legend("#layers .legend", ["forward", "backward", "update"]);
}

function queues() {
  const rows = 20, out = [];
  data.queues.forEach((q, n) => {
    out.push(text(0, n * rows + 13, q.queue), rect(LEFT, n * rows + 2, WIDTH - LEFT - 160, rows - 6, "var(--line)", ""));
    out.push(rect(LEFT, n * rows + 2, q.share * (WIDTH - LEFT - 160), rows - 6, COLORS[q.queue], `${q.queue}: ${seconds(q.seconds)}`));
    out.push(text(WIDTH - 150, n * rows + 13, `${seconds(q.seconds)}  ${percent(q.share)}`, 'class="soft"'));
  });
  place("#queues .chart").innerHTML = svg(data.queues.length * rows + 2, out.join(""));
}

// ---- roofline

function roofline() {
  const points = data.kernels.filter((k) => k.intensity > 0 && k.flops_per_second > 0), height = 380, bottom = height - 30;
  const peaks = Object.entries(data.peaks), top = Math.max(...peaks.map(([, f]) => f));
  const xs = points.map((k) => k.intensity), ys = points.map((k) => k.flops_per_second);
  const [x0, x1] = [Math.min(0.1, ...xs) / 2, Math.max(1000, ...xs) * 2], [y0, y1] = [Math.min(top / 1e4, ...ys) / 2, top * 2];
  const scale = (v, a, b, from, to) => from + (Math.log10(v) - Math.log10(a)) / (Math.log10(b) - Math.log10(a)) * (to - from);
  const x = (v) => scale(v, x0, x1, 60, WIDTH - 20), y = (v) => scale(v, y0, y1, bottom, 10), out = [];
  for (let e = Math.ceil(Math.log10(x0)); e <= Math.log10(x1); e++) {
    out.push(line(x(10 ** e), 10, x(10 ** e), bottom), text(x(10 ** e) - 8, bottom + 14, `${Number((10 ** e).toPrecision(1))}`, 'class="soft"'));
  }
  for (let e = Math.ceil(Math.log10(y0)); e <= Math.log10(y1); e++) {
    out.push(line(60, y(10 ** e), WIDTH - 20, y(10 ** e)), text(0, y(10 ** e) + 4, `${Number((10 ** (e - 9)).toPrecision(1))} G`, 'class="soft"'));
  }
  out.push(text(WIDTH - 250, bottom + 26, "operations for each byte of HBM", 'class="soft"'), text(64, 20, "operations a second", 'class="soft"'));
  for (const [name, flops] of peaks) {
    const knee = flops / data.bandwidth;
    out.push(`<polyline fill="none" stroke="var(--ink)" stroke-width="1.5" points="${x(x0)},${y(data.bandwidth * x0)} ${x(knee)},${y(flops)} ${x(x1)},${y(flops)}"/>`);
    out.push(text(WIDTH - 130, y(flops) - 4, `${name} ${(flops / 1e12).toFixed(1)} TFLOP/s`));
  }
  for (const k of points) {
    const r = Math.max(2, 60 * Math.sqrt(k.share));
    out.push(`<circle cx="${x(k.intensity).toFixed(1)}" cy="${y(k.flops_per_second).toFixed(1)}" r="${r.toFixed(1)}" fill="${COLORS[k.phase]}" fill-opacity="0.45">` +
      `<title>${escape(`${k.layer}: ${k.what}\n${seconds(k.seconds)}, ${k.intensity.toPrecision(3)} operations a byte, ${(k.flops_per_second / 1e9).toPrecision(3)} GFLOP/s`)}</title></circle>`);
  }
  place("#roofline .chart").innerHTML = svg(height, out.join(""));
  legend("#roofline .legend", ["forward", "backward", "update"]);
}

// ---- memory

function memory() {
  const m = data.memory, ticks = m.places.length, height = 260, bottom = height - 18;
  const most = Math.max(m.planned_bytes, 1), x = (i) => LEFT + i / Math.max(ticks, 1) * (WIDTH - LEFT), y = (n) => bottom - n / most * (bottom - 10);
  const out = [], base = new Array(ticks).fill(0), names = Object.keys(m.live_bytes);
  for (let i = 0; i <= 4; i++) out.push(line(LEFT, y(most * i / 4), WIDTH, y(most * i / 4)), text(0, y(most * i / 4) + 4, bytes(most * i / 4), 'class="soft"'));
  for (const name of names) {
    const low = [], high = [];
    m.live_bytes[name].forEach((n, i) => {
      low.push(`${x(i).toFixed(1)},${y(base[i]).toFixed(1)}`, `${x(i + 1).toFixed(1)},${y(base[i]).toFixed(1)}`);
      base[i] += n;
      high.push(`${x(i).toFixed(1)},${y(base[i]).toFixed(1)}`, `${x(i + 1).toFixed(1)},${y(base[i]).toFixed(1)}`);
    });
    out.push(`<polygon points="${high.join(" ")} ${low.reverse().join(" ")}" fill="${COLORS[name]}"><title>${escape(name)}</title></polygon>`);
  }
  out.push(line(x(m.peak_tick + 0.5), 4, x(m.peak_tick + 0.5), bottom, 'style="stroke:var(--ink);stroke-dasharray:4 3"'));
  out.push(text(Math.min(x(m.peak_tick + 0.5) + 6, WIDTH - 330), 12, `${bytes(m.peak_bytes)} live of ${bytes(m.planned_bytes)} planned, at block ${m.peak_place}`));
  place("#memory .chart").innerHTML = svg(height, out.join(""));
  legend("#memory .legend", names);

  const boxes = m.map.map((b) => {
    const tip = `${b.type} ${bytes(b.bytes)}, ${b.category}\n${b.layer || b.name}\n${b.source}`;
    return rect(x(b.first), 10 + (1 - (b.address + b.bytes) / most) * 330, x(b.last + 1) - x(b.first), Math.max(b.bytes / most * 330, 0.5), COLORS[b.category], tip,
      'stroke="var(--paper)" stroke-width="0.3"');
  });
  place("#memory .map").innerHTML = svg(350, text(0, 18, bytes(most), 'class="soft"') + text(0, 338, "address 0", 'class="soft"') + boxes.join(""));
  table("#memory .table", [["size", "bytes", bytes], ["category", "category"], ["type", "type"], ["layer", "layer"], ["source", "source"], ["name", "name"]], m.at_peak);
}

// ---- tables: columns are [heading, field, format]; a format makes a column of numbers

function table(selector, columns, rows) {
  const target = place(selector);
  let order = null, down = true;
  function draw() {
    const sorted = order === null ? rows : [...rows].sort((a, b) => (a[order] > b[order] ? 1 : a[order] < b[order] ? -1 : 0) * (down ? -1 : 1));
    const head = columns.map(([name, key]) => `<th data-key="${escape(key)}">${escape(name)}${order === key ? (down ? " ▾" : " ▴") : ""}</th>`).join("");
    const body = sorted.map((r) => "<tr>" + columns.map(([, key, format]) =>
      format ? `<td class="number">${escape(format(r[key]))}</td>` : `<td>${escape(r[key] ?? "")}</td>`).join("") + "</tr>").join("");
    target.innerHTML = `<table><thead><tr>${head}</tr></thead><tbody>${body}</tbody></table>`;
  }
  target.addEventListener("click", (event) => {
    const key = event.target.dataset && event.target.dataset.key;
    if (key) { down = order === key ? !down : true; order = key; draw(); }
  });
  draw();
}

function numerics() {
  if (!data.numerics.length) return;
  const number = (v) => typeof v === "number" ? Number(v.toPrecision(4)) : v;
  const keys = [...new Set(data.numerics.flatMap(Object.keys))];
  table("#numerics .table", keys.map((k) => data.numerics.every((r) => typeof r[k] === "number") ? [k, k, number] : [k, k]), data.numerics);
}

timeline();
layers();
queues();
roofline();
memory();
table("#kernels .table", [
  ["time", "seconds", seconds], ["share", "share", percent], ["times", "count", String], ["bound", "bound"], ["phase", "phase"], ["layer", "layer"], ["what", "what"],
  ["MMACs", "macs", (n) => (n / 1e6).toFixed(1)], ["HBM", "hbm_bytes", bytes], ["VMEM", "vmem_bytes", bytes], ["source", "source"],
], data.kernels);
numerics();
document.body.dataset.drawn = "yes";
