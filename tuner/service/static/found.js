// The result of a search of configurations: the answer in words, and a table of the best configurations.

import { link } from "./address.js";
import { withOffload } from "./deepspeed.js";
import { count, element, gib, params, seconds } from "./format.js";

const COLUMNS = ["Configuration", "Tokens/s", "Iteration", "GPU memory", "Host memory"];

const WHERE = {
  none: "no offload", optimizer: "state in host memory", parameters: "state and parameters in host memory",
  nvme: "state on NVMe, parameters in host memory",
};

// A configuration as a scenario: the state of the controls and the body of `POST /answer`.
export function scenarioOf(c, config = null) {
  const cut = withOffload(config, c.offload === "none" ? "optimizer" : c.offload);
  cut.zero_optimization.sub_group_size = c.sub_group_size;
  return {
    gpus: c.gpus, zero_stage: c.zero_stage, micro_batch: c.micro_batch, accumulation: c.accumulation,
    keep_activations: !c.recompute, kernels: c.kernels, ds_config: cut,
    recompute_share: c.recompute && c.recompute_share < 1 ? c.recompute_share : null,
    fused_loss: c.fused_loss || null, flash_attention: c.flash_attention ? null : false,
  };
}

// job: id of the job. Each row opens in "What if".
export function drawFound(host, result, job) {
  const number = (text, name) => element("td", { class: "number", "data-name": name }, text);
  const rows = result.front.map((row, i) => element("tr", { class: i ? null : "chosen" },
    element("th", { scope: "row" }, named(row.configuration, job, i)),
    number(count(row.tokens_per_s), COLUMNS[1]), number(seconds(row.iteration_s), COLUMNS[2]),
    number(gib(row.device_peak_bytes), COLUMNS[3]), number(gib(row.host_peak_bytes), COLUMNS[4])));
  const head = element("tr", {}, ...COLUMNS.map((name, i) => element("th", { scope: "col", class: i ? "number" : null }, name)));
  const table = element("table", { class: "strategies blocks" },
    element("caption", { class: "hint" }, "The fastest configuration for each amount of GPU memory."),
    element("thead", {}, head), element("tbody", {}, ...rows));
  host.replaceChildren(
    element("p", {}, held(result)),
    element("ul", { class: "notes" }, ...result.remarks.map((text) => element("li", {}, text))),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "The best configurations" }, table));
}

// What the search kept, so that its rows can be compared with the page it was started from.
function held({ global_batch: samples, outcomes }) {
  const most = Math.max(...outcomes.map((row) => row.configuration.gpus));
  const batch = samples ? `${count(samples)} ${samples === 1 ? "sample" : "samples"} a step, the product of micro-batch, accumulation and GPUs` : "any number of samples a step";
  return `The search tried up to ${most} ${most === 1 ? "GPU" : "GPUs"} and ${batch}. To search with more samples a step, raise the micro-batch or the accumulation in “What if”, and search again.`;
}

// "What if" cannot show a row with state on a drive, because no plan exists for it.
function named(c, job, row) {
  return c.offload === "nvme" ? described(c) : link(`from=${job}&row=${row}`, described(c));
}

function described(c) {
  const share = c.recompute && c.recompute_share < 1 ? ` in ${Math.round(100 * c.recompute_share)}% of the layers` : "";
  const parts = [`${c.gpus} GPU${c.gpus > 1 ? "s" : ""}`, `ZeRO-${c.zero_stage}`, WHERE[c.offload] || c.offload,
    `micro-batch ${c.micro_batch} × ${c.accumulation}`, `activations ${c.recompute ? "recomputed" : "kept"}${share}`];
  if (c.offload !== "none") parts.push(`subgroups of ${params(c.sub_group_size)}`);
  if (c.fused_loss) parts.push("fused loss");
  if (c.kernels !== "fused") parts.push(`${c.kernels} kernels`);
  if (!c.flash_attention) parts.push("no FlashAttention");
  return parts.join(", ");
}
