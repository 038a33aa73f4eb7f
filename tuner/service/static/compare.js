// The table that compares a pinned scenario with the one on the page: settings that differ, and their effect.

import { link } from "./address.js";
import { count, element, gib, percent, seconds, times } from "./format.js";

const MEASURES = [
  ["Iteration", "iteration_s", seconds], ["Compared with stock", "speedup", times], ["Tokens per second", "tokens_per_s", count],
  ["GPU memory in use", "device_peak_bytes", gib], ["Host memory in use", "host_peak_bytes", gib],
];

// The row that the sentence of an answer is about.
export function chosen(answer) {
  return answer.rows.find((row) => row.role === (answer.verdict === "no offload" ? "no offload" : "plan"));
}

// pinned and now: {query, facts: [[name, text]], answer}.
export function drawCompared(host, pinned, now) {
  const differing = now.facts.filter(([name, text]) => text !== fact(pinned, name));
  if (!differing.length) {
    host.replaceChildren(element("p", { class: "hint" }, "Pinned. Move a control to compare the two scenarios here."));
    return;
  }
  const rows = differing.map(([name, text]) => line(name, fact(pinned, name), text, ""));
  const [before, after] = [chosen(pinned.answer), chosen(now.answer)];
  if (before && after) rows.push(...MEASURES.filter(([, key]) => before[key] && after[key]).map(([name, key, show]) => line(name, show(before[key]), show(after[key]), change(before[key], after[key]))));
  rows.push(line("Answer", short(pinned.answer), short(now.answer), ""));
  const head = ["", link(pinned.query, "Pinned"), "Now", "Change"].map((name, i) => element("th", { scope: "col", class: i ? "number" : null }, name));
  host.replaceChildren(element("table", { class: "strategies compared" }, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)));
}

function fact(scenario, name) {
  const found = scenario.facts.find(([known]) => known === name);
  return found ? found[1] : "";
}

function line(name, ...cells) {
  return element("tr", {}, element("th", { scope: "row" }, name), ...cells.map((text) => element("td", { class: "number" },
    text.length > 60 ? element("span", { class: "long", title: text }, text) : text)));
}

function change(before, after) {
  const share = after / before - 1;
  if (share >= 1) return times(after / before);
  return Math.abs(share) < 5e-4 ? "same" : `${share > 0 ? "+" : "−"}${percent(Math.abs(share))}`;
}

function short(answer) {
  return { offload: "offload", "no offload": "do not offload", impossible: "no plan fits" }[answer.verdict];
}
