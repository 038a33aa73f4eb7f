// GPU memory over time with its limit, drawn by uPlot on the axis of the timelines.

import { atWidth, element, gib, GIB, seconds, shape, ticks, tip } from "./format.js";
import { gutter, MARGIN } from "./timeline.js";

const dark = matchMedia("(prefers-color-scheme: dark)");

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Puts several step curves on one axis, with the times of all of them.
export function joined(views, limit) {
  const all = [...new Set(views.flatMap((v) => [...v.memory.t_s, v.duration_s]))].sort((a, b) => a - b);
  const columns = views.map((v) => {
    let next = 0, last = null;
    return all.map((t) => {
      while (next < v.memory.t_s.length && v.memory.t_s[next] <= t) {
        last = v.memory.device_bytes[next];
        next += 1;
      }
      return t > v.duration_s ? null : last;
    });
  });
  return [all, ...columns, all.map(() => limit)];
}

// entries: [{role, title, view}], DeepSpeed alone first. limit: bytes, or null.
export function drawMemory(host, entries, limit) {
  const known = entries.filter((e) => e.view.memory.t_s.length);
  dark.removeEventListener("change", host.redraw);
  if (!known.length) {
    host.replaceChildren(element("p", { class: "hint" }, "There are no memory samples."));
    return;
  }
  const readout = element("p", { class: "hint readout" });
  const peaks = known.map((e) => `${e.title} ${gib(Math.max(...e.view.memory.device_bytes))}`).join(", ");
  const rest = `Peaks: ${peaks}${limit ? `; limit ${gib(limit)}` : ""}`;
  readout.textContent = rest;
  const box = element("div", { class: "plot", role: "img", "aria-label": rest });
  host.replaceChildren(legendOf(known, limit), box, readout);
  tip(box, () => (readout.textContent === rest ? "" : readout.textContent));
  const data = joined(known.map((e) => e.view), limit);
  const draw = (width) => plot(box, known, data, limit, readout, rest, width);
  atWidth(host, draw);
  host.redraw = () => draw(host.clientWidth || 640); // a canvas does not change its colors by itself
  dark.addEventListener("change", host.redraw);
}

function legendOf(known, limit) {
  const names = [...known.map((e) => [e.role, e.title]), ...(limit ? [["limit", "Limit"]] : [])];
  return element("div", { class: "legend" }, ...names.map(([role, name]) => {
    const line = shape("svg", { width: 26, height: 8, "aria-hidden": "true" });
    line.append(shape("line", { x1: 0, x2: 26, y1: 4, y2: 4, class: `line-${role.replaceAll(" ", "-")}` }));
    return element("span", { class: "key" }, line, name);
  }));
}

function plot(box, known, data, limit, readout, rest, width) {
  const lines = { stock: ["--line-stock", [6, 4]], "no offload": ["--line-plain", []], predicted: ["--line-plan", [2, 3]], pinned: ["--line-plain", [2, 3]] };
  const stepped = uPlot.paths.stepped({ align: 1 });
  const series = known.map((e) => {
    const [name, dash] = lines[e.role] || ["--line-plan", []];
    return { label: e.title, stroke: colour(name), width: 2, dash, paths: stepped, points: { show: false } };
  });
  const axis = { stroke: colour("--muted"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  box.replaceChildren();
  const chart = new uPlot({
    width, height: 190, legend: { show: false }, cursor: { drag: { x: false, y: false }, points: { size: 6 } },
    scales: { x: { time: false }, y: { range: (u, low, high) => [0, Math.max(high, limit || 0) * 1.08] } },
    padding: [8, MARGIN, 0, 0],
    axes: [
      { ...axis, values: (u, ts) => ts.map((t) => (t === 0 ? "0" : seconds(t))), space: 80, size: 26, gap: 4 },
      { ...axis, values: (u, bs) => bs.map((b) => (b === 0 ? "0" : gib(b))), size: gutter(width), splits: (u, i, low, high) => ticks(high / GIB, 5).map((n) => n * GIB) },
    ],
    series: [{}, ...series, { label: "limit", stroke: colour("--ink"), width: 1.5, dash: [10, 4], points: { show: false } }],
    hooks: { setCursor: [(u) => { readout.textContent = told(u, known) || rest; }] },
  }, data, box);
  return chart;
}

function told(u, known) {
  const i = u.cursor.idx;
  if (i === null || i === undefined || u.cursor.left < 0) return "";
  const values = known.map((e, n) => {
    const bytes = u.data[n + 1][i];
    return bytes === null ? null : `${e.title} ${gib(bytes)}`;
  });
  return `At ${seconds(u.data[0][i])}: ${values.filter(Boolean).join(", ")}`;
}
