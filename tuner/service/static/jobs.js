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
    this.jobCards = new Map(); // id -> the card on the page: kept, so that focus and clicks are
    this.runCards = new Map();
  }

  async start() {
    await listen("/events", (kind, data) => this.hear(kind, data), new AbortController().signal);
  }

  // After each connection everything is read anew: nothing that happened meanwhile is missed.
  async hear(kind, data) {
    at("lost").hidden = kind !== "lost";
    if (kind === "lost") {
      at("lost").textContent = `No connection to the server (${data.message}); trying again. What is shown below may be old.`;
      return;
    }
    if (kind === "open") {
      const [{ jobs }, { runs }] = await Promise.all([call("/jobs"), call("/runs")]);
      this.jobs = new Map(jobs.reverse().map((job) => [job.id, job]));
      this.runs = runs;
    } else if (kind === "job") this.jobs.set(data.id, { ...this.jobs.get(data.id), ...data });
    else if (kind === "run") this.runs.unshift(data);
    this.render();
  }

  render() {
    const jobs = [...this.jobs.values()].reverse();
    const open = jobs.filter((job) => OPEN.includes(job.state)).length;
    at("open-jobs").hidden = !open;
    at("open-jobs").textContent = open;
    at("no-jobs").hidden = jobs.length > 0;
    at("no-jobs").textContent = "No jobs yet. “Search longer” and “Search configurations” start one.";
    at("no-runs").hidden = this.runs.length > 0;
    at("no-runs").textContent = "No runs yet. A training run posts its timeline to /api/v1/runs.";
    keep(at("jobs"), this.jobCards, jobs, (job) => this.jobCard(job), (card, job) => this.updateJob(card, job));
    keep(at("runs"), this.runCards, this.runs, (run) => this.runCard(run), () => {});
  }

  jobCard(job) {
    const title = element("p", { class: "card-title" }, `${KINDS[job.kind] || job.kind}: ${job.title}`, element("span", {}));
    return element("article", { "data-job": job.id }, title,
      element("p", { class: "hint" }), element("p", {}), element("div", { class: "actions" }));
  }

  // In place: a button that is being pressed stays the same button.
  updateJob(card, job) {
    const [title, when, note, actions] = card.children;
    const attempt = job.attempts > 1 ? `, attempt ${job.attempts}` : "";
    card.className = `card state-${job.state}`;
    title.lastChild.className = `state ${job.state}`;
    title.lastChild.textContent = job.state;
    when.textContent = `${new Date(job.created_s * 1e3).toLocaleString()}${attempt}`;
    note.hidden = job.note === job.state;
    note.textContent = job.note;
    const phase = OPEN.includes(job.state) ? "open" : job.state;
    if (actions.dataset.phase !== phase) {
      actions.dataset.phase = phase;
      actions.replaceChildren(...this.actions(job, phase));
    }
    if (phase === "open") actions.firstChild.value = job.share;
  }

  actions(job, phase) {
    if (phase === "open") {
      return [element("progress", { max: 1, "aria-label": `Progress of job ${job.id}` }),
        this.button("Cancel", () => call(`/jobs/${job.id}`, { method: "DELETE" }))];
    }
    if (phase !== "done") return [];
    const download = this.button("Download result", () => this.saveResult(job));
    return job.kind === "search" ? [this.button("Show", () => this.showFound(job)), download] : [download];
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

// Brings the cards in `host` to `items`, newest first: a card that is there stays where it is.
function keep(host, cards, items, make, update) {
  const ids = new Set(items.map((item) => item.id));
  for (const [id, card] of cards) {
    if (!ids.has(id)) {
      card.remove();
      cards.delete(id);
    }
  }
  let place = host.firstElementChild;
  for (const item of items) {
    let card = cards.get(item.id);
    if (!card) {
      card = make(item);
      cards.set(item.id, card);
    }
    if (card === place) place = place.nextElementSibling;
    else host.insertBefore(card, place);
    update(card, item);
  }
}
