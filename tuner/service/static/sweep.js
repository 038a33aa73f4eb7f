// Varies one setting over its stops. Shows the iteration time, or the tokens per second if the batch grows.

import { call } from "./api.js";
import { atWidth, count, element, ROLE_NAMES, seconds, shape, ticks, tip } from "./format.js";

const EACH_WAY = 4; // number of stops on each side of the present one
const HEIGHT = 244, TOP = 26, BOTTOM = 46, RIGHT = 18;
const ROLES = ["stock", "no offload", "plan"].map((role) => [role, ROLE_NAMES[role]]);

// The stops around a value.
export function around(steps, value) {
  const known = steps.filter((step) => step !== null);
  const here = Math.max(0, known.indexOf(value));
  const first = Math.max(0, Math.min(here - EACH_WAY, known.length - 2 * EACH_WAY - 1));
  return known.slice(first, first + 2 * EACH_WAY + 1);
}

// Asks for every value, one after the other, and shows the results so far. At last, tries the plans of all values, and
// the plan on the page, at all values. changes: the settings at each value. waiting: what is not known yet, as text.
export async function sweep(scenario, values, changes, shown, signal, tell) {
  const ask = (body) => call("/sweep", { method: "POST", body: { ...scenario, ...body }, signal });
  const pointOf = (value, { rows, refused, plan }) => ({ value, refused, plan, rows: Object.fromEntries(rows.map((row) => [row.role, row])) });
  const points = [];
  try {
    for (const [n, value] of values.entries()) {
      const found = await ask({ changes: [changes[n]] });
      points.push(pointOf(value, found.points[0]));
      tell(points, `${n + 1} of ${values.length} values ...`);
    }
    const plans = [shown, ...points.map((point) => point.plan)].filter(Boolean);
    const found = await ask({ changes, plans, search: false });
    tell(found.points.map((point, n) => pointOf(values[n], point)), "");
  } catch (error) {
    if (error.name !== "AbortError") tell(points, `Not all values could be answered: ${error.message}`);
  }
}

// points: as in `sweep`. there: the value on the page. pick(value): called when the user chooses a value.
export function drawSweep(host, control, points, there, waiting, pick) {
  if (!points.length) {
    host.replaceChildren(element("p", { class: "hint", role: "status" }, waiting));
    return;
  }
  const key = control.batch ? "tokens_per_s" : "iteration_s";
  const show = control.batch ? (v) => `${count(v)} tokens/s` : seconds;
  const roles = ROLES.filter(([role]) => points.some((point) => point.rows[role]));
  const legend = element("div", { class: "legend" }, ...roles.map(([role, name]) => {
    const mark = shape("svg", { width: 26, height: 10, "aria-hidden": "true" });
    mark.append(shape("line", { x1: 0, x2: 26, y1: 5, y2: 5, class: lineClass(role) }));
    return element("span", { class: "key" }, mark, name);
  }), element("span", { class: "key" }, "○ does not fit"),
  element("span", {}, "Stock has the fastest of its settings that fit."));
  const readout = element("p", { class: "hint readout", role: "status" }, waiting || `${control.batch ? "Tokens per second" : "Iteration"}. Choose a value to apply it.`);
  const chart = element("div", { class: "chart" });
  host.replaceChildren(legend, chart, readout);
  const told = (point) => `${control.label} ${control.show(point.value)}: ${point.refused || roles.filter(([role]) => point.rows[role]).map(([role, name]) => `${name} ${show(point.rows[role][key])}${point.rows[role].fits ? "" : ` (${point.rows[role].reason})`}`).join(", ")}`;
  atWidth(chart, (width) => chart.replaceChildren(picture(width)));

  function picture(width) {
    const most = Math.max(...points.flatMap((p) => roles.map(([role]) => (p.rows[role] ? p.rows[role][key] : 0))));
    const left = width < 520 ? 62 : 78;
    const step = (width - left - RIGHT) / points.length;
    const x = (i) => left + (i + 0.5) * step;
    const y = (value) => HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - TOP) * value) / most;
    const svg = shape("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "group", "aria-label": `${control.label}, swept` });
    for (const t of ticks(most, 4)) {
      svg.append(shape("line", { x1: left, x2: width - RIGHT, y1: y(t), y2: y(t), class: "grid" }));
      svg.append(shape("text", { x: left - 8, y: y(t) + 4, class: "tick", "text-anchor": "end" }, t === 0 ? "0" : control.batch ? count(t) : seconds(t)));
    }
    svg.append(shape("text", { x: 0, y: 12, class: "tick" }, control.batch ? "Tokens per second" : "Time of an iteration"));
    points.forEach((point, i) => svg.append(column(point, x(i), step)));
    svg.append(shape("text", { x: (left + width - RIGHT) / 2, y: HEIGHT - 6, class: "tick", "text-anchor": "middle" }, control.unit ? `${control.label} (${control.unit})` : control.label));
    for (const [role] of roles) drawLine(svg, role, x, y);
    return svg;
  }

  // The whole column reacts to pointer and keyboard, because a dot of 8 pixels is hard to hit.
  function column(point, middle, step) {
    const here = point.value === there;
    const made = shape("g", { role: "button", tabindex: 0, class: `stop${here ? " here" : ""}`, "aria-label": told(point), "aria-pressed": here });
    made.append(shape("rect", { x: middle - step / 2, y: 0, width: step, height: HEIGHT - BOTTOM + 24 }));
    made.append(shape("text", { x: middle, y: HEIGHT - BOTTOM + 17, class: "tick", "text-anchor": "middle" }, control.brief(point.value)));
    made.addEventListener("focus", () => (readout.textContent = told(point)));
    tip(made, () => (readout.textContent = told(point)));
    made.addEventListener("click", () => pick(point.value));
    made.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      pick(point.value);
    });
    return made;
  }

  function drawLine(svg, role, x, y) {
    const known = points.map((point, i) => ({ row: point.rows[role], i })).filter(({ row }) => row);
    const path = known.map(({ row, i }, n) => `${n && known[n - 1].i === i - 1 ? "L" : "M"}${x(i).toFixed(1)} ${y(row[key]).toFixed(1)}`).join("");
    svg.append(shape("path", { d: path, class: `${lineClass(role)} swept` }));
    for (const { row, i } of known) svg.append(shape("circle", { cx: x(i), cy: y(row[key]), r: 4, class: `${lineClass(role)} ${row.fits ? "fit" : "unfit"}` }));
  }
}

function lineClass(role) {
  return `line-${role.replace(" ", "-")}`;
}
