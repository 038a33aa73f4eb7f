// The page of a report. It has the same components as the service's page, and contains its own data.

import { element, gib, ROLE_NAMES, seconds } from "./format.js";
import { drawKinds } from "./kinds.js";
import { drawMemory } from "./memory.js";
import { drawPhases } from "./phases.js";
import { drawTable } from "./table.js";
import { drawLegend, drawTimelines } from "./timeline.js";

function showReport() {
  const find = (id) => document.getElementById(id);
  const data = JSON.parse(find("data").textContent);
  const { plan } = data;
  const versions = Object.entries(plan.versions).map(([name, v]) => `${name} ${v}`).join(", ");
  find("about").textContent = `${data.about ? `${data.about}. ` : ""}Plan ${data.digest}${versions ? `, made with ${versions}` : ""}; report of ${data.date}.`;
  document.title = data.about ? `ebbtide: ${data.about}` : document.title;
  find("planned").append(facts(planned(data)));
  const rows = rowsOf(data);
  if (rows.length) drawTable(find("table"), rows);
  else find("table").append(element("p", { class: "hint" }, "This plan has no prediction."));
  find("reasons").append(...plan.reasons.map((text) => element("li", {}, text)));
  if (data.measured && plan.prediction) showMeasured(find, data);
  showKinds(find, data);
  if (data.timelines.length) showTimelines(find, data.timelines);
  find("foot").textContent = "All times are predictions, except those marked as measured.";
}

function facts(rows) {
  return element("dl", { class: "facts" }, ...rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

function planned({ plan, counts }) {
  const placed = Object.entries(counts).filter(([, n]) => n).map(([kind, n]) => `${n} ${kind}`).join(", ");
  const checkpoint = plan.checkpoint.interval_steps ? `every ${plan.checkpoint.interval_steps} steps` : "only when the training script saves";
  const rows = [
    ["Subgroups", `${placed}, of ${plan.subgroup_size.toLocaleString("en-US")} parameters each`],
    ...(plan.staging_slots ? [["Staging buffers on the GPU", `${plan.staging_slots}, ${plan.prefetch} filled during backward`]] : []),
    ["Updates while the next forward runs", plan.overlap_forward ? "yes" : "no"],
    ["Checkpoints", checkpoint],
  ];
  if (plan.prediction) {
    const { device_peak_bytes: device, host_peak_bytes: host, limits } = plan.prediction;
    const one = limits.host && !limits.device; // a machine without a GPU
    rows.push(["Peak memory", one ? `${gib(device + host)}, of ${gib(limits.host)} that may be used` : `${gib(device)} of GPU memory, ${gib(host)} of host memory`]);
  }
  return rows;
}

function rowsOf({ plan, others }) {
  if (!plan.prediction) return [];
  const all = [{ ...plan.prediction, role: "plan", strategy: "ebbtide", fits: true }, ...plan.alternatives.map((p, i) => ({ ...p, ...others[i] }))];
  const stock = all.find((p) => p.role === "stock");
  return all.map((p) => ({
    ...p, setting: "", reason: p.note, tokens_per_s: null,
    speedup: stock && stock.fits ? stock.iteration_s / p.iteration_s : null,
  })).sort((a, b) => b.fits - a.fits || a.iteration_s - b.iteration_s);
}

function showMeasured(find, { plan, measured }) {
  find("measured-panel").hidden = false;
  drawPhases(find("measured"), plan.prediction, measured);
}

// Only if the plan file has them, because older plans do not.
function showKinds(find, { plan: { prediction, alternatives }, others }) {
  find("kinds-panel").hidden = !prediction || !Object.keys(prediction.memory).length;
  if (find("kinds-panel").hidden) return;
  const held = alternatives.map((other, i) => [others[i].role, other.memory]).filter(([, memory]) => Object.keys(memory).length);
  drawKinds(find("kinds"), { plan: prediction.memory, ...Object.fromEntries(held) }, prediction.limits);
}

function showTimelines(find, views) {
  const names = { measured: "Measured", predicted: "Predicted" };
  const beside = (view) => views.some((other) => other.role === view.role && other.source !== view.source);
  const entries = views.map((view) => ({
    role: beside(view) && view.source === "predicted" ? "predicted" : view.role,
    title: view.role === "plan" && (view.source === "measured" || beside(view)) ? names[view.source] : ROLE_NAMES[view.role] || view.strategy,
    note: `${seconds(view.duration_s)}${view.source === "measured" ? ", a typical iteration" : ""}`, view,
  }));
  find("timelines-panel").hidden = false;
  drawLegend(find("legend"), views);
  drawTimelines(find("timelines"), entries);
  const known = entries.filter((e) => e.view.memory.t_s.length);
  find("memory-panel").hidden = !known.length;
  if (known.length) drawMemory(find("memory"), known, null);
}

showReport();
