// The table of an iteration's phases: predicted, measured, and how far the prediction is off.

import { element, percent, seconds } from "./format.js";

const PHASES = [["forward_s", "Forward"], ["backward_s", "Backward"], ["step_s", "Step"], ["iteration_s", "Iteration"]];

// predicted: a plan's prediction, or null. measured: seconds by phase.
export function drawPhases(host, predicted, measured) {
  // A measured iteration has no op for the work of the script between phases, which is a part of forward.
  const loop = predicted && predicted.loop_s ? [["loop_s", "Training loop (measured as a part of forward)"]] : [];
  const names = predicted ? ["", "Predicted", "Measured", "Prediction off by"] : ["", "Measured"];
  const rows = [...loop, ...PHASES].map(([key, name]) => {
    const cells = predicted ? [seconds(predicted[key]), seconds(measured[key]), difference(predicted[key], measured[key])] : [seconds(measured[key])];
    return element("tr", {}, element("th", { scope: "row" }, name), ...cells.map((text) => element("td", { class: "number" }, text)));
  });
  const head = names.map((name, i) => element("th", { scope: "col", class: i ? "number" : null }, name));
  host.replaceChildren(element("table", { class: "strategies compared" }, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)));
}

function difference(predicted, measured) {
  const sign = predicted >= measured ? "+" : "−";
  const share = predicted && measured ? ` (${sign}${percent(Math.abs(predicted / measured - 1))})` : "";
  return `${sign}${seconds(Math.abs(predicted - measured))}${share}`;
}
