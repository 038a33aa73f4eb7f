// Timelines, one above the other, on one time axis, with a row per lane and a bar per op. Pointer and keyboard zoom
// and select ops.

import { atWidth, element, seconds, shape, ticks, tip } from "./format.js";

export const GROUPS = [
  "forward", "backward", "gradients", "norm", "state", "device update", "host update", "early update",
  "parameters", "activations", "network", "checkpoint", "issue", "idle",
];
export const MARGIN = 46; // space right of the time axis for the idle share of each lane
const LANE = 18, GAP = 4, TITLE = 26, AXIS = 24;
const ZOOM = 2, DRAGGED = 6; // DRAGGED: pixels after which a press is a drag

export function groupClass(group) {
  return `g-${group.replaceAll(" ", "-")}`;
}

export function drawLegend(host, views) {
  const used = new Set(views.flatMap((v) => v.lanes.flatMap((lane) => lane.spans.map((s) => s[2]))));
  const critical = views.some((view) => view.critical.length);
  host.replaceChildren(...GROUPS.filter((g) => used.has(g)).map((group) =>
    element("span", { class: "key" },
      element("span", { class: `swatch ${groupClass(group)}`, "aria-hidden": "true" }), group)),
  ...(critical ? [element("span", { class: "key" }, element("span", { class: "swatch critical-swatch", "aria-hidden": "true" }), "critical path")] : []));
}

// entries: [{title, note, view}]. Draws into host at its width, and again when the width changes.
export function drawTimelines(host, entries) {
  if (!host.timelines) host.timelines = new Timelines(host);
  host.timelines.show(entries);
}

export function gutter(width) {
  return width < 520 ? 106 : 122; // width of the longest name of a lane, "H2D parameters"
}

// Returns a sentence that compares the critical paths of two entries.
export function difference(from, to) {
  const [before, after] = [from, to].map((view) => onPath(view));
  if (!before.size || !after.size) return "";
  const changes = [...new Set([...before.keys(), ...after.keys()])]
    .map((group) => [group, (after.get(group) || 0) - (before.get(group) || 0)])
    .sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]))
    .filter(([, change]) => Math.abs(change) > 0.02 * from.duration_s);
  const total = to.duration_s - from.duration_s;
  const told = changes.map(([group, change]) => `${seconds(Math.abs(change))} ${change < 0 ? "less" : "more"} for ${group}`);
  return `The critical path of an iteration is ${seconds(Math.abs(total))} ${total < 0 ? "shorter" : "longer"} with the plan: ${told.join(", ") || "no difference"}.`;
}

function onPath(view) {
  const sums = new Map();
  for (const [start, end, group] of view.critical) sums.set(group, (sums.get(group) || 0) + end - start);
  return sums;
}

class Timelines {
  constructor(host) {
    this.host = host;
    this.chart = element("div", { class: "timelines", tabindex: 0, role: "group", "aria-label": "Timelines. The arrow keys move from op to op, plus and minus zoom, and 0 shows the whole timeline" });
    this.readout = element("p", { class: "hint readout", role: "status" });
    const button = (text, label, action) => {
      const made = element("button", { type: "button", "aria-label": label, title: label }, text);
      made.addEventListener("click", action);
      return made;
    };
    this.tools = element("div", { class: "tools" }, button("+", "Zoom in", () => this.zoom(1 / ZOOM)),
      button("−", "Zoom out", () => this.zoom(ZOOM)), button("All", "All", () => this.look(0, this.end)));
    host.replaceChildren(this.tools, this.chart, this.readout);
    this.chart.addEventListener("keydown", (event) => this.key(event));
    this.chart.addEventListener("pointerdown", (event) => (this.pressed = this.timeAt(event)));
    this.chart.addEventListener("pointerup", (event) => this.dragged(event));
    tip(this.chart, ({ target: { op } }) => op && this.tell(op));
    this.chart.addEventListener("dblclick", () => this.look(0, this.end));
  }

  show(entries) {
    const end = Math.max(...entries.map((e) => e.view.duration_s)) || 1; // 1 for a run whose ops take no time
    if (end !== this.end) [this.from, this.to] = [0, end];
    [this.entries, this.end, this.selected] = [entries, end, null];
    this.rest = "Drag to zoom. Point at an op or press the arrow keys to show its name and time.";
    this.readout.textContent = this.rest;
    atWidth(this.host, (width) => this.draw(width));
  }

  look(from, to) {
    const length = Math.min(this.end, Math.max(this.end / 5000, to - from));
    this.from = Math.max(0, Math.min(from, this.end - length));
    this.to = this.from + length;
    this.draw(this.host.clientWidth || 640);
  }

  // Zooms around the chosen op, or around the middle.
  zoom(factor) {
    const op = this.selected;
    const middle = op ? (op.span[0] + op.span[1]) / 2 : (this.from + this.to) / 2;
    const half = ((this.to - this.from) * factor) / 2;
    this.look(middle - half, middle + half);
  }

  timeAt(event) {
    const box = this.chart.getBoundingClientRect();
    const left = gutter(box.width);
    const share = (event.clientX - box.left - left) / (box.width - left - MARGIN);
    return { x: event.clientX, t: this.from + share * (this.to - this.from) };
  }

  dragged(event) {
    const [first, last] = [this.pressed, this.timeAt(event)];
    this.pressed = null;
    if (first && Math.abs(first.x - last.x) > DRAGGED) this.look(Math.min(first.t, last.t), Math.max(first.t, last.t));
    else if (event.target.op) this.choose(event.target.op);
  }

  key(event) {
    const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
    const actions = { "+": () => this.zoom(1 / ZOOM), "=": () => this.zoom(1 / ZOOM), "-": () => this.zoom(ZOOM), 0: () => this.look(0, this.end) };
    const action = moves[event.key] ? () => this.step(...moves[event.key]) : actions[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action();
  }

  // Selects the next op of the lane, or the op of the next lane that is nearest in time.
  step(down, right) {
    const lanes = this.entries.flatMap((entry) => entry.view.lanes.map((lane) => ({ entry, lane }))).filter(({ lane }) => lane.spans.length);
    if (!lanes.length) return;
    const now = this.selected;
    let n = now ? lanes.findIndex(({ lane }) => lane === now.lane) : 0;
    if (now) n = Math.max(0, Math.min(lanes.length - 1, n + down));
    const { entry, lane } = lanes[n];
    const index = !now ? 0 : down ? nearest(lane.spans, now.span[0]) : lane.spans.indexOf(now.span) + right;
    if (lane.spans[index]) this.choose({ entry, lane, span: lane.spans[index] });
  }

  choose(op) {
    this.selected = op;
    this.tell(op);
    const [start, end] = op.span;
    const length = this.to - this.from;
    if (end < this.from || start > this.to) this.look((start + end - length) / 2, (start + end + length) / 2);
    else this.draw(this.host.clientWidth || 640);
  }

  tell({ entry, lane, span: [start, end, , label] }) {
    const critical = entry.view.critical.some(([from, to, , name]) => name === lane.name && from < end && to > start);
    const text = `${entry.title}, ${lane.name}: ${label}, ${seconds(start)} to ${seconds(end)} (${seconds(end - start)})${critical ? ", on the critical path" : ""}`;
    return (this.readout.textContent = text);
  }

  draw(width) {
    this.left = gutter(width);
    const inner = width - this.left - MARGIN;
    const x = (t) => this.left + Math.max(0, Math.min(1, (t - this.from) / (this.to - this.from))) * inner;
    const height = this.entries.reduce((sum, e) => sum + TITLE + e.view.lanes.length * (LANE + GAP) + 10, 0) + AXIS;
    const told = this.entries.map((e) => `${e.title}: ${seconds(e.view.duration_s)}`).join("; ");
    const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": told });
    this.axis(svg, x, height, width);
    let y = 0;
    for (const entry of this.entries) y = this.entry(svg, entry, x, y, width);
    this.chart.replaceChildren(svg);
  }

  axis(svg, x, height, width) {
    svg.append(shape("text", { x: width, y: width < 520 ? height - 6 : 17, class: "tick", "text-anchor": "end" }, "idle"));
    for (const t of ticks(this.to, width < 520 ? 3 : 8, this.from)) {
      svg.append(shape("line", { x1: x(t), x2: x(t), y1: TITLE, y2: height - AXIS + 2, class: "grid" }));
      const last = width < 520 && x(t) > width - MARGIN - 20; // the label must not overlap the word "idle"
      const anchor = t === 0 ? "start" : last ? "end" : "middle";
      svg.append(shape("text", { x: x(t), y: height - 6, class: "tick", "text-anchor": anchor }, t === 0 ? "0" : seconds(t)));
    }
  }

  entry(svg, entry, x, top, width) {
    const title = shape("text", { x: 0, y: top + 17, class: "entry" }, entry.title);
    title.append(shape("tspan", { class: "entry-note", dx: 8 }, entry.note || ""));
    svg.append(title);
    let y = top + TITLE;
    for (const lane of entry.view.lanes) {
      svg.append(shape("text", { x: 0, y: y + 13, class: "lane" }, lane.name));
      svg.append(shape("rect", { x: x(0), y, width: Math.max(1, x(entry.view.duration_s) - x(0)), height: LANE, class: "track" }));
      for (const span of lane.spans) if (this.seen(span)) svg.append(this.bar({ entry, lane, span }, x, y));
      for (const part of entry.view.critical) if (part[3] === lane.name && this.seen(part)) svg.append(underline(part, x, y));
      svg.append(shape("text", { x: width, y: y + 13, class: "tick", "text-anchor": "end" }, `${Math.round(100 * lane.idle)}%`));
      y += LANE + GAP;
    }
    const end = x(entry.view.duration_s);
    if (this.seen([entry.view.duration_s, entry.view.duration_s])) svg.append(shape("line", { x1: end, x2: end, y1: top + TITLE - 4, y2: y, class: "end" }));
    return y + 10;
  }

  seen([start, end]) {
    return end >= this.from && start <= this.to;
  }

  bar(op, x, y) {
    const [start, end, group] = op.span;
    const chosen = this.selected && this.selected.span === op.span ? " chosen-op" : "";
    const made = shape("rect", { x: x(start).toFixed(2), y, height: LANE, width: Math.max(0.7, x(end) - x(start)).toFixed(2), class: `op ${groupClass(group)}${chosen}` });
    made.op = op;
    return made;
  }
}

function underline([start, end], x, y) {
  return shape("rect", { x: x(start).toFixed(2), y: y + LANE - 3, height: 3, width: Math.max(0.7, x(end) - x(start)).toFixed(2), class: "critical" });
}

// The op of a lane that is nearest to a time.
function nearest(spans, t) {
  const gaps = spans.map(([start, end]) => Math.max(start - t, t - end, 0));
  return gaps.indexOf(Math.min(...gaps));
}
