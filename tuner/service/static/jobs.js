// The second view: jobs and runs, live.

import { call, listen, save } from "./api.js";
import { element, percent, seconds } from "./format.js";
import { drawFound } from "./found.js";
import { drawMemory } from "./memory.js";
import { drawLegend, drawTimelines } from "./timeline.js";

const at = (id) => document.getElementById(id);
const OPEN = ["queued", "running"];
const KINDS = { plan: "Plan", "what-if": "What if", search: "Search" };

export class WorkView {
  constructor() {
    this.jobs = new Map();
    this.runs = [];
  }

  async start() {
    await listen("/events", (kind, data) => this.hear(kind, data), new AbortController().signal);
  }

  // After each connection everything is read anew: nothing that happened meanwhile is missed.
  async hear(kind, data) {
    if (kind === "open") {
      const [{ jobs }, { runs }] = await Promise.all([call("/jobs"), call("/runs")]);
      this.jobs = new Map(jobs.reverse().map((job) => [job.id, job]));
      this.runs = runs;
    } else if (kind === "job") this.jobs.set(data.id, { ...this.jobs.get(data.id), ...data });
    else if (kind === "run") this.runs.unshift(data);
    this.render();
  }

  render() {
    const open = [...this.jobs.values()].filter((job) => OPEN.includes(job.state)).length;
    at("open-jobs").hidden = !open;
    at("open-jobs").textContent = open;
    const jobs = [...this.jobs.values()].reverse().map((job) => this.jobCard(job));
    at("jobs").replaceChildren(...(jobs.length ? jobs : [element("p", { class: "hint" }, "No jobs yet. “Search the best plan” and “Search configurations” start one.")]));
    const runs = this.runs.map((run) => this.runCard(run));
    at("runs").replaceChildren(...(runs.length ? runs : [element("p", { class: "hint" }, "No runs yet. A training run posts its timeline to /api/v1/runs.")]));
  }

  jobCard(job) {
    const card = element("article", { class: `card state-${job.state}`, "data-job": job.id },
      element("p", { class: "card-title" }, `${KINDS[job.kind] || job.kind}: ${job.title}`, element("span", { class: `state ${job.state}` }, job.state)),
      element("p", { class: "hint" }, `${new Date(job.created_s * 1e3).toLocaleString()}${job.attempts > 1 ? `, attempt ${job.attempts}` : ""}`),
      element("p", { hidden: job.note === job.state }, job.note));
    if (OPEN.includes(job.state)) {
      card.append(element("progress", { max: 1, value: job.share, "aria-label": `Progress of job ${job.id}` }));
      card.append(this.button("Cancel", () => call(`/jobs/${job.id}`, { method: "DELETE" })));
    } else if (job.state === "done") {
      const actions = element("div", { class: "actions" }, this.button("Download result", () => this.saveResult(job)));
      if (job.kind === "search") actions.prepend(this.button("Show", () => this.showFound(job)));
      card.append(actions);
    }
    return card;
  }

  button(text, action) {
    const made = element("button", { type: "button" }, text);
    made.addEventListener("click", async () => {
      made.disabled = true;
      try {
        await action();
      } catch (error) {
        at("status").textContent = error.message;
      }
      made.disabled = false;
    });
    return made;
  }

  async showFound(job) {
    const result = await call(`/jobs/${job.id}/result`);
    const host = at("found");
    const answer = element("div", {});
    host.hidden = false;
    host.replaceChildren(element("h2", {}, job.title), answer);
    drawFound(answer, result);
    host.scrollIntoView({ block: "nearest" });
  }

  async saveResult(job) {
    const result = await (await call(`/jobs/${job.id}/result`, { raw: true })).text();
    if (job.kind !== "plan") save(`${job.kind}.${result.startsWith("{") ? "json" : "csv"}`, result);
    else save("plan.json", `${JSON.stringify(JSON.parse(result).plan, null, 2)}\n`);
  }

  runCard(run) {
    const off = run.predicted_s ? run.predicted_s / run.iteration_s - 1 : null;
    const facts = off === null ? `${seconds(run.iteration_s)} per iteration, no prediction`
      : `predicted ${seconds(run.predicted_s)}, ${run.source} ${seconds(run.iteration_s)}: ${off >= 0 ? "+" : "−"}${percent(Math.abs(off))}`;
    return element("article", { class: "card", "data-run": run.id },
      element("p", { class: "card-title" }, run.name),
      element("p", { class: "hint" }, [run.measured_on, new Date(run.created_s * 1e3).toLocaleString()].filter(Boolean).join("; ")),
      element("p", {}, facts),
      this.button("Show timeline", () => this.showRun(run)));
  }

  async showRun(run) {
    const whole = await call(`/runs/${run.id}`);
    const host = at("run");
    host.hidden = false;
    const legend = element("div", { class: "legend" }), chart = element("div", { class: "chart" }), memory = element("div", { class: "chart" });
    host.replaceChildren(element("h2", {}, `${run.name}, ${run.source}`), legend, chart, memory);
    drawLegend(legend, [whole.view]);
    drawTimelines(chart, [{ title: run.source === "measured" ? "Measured" : "Predicted", note: seconds(whole.view.duration_s), view: whole.view }]);
    if (whole.view.memory.t_s.length) drawMemory(memory, [{ title: "Plan", view: whole.view }], null);
    host.scrollIntoView({ block: "nearest" });
  }
}
