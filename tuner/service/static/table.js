// The table of ways to train: speed, memory, and the reason if one does not fit.

import { between, count, element, gib, seconds, shape, strategyName, times } from "./format.js";

const COLUMNS = ["Strategy", "Iteration", "Against stock", "Tokens/s", "GPU memory", "Host memory", "Fits"];

// advised: the row that the sentence above is about.
export function drawTable(host, rows, advised = rows.find((row) => row.role === "plan")) {
  const most = Math.max(...rows.map((r) => r.speedup || 0));
  const tokens = rows.some((row) => row.tokens_per_s);
  const against = rows.some((row) => row.speedup); // without a time of DeepSpeed alone, there are no speedups
  const columns = COLUMNS.filter((name) => (tokens || name !== "Tokens/s") && (against || name !== "Against stock"));
  const head = element("tr", {}, ...columns.map((name, i) =>
    element("th", { scope: "col", class: i && name !== "Fits" ? "number" : null }, name)));
  const body = rows.map((row) => line(row, most, tokens, against, row === advised));
  host.replaceChildren(element("table", { class: "strategies blocks" },
    element("thead", {}, head), element("tbody", {}, ...body)));
}

// Each cell has its column's name as data, because a narrow page shows each row as a block.
function line(row, most, tokens, against, isAdvised) {
  const number = (text, name) => element("td", { class: "number", "data-name": name }, text);
  const role = isAdvised ? "chosen" : "";
  return element("tr", { class: `${role} ${row.fits ? "" : "unfit"}`.trim(), "data-strategy": row.strategy, "data-label": row.label },
    element("th", { scope: "row" }, strategyName(row)),
    number(withInterval(seconds(row.iteration_s), between(row.iteration_low_s, row.iteration_high_s, seconds)), "Iteration"),
    against ? number(withInterval(speed(row.speedup, most), row.role === "stock" ? "" : between(row.speedup_low, row.speedup_high, times)), "Against stock") : null,
    tokens ? number(row.tokens_per_s ? count(row.tokens_per_s) : "unknown", "Tokens/s") : null,
    number(gib(row.device_peak_bytes), "GPU memory"),
    number(gib(row.host_peak_bytes), "Host memory"),
    element("td", { class: "fits" }, row.fits ? "✓ fits" : `✗ ${row.reason}`));
}

function withInterval(shown, interval) {
  return interval ? element("span", {}, shown, element("span", { class: "interval" }, interval)) : shown;
}

function speed(ratio, most) {
  if (!ratio) return "unknown";
  const cell = element("span", { class: "speed" }, times(ratio));
  const svg = shape("svg", { width: 64, height: 8, class: "bar-cell", "aria-hidden": "true" });
  svg.append(shape("rect", { width: 64, height: 8, rx: 2, class: "bar-track" }));
  svg.append(shape("rect", { width: Math.max(1, (64 * ratio) / most).toFixed(1), height: 8, rx: 2, class: "bar-fill" }));
  cell.append(svg);
  return cell;
}
