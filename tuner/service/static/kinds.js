// A bar for each way to train, which shows what uses the memory, and the limit.

import { atWidth, element, gib, ROLE_NAMES, shape, tip } from "./format.js";
import { gutter } from "./timeline.js";

export const KINDS = ["parameters", "gradients", "state", "activations", "buckets", "staging"];
const BAR = 18, BELOW = 7, TOTAL = 72;

// memory: {role: {memory: {kind: bytes}}} at the peak. limits: {memory: bytes}.
export function drawKinds(host, memory, limits) {
  const memories = [["device", limits.device ? "GPU memory" : "The GPU's part of the memory"], ["host", "Host memory per rank"], ["storage", "Storage"]];
  const used = KINDS.filter((kind) => Object.values(memory).some((held) => Object.values(held).some((kinds) => kinds[kind])));
  const legend = element("div", { class: "legend" }, ...used.map((kind) =>
    element("span", { class: "key" }, element("span", { class: `swatch k-${kind}`, "aria-hidden": "true" }), kind)),
  element("span", { class: "key" }, limitMark(), "limit"));
  const readout = element("p", { class: "hint readout", role: "status" });
  const parts = memories.map(([name, title]) => {
    const rows = Object.entries(ROLE_NAMES).filter(([role]) => sum((memory[role] || {})[name]) > 0).map(([role, label]) => ({ label, kinds: memory[role][name] }));
    return rows.length ? part(title, limits[name], rows, readout) : null;
  });
  host.replaceChildren(legend, ...parts.filter(Boolean), readout);
}

function limitMark() {
  const mark = shape("svg", { width: 3, height: 16, "aria-hidden": "true" });
  mark.append(shape("line", { x1: 1.5, x2: 1.5, y1: 0, y2: 16, class: "line-limit" }));
  return mark;
}

function part(title, limit, rows, readout) {
  const host = element("div", { class: "chart" });
  const most = Math.max(limit || 0, ...rows.map((row) => sum(row.kinds)));
  const told = rows.map((row) => `${row.label} ${gib(sum(row.kinds))}: ${words(row.kinds)}`).join("; ");
  atWidth(host, (width) => {
    const left = gutter(width), inner = width - left - TOTAL;
    const height = rows.length * (BAR + BELOW);
    const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `${title}. ${told}` });
    rows.forEach((row, i) => svg.append(...bar(row, i * (BAR + BELOW), (bytes) => (bytes / most) * inner, left, width, readout)));
    if (limit) svg.append(shape("line", { x1: left + (limit / most) * inner, x2: left + (limit / most) * inner, y1: 0, y2: height - BELOW, class: "line-limit" }));
    host.replaceChildren(svg);
  });
  return element("div", { class: "kinds" }, element("h3", {}, title, element("span", { class: "hint" }, limit ? ` of ${gib(limit)} usable` : "")), host);
}

function bar(row, y, length, left, width, readout) {
  const made = [shape("text", { x: 0, y: y + 13, class: "lane" }, row.label), shape("rect", { x: left, y, width: width - left - TOTAL, height: BAR, class: "track" })];
  let from = left;
  for (const kind of KINDS.filter((name) => row.kinds[name])) {
    const piece = shape("rect", { x: from.toFixed(1), y, width: length(row.kinds[kind]).toFixed(1), height: BAR, class: `k-${kind}`, "data-kind": kind });
    tip(piece, () => (readout.textContent = `${row.label}, ${kind}: ${gib(row.kinds[kind])}, of ${words(row.kinds)}`));
    made.push(piece);
    from += length(row.kinds[kind]);
  }
  return [...made, shape("text", { x: width, y: y + 13, class: "tick", "text-anchor": "end" }, gib(sum(row.kinds)))];
}

function sum(kinds = {}) {
  return Object.values(kinds).reduce((total, bytes) => total + bytes, 0);
}

function words(kinds) {
  return KINDS.filter((kind) => kinds[kind]).map((kind) => `${kind} ${gib(kinds[kind])}`).join(", ");
}
