// What a search of configurations found: the answer in words, then the best ones as a table.

import { count, element, gib, seconds } from "./format.js";

const COLUMNS = ["Configuration", "Tokens/s", "Iteration", "GPU memory", "Host memory"];

const WHERE = {
  none: "no offload", optimizer: "state in host memory", parameters: "state and parameters in host memory",
  nvme: "state on NVMe, parameters in host memory",
};

export function drawFound(host, result) {
  const number = (text) => element("td", { class: "number" }, text);
  const rows = result.front.map((row, i) => element("tr", { class: i ? null : "chosen" },
    element("th", { scope: "row" }, described(row.configuration)), number(count(row.tokens_per_s)),
    number(seconds(row.iteration_s)), number(gib(row.device_peak_bytes)), number(gib(row.host_peak_bytes))));
  const head = element("tr", {}, ...COLUMNS.map((name, i) => element("th", { scope: "col", class: i ? "number" : null }, name)));
  const table = element("table", { class: "strategies" },
    element("caption", { class: "hint" }, "No other configuration is as fast with less GPU memory."),
    element("thead", {}, head), element("tbody", {}, ...rows));
  host.replaceChildren(
    element("ul", { class: "notes" }, ...result.remarks.map((text) => element("li", {}, text))),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "The best configurations" }, table));
}

function described(c) {
  const parts = [`${c.gpus} GPU${c.gpus > 1 ? "s" : ""}`, `ZeRO-${c.zero_stage}`, WHERE[c.offload] || c.offload,
    `micro-batch ${c.micro_batch} × ${c.accumulation}`, `activations ${c.recompute ? "recomputed" : "kept"}`];
  return parts.join(", ");
}
