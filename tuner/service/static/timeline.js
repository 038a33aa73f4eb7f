// Timelines one above the other on one time axis: a lane per queue, a bar per op.

import { element, seconds, shape, ticks } from "./format.js";

export const GROUPS = [
  "forward", "backward", "gradients", "norm", "state", "device update", "host update",
  "parameters", "network", "checkpoint", "idle",
];
const LANE = 18, GAP = 4, TITLE = 26, AXIS = 24, RIGHT = 14;

export function groupClass(group) {
  return `g-${group.replaceAll(" ", "-")}`;
}

export function drawLegend(host, views) {
  const used = new Set(views.flatMap((v) => v.lanes.flatMap((lane) => lane.spans.map((s) => s[2]))));
  host.replaceChildren(...GROUPS.filter((g) => used.has(g)).map((group) =>
    element("span", { class: "key" },
      element("span", { class: `swatch ${groupClass(group)}`, "aria-hidden": "true" }), group)));
}

// entries: [{title, note, view}]; draws into host at its width, and again when that changes.
export function drawTimelines(host, entries) {
  const draw = () => host.replaceChildren(picture(entries, host.clientWidth || 640));
  draw();
  if (host.observer) host.observer.disconnect();
  let width = host.clientWidth;
  host.observer = new ResizeObserver(() => {
    if (host.clientWidth !== width) {
      width = host.clientWidth;
      draw();
    }
  });
  host.observer.observe(host);
}

export function gutter(width) {
  return width < 520 ? 106 : 122; // of the longest lane, "H2D parameters"
}

function picture(entries, width) {
  const end = Math.max(...entries.map((e) => e.view.duration_s)) || 1; // of a run whose ops take no time
  const left = gutter(width);
  const x = (t) => left + (t / end) * (width - left - RIGHT);
  const height = entries.reduce((sum, e) => sum + TITLE + e.view.lanes.length * (LANE + GAP) + 10, 0) + AXIS;
  const told = entries.map((e) => `${e.title}: ${seconds(e.view.duration_s)}`).join("; ");
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Timelines. ${told}` });
  drawAxis(svg, end, x, height, width);
  let y = 0;
  for (const entry of entries) y = drawEntry(svg, entry, x, y, width);
  return svg;
}

function drawAxis(svg, end, x, height, width) {
  for (const t of ticks(end, width < 520 ? 3 : 8)) {
    svg.append(shape("line", { x1: x(t), x2: x(t), y1: TITLE, y2: height - AXIS + 2, class: "grid" }));
    const anchor = t === 0 ? "start" : x(t) > width - 40 ? "end" : "middle";
    svg.append(shape("text", { x: x(t), y: height - 6, class: "tick", "text-anchor": anchor }, t === 0 ? "0" : seconds(t)));
  }
}

function drawEntry(svg, entry, x, top, width) {
  const title = shape("text", { x: 0, y: top + 17, class: "entry" }, entry.title);
  title.append(shape("tspan", { class: "entry-note", dx: 8 }, entry.note || ""));
  svg.append(title);
  let y = top + TITLE;
  for (const lane of entry.view.lanes) {
    svg.append(shape("text", { x: 0, y: y + 13, class: "lane" }, lane.name));
    svg.append(shape("rect", { x: x(0), y, width: Math.max(1, x(entry.view.duration_s) - x(0)), height: LANE, class: "track" }));
    for (const span of lane.spans) svg.append(bar(span, x, y));
    y += LANE + GAP;
  }
  const end = x(entry.view.duration_s);
  svg.append(shape("line", { x1: end, x2: end, y1: top + TITLE - 4, y2: y, class: "end" }));
  return y + 10;
}

function bar([start, end, group, label], x, y) {
  const made = shape("rect", { x: x(start).toFixed(2), y, height: LANE, width: Math.max(0.7, x(end) - x(start)).toFixed(2), class: `op ${groupClass(group)}` });
  made.append(shape("title", {}, `${label}: ${seconds(start)} to ${seconds(end)} (${seconds(end - start)})`));
  return made;
}
