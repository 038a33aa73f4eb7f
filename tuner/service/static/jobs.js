// The second view: jobs and runs, with live updates.

import { go, link } from "./address.js";
import { call, listen, save } from "./api.js";
import { count, element, gib, percent, seconds } from "./format.js";
import { drawFound } from "./found.js";
import { drawMemory } from "./memory.js";
import { drawPhases } from "./phases.js";
import { drawTable } from "./table.js";
import { drawLegend, drawTimelines } from "./timeline.js";

const at = (id) => document.getElementById(id);
const OPEN = ["queued", "running"];
const MOST_CELLS = 200; // most cells of a grid that are shown
const KINDS = { plan: "Plan", "what-if": "What if", search: "Search" };
const SURE_MS = 4000; // time within which a second press deletes

export class WorkView {
  // back: called when a lost connection works again.
  constructor(back) {
    this.back = back;
    this.jobs = new Map();
    this.runs = [];
    this.jobCards = new Map(); // id -> the card on the page, which is reused so that it keeps focus and clicks
    this.runCards = new Map();
    at("filter").addEventListener("input", () => this.render());
  }

  async start() {
    await listen("/events", (kind, data) => this.hear(kind, data), new AbortController().signal);
  }

  // Reads everything again after each connection, so that no event is missed.
  async hear(kind, data) {
    const lost = !at("lost").hidden;
    at("lost").hidden = kind !== "lost";
    if (kind === "lost") {
      at("lost").textContent = `No connection to the server (${data.message}). Trying again. This page may be out of date.`;
      return;
    }
    if (kind === "open") {
      if (lost) this.back();
      const [{ jobs }, { runs }] = await Promise.all([call("/jobs"), call("/runs")]);
      this.jobs = new Map(jobs.reverse().map((job) => [job.id, job]));
      this.runs = runs;
      await this.readMachines();
    } else if (kind === "job") {
      this.jobs.set(data.id, { ...this.jobs.get(data.id), ...data });
      if (data.id === this.opened && !OPEN.includes(data.state)) this.fill(data.id, this.openJob);
    } else if (kind === "run") this.runs.unshift(data);
    else if (kind === "gone") this.forget(data.id);
    this.render();
  }

  // Uploaded machines, including those that this version of ebbtide cannot read. The server's own machines are not
  // listed.
  async readMachines() {
    const { machines, unreadable } = await call("/machines");
    const own = machines.filter((m) => !m.preset && !/ \((example|shown)\)$/.test(m.name));
    const cards = [
      ...unreadable.map((m) => this.machineCard(m.name, `This machine cannot be read: ${m.reason}`)),
      ...own.map((m) => this.machineCard(m.name, m.device_name)),
    ];
    at("machines-panel").hidden = !cards.length;
    at("machines").replaceChildren(...cards);
  }

  machineCard(name, told) {
    return element("article", { class: "card", "data-machine": name }, element("p", { class: "card-title" }, name), element("p", { class: "hint" }, told),
      element("div", { class: "actions" }, this.sure("Delete", async () => {
        await call(`/machines/${encodeURIComponent(name)}`, { method: "DELETE" });
        await this.readMachines();
      })));
  }

  forget(id) {
    this.jobs.delete(id);
    this.runs = this.runs.filter((run) => run.id !== id);
    if (id === this.opened && !at("opened").hidden) go("view=work");
  }

  render() {
    const jobs = [...this.jobs.values()].reverse();
    const open = jobs.filter((job) => OPEN.includes(job.state)).length;
    at("open-jobs").hidden = !open;
    at("open-jobs").textContent = open;
    const [jobsShown, runsShown] = [jobs.filter(named(jobText)), this.runs.filter(named((run) => `${run.name} ${run.measured_on} ${run.source}`))];
    tellNone("no-jobs", jobs, jobsShown, "No jobs yet. “Search configurations” starts one.");
    tellNone("no-runs", this.runs, runsShown, "No runs yet. To show a measured run here, upload its timeline with POST /api/v1/runs.");
    keep(at("jobs"), this.jobCards, jobsShown, (job) => this.jobCard(job), (card, job) => this.updateJob(card, job));
    keep(at("runs"), this.runCards, runsShown, (run) => this.runCard(run), () => {});
  }

  // Opens what an address names: a job, a run, or only the lists.
  async open(query) {
    this.opened = query.get("job") || query.get("run");
    at("opened").hidden = !this.opened;
    if (!this.opened) return;
    this.show(this.opened, "Asking the server ...");
    at("opened-title").focus(); // immediately, because later it could take the focus from another element
    await this.fill(this.opened, query.has("job") ? this.openJob : this.openRun);
  }

  async fill(id, fill) {
    try {
      await fill.call(this, id);
    } catch (error) {
      this.show(id, "This cannot be opened", element("p", {}, error.message));
    }
  }

  // Shows the content, unless another job or run was opened meanwhile.
  show(id, title, ...content) {
    if (id !== this.opened) return;
    at("opened-title").textContent = title;
    at("opened-content").replaceChildren(...content);
  }

  async openJob(id) {
    const job = await call(`/jobs/${id}`);
    const title = `${KINDS[job.kind] || job.kind}: ${job.title}`;
    if (OPEN.includes(job.state)) this.show(id, title, element("p", { class: "hint" }, "The result will appear here."));
    else if (job.state !== "done") this.show(id, title, element("p", {}, `${job.state}: ${job.note}`));
    else this.show(id, title, ...(await this.result(job)));
  }

  async result(job) {
    const text = await (await call(`/jobs/${job.id}/result`, { raw: true })).text();
    const isJson = text.startsWith("{");
    const result = isJson ? JSON.parse(text) : null;
    const body = element("div", {});
    if (job.kind === "plan") body.append(...planFound(result));
    if (job.kind === "search") drawFound(body, result, job.id);
    if (job.kind === "what-if" && isJson) drawGrid(body, result.rows);
    const [name, content] = job.kind === "plan" ? ["plan.json", `${JSON.stringify(result.plan, null, 2)}\n`] : [`${job.kind}.${isJson ? "json" : "csv"}`, text];
    const open = job.kind === "plan" ? openLink(job) : null;
    return [body, element("div", { class: "actions" }, open, this.button("Download result", () => save(name, content)))];
  }

  jobCard(job) {
    const title = element("p", { class: "card-title" }, link(`job=${job.id}`, `${KINDS[job.kind] || job.kind}: ${job.title}`), element("span", {}));
    return element("article", { "data-job": job.id }, title,
      element("p", { class: "hint" }), element("p", {}), element("div", { class: "actions" }));
  }

  // Changes a card in place, so that a button that is being pressed stays the same element.
  updateJob(card, job) {
    const [title, when, note, actions] = card.children;
    const attempt = job.attempts > 1 ? `, attempt ${job.attempts}` : "";
    card.className = `card state-${job.state}`;
    title.lastChild.className = `state ${job.state}`;
    title.lastChild.textContent = job.state;
    when.textContent = `${new Date(job.created_s * 1e3).toLocaleString()}${attempt}`;
    const waiting = job.state === "queued" ? this.before(job) : "";
    note.hidden = !waiting && job.note === job.state;
    note.textContent = waiting || job.note;
    const phase = OPEN.includes(job.state) ? "open" : job.state;
    if (actions.dataset.phase !== phase) {
      actions.dataset.phase = phase;
      const focused = actions.contains(document.activeElement);
      actions.replaceChildren(...this.actions(job, phase));
      if (focused) title.firstChild.focus(); // the pressed button is gone
    }
    if (phase === "open") actions.firstChild.value = job.share;
  }

  // What a queued job waits for.
  before(job) {
    const earlier = [...this.jobs.values()].filter((other) => OPEN.includes(other.state) && other.created_s < job.created_s).length;
    return earlier ? `waits for ${earlier} earlier ${earlier === 1 ? "job" : "jobs"}` : "the next one to start";
  }

  actions(job, phase) {
    if (phase === "open") {
      return [element("progress", { max: 1, "aria-label": `Progress of job ${job.id}` }),
        this.button("Cancel", () => call(`/jobs/${job.id}`, { method: "DELETE" }))];
    }
    const again = this.button("Run again", async () => {
      const body = await call(`/jobs/${job.id}/request`);
      await call(`/jobs/${job.kind}`, { method: "POST", body });
    });
    const forget = this.sure("Delete", () => call(`/jobs/${job.id}?forget=true`, { method: "DELETE" }));
    return phase === "done" && job.kind === "plan" ? [openLink(job), again, forget] : [again, forget];
  }

  // A button that must be pressed twice within a short time.
  sure(text, action) {
    let timer = 0;
    const made = this.button(text, async () => {
      clearTimeout(timer);
      const pressed = made.textContent !== text;
      made.textContent = pressed ? text : `${text} for good?`;
      if (pressed) await action();
      else timer = setTimeout(() => (made.textContent = text), SURE_MS);
    });
    return made;
  }

  button(text, action) {
    const made = element("button", { type: "button" }, text);
    made.addEventListener("click", async () => {
      if (made.ariaBusy === "true") return;
      made.ariaBusy = "true"; // not `disabled`, because that would remove the focus
      try {
        await action();
      } catch (error) {
        at("status").textContent = error.message;
      }
      made.ariaBusy = "false";
    });
    return made;
  }

  runCard(run) {
    const off = run.predicted_s ? run.predicted_s / run.iteration_s - 1 : null;
    const facts = off === null ? `${seconds(run.iteration_s)} per iteration, no prediction`
      : `predicted ${seconds(run.predicted_s)}, ${run.source} ${seconds(run.iteration_s)}: ${off >= 0 ? "+" : "−"}${percent(Math.abs(off))}`;
    return element("article", { class: "card", "data-run": run.id },
      element("p", { class: "card-title" }, link(`run=${run.id}`, run.name)),
      element("p", { class: "hint" }, [run.measured_on, new Date(run.created_s * 1e3).toLocaleString()].filter(Boolean).join("; ")),
      element("p", {}, facts),
      element("div", { class: "actions" }, this.sure("Delete", () => call(`/runs/${run.id}`, { method: "DELETE" }))));
  }

  async openRun(id) {
    const run = await call(`/runs/${id}`);
    const [phases, legend, chart, memory] = ["scroll", "legend", "chart", "chart"].map((name) => element("div", { class: name }));
    const [hasMemory, isMeasured] = [run.view.memory.t_s.length > 0, run.source === "measured"];
    this.show(id, `${run.name}, ${run.source}`, ...(isMeasured ? [phases] : []), legend, chart, ...(hasMemory ? [memory] : []));
    if (isMeasured) drawPhases(phases, run.plan && run.plan.prediction, { ...run.phases, iteration_s: run.iteration_s });
    const entries = [...(run.planned ? [["predicted", "Predicted", run.planned]] : []), ["plan", isMeasured ? "Measured" : "Posted", run.view]]
      .map(([role, title, view]) => ({ role, title, note: seconds(view.duration_s), view }));
    drawLegend(legend, entries.map((entry) => entry.view));
    drawTimelines(chart, entries);
    if (hasMemory) drawMemory(memory, entries.slice(-1), null);
  }
}

function openLink(job) {
  const made = link(`from=${job.id}`, "Open in What if");
  made.className = "button";
  return made;
}

// The cells of a grid. Each is named by the values that were varied.
function drawGrid(host, rows) {
  const told = (key, value) => (key === "gpu_memory_bytes" ? `${gib(value)} of GPU memory` : `${key} ${value}`);
  const named = (row) => [row.strategy, row.setting, ...Object.keys(row).slice(2, Object.keys(row).indexOf("fits")).map((key) => told(key, row[key]))];
  const shown = rows.slice(0, MOST_CELLS).map((row) => ({ ...row, label: named(row).filter(Boolean).join(", ") }));
  const table = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "The cells of the grid" });
  drawTable(table, shown);
  const more = rows.length > MOST_CELLS && element("p", { class: "hint" }, `The first ${MOST_CELLS} of ${count(rows.length)} cells. The download has all.`);
  host.replaceChildren(...[table, more].filter(Boolean));
}

function planFound({ plan, quick_iteration_s: quick, quick_high_s: quickHigh, robust }) {
  const told = plan.prediction;
  const expected = `Expected: ${seconds(told.iteration_s)} per iteration, ${compared(told.iteration_s, quick)} than the quick plan.`;
  const slow = `If copies and updates are as slow as in one run of twenty: ${seconds(told.iteration_high_s)}, ${compared(told.iteration_high_s, quickHigh)} than the quick plan.`;
  const sought = robust ? "A robust plan is the one with the shortest slow case, not the shortest expected time." : "";
  return [...[expected, slow, sought].filter(Boolean).map((text) => element("p", {}, text)), element("ul", { class: "notes" }, ...plan.reasons.map((text) => element("li", {}, text)))];
}

function compared(value, other) {
  const saved = 1 - value / other;
  return Math.abs(saved) <= 1e-3 ? "no faster" : `${percent(Math.abs(saved))} ${saved > 0 ? "faster" : "slower"}`;
}

function jobText(job) {
  return `${KINDS[job.kind]} ${job.title} ${job.state} ${job.note}`;
}

// Returns true for items whose text contains every word of the filter.
function named(text) {
  const words = at("filter").value.toLowerCase().split(/\s+/);
  return (item) => words.every((word) => text(item).toLowerCase().includes(word));
}

function tellNone(id, all, shown, none) {
  at(id).hidden = shown.length > 0;
  at(id).textContent = all.length ? "No name matches the filter." : none;
}

// Makes the cards in `host` show `items`, newest first. Existing cards keep their elements.
function keep(host, cards, items, make, update) {
  const ids = new Set(items.map((item) => item.id));
  for (const [id, card] of cards) {
    if (!ids.has(id)) {
      if (card.contains(document.activeElement)) at("filter").focus();
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
