// The right side: the sentence, the tiles, the pictures, the table; asks quickly, then refines.

import { ApiError, call, save } from "./api.js";
import { count, duration, element, gib, params, percent, seconds, times } from "./format.js";
import { drawMemory } from "./memory.js";
import { drawTable } from "./table.js";
import { drawLegend, drawTimelines } from "./timeline.js";

const REST_MS = 900; // without a move, before the slower search starts
const SLOW_MS = 3000; // no answer takes as long, once the server is warm
const at = (id) => document.getElementById(id);

export class AnswerView {
  constructor(controls) {
    this.controls = controls;
    this.shown = null; // the answer on the page
    this.asked = 0; // number of the latest question
    this.busy = false;
    this.again = false;
    at("save-plan").addEventListener("click", () => this.savePlan());
    at("save-trace").addEventListener("click", () => this.download("/trace", "trace.json", "the trace"));
    at("save-report").addEventListener("click", () => this.download("/report", "report.html", "the report"));
    at("copy-link").addEventListener("click", () => this.copyLink());
    at("use-plan").addEventListener("click", () => this.savePlan());
    at("use-config").addEventListener("click", () => save("ds.json", at("use-json").textContent));
    for (const button of document.querySelectorAll("[data-copy]")) {
      button.addEventListener("click", () => this.copy(at(button.dataset.copy).textContent, "Copied"));
    }
  }

  // One quick question at a time; of the moves meanwhile only the last one is asked.
  async ask(moved = performance.now()) {
    this.moved = moved;
    clearTimeout(this.timer);
    if (this.refining) this.refining.abort();
    if (this.busy) {
      this.again = true;
      return;
    }
    this.busy = true;
    const slow = setTimeout(() => this.tell("The server is starting; the first time it compiles the simulator, which takes a minute ..."), SLOW_MS);
    const number = (this.asked += 1);
    const scenario = this.controls.scenario();
    const started = this.moved;
    try {
      this.render(await call("/answer", { method: "POST", body: { ...scenario, peers: false } }), false);
      requestAnimationFrame(() => performance.measure("answer", { start: started, end: performance.now() }));
      if (!this.again) this.render(await call("/answer", { method: "POST", body: scenario }), true);
    } catch (error) {
      this.refuse(error);
    }
    clearTimeout(slow);
    if (at("status").textContent.startsWith("The server is starting")) this.tell("");
    this.busy = false;
    if (this.again) {
      this.again = false;
      this.ask(this.moved);
    } else if (number === this.asked) {
      this.timer = setTimeout(() => this.refine(scenario, number), REST_MS);
    }
  }

  // The search that `tune plan` does, in the background; given up at the next move.
  async refine(scenario, number) {
    if (this.shown && this.shown.verdict === "impossible") {
      await this.findWays(scenario, number);
      return;
    }
    if (!this.shown || !this.shown.plan || (this.shown.verdict !== "offload" && !scenario.mtbf_s)) {
      this.tell("");
      return;
    }
    this.refining = new AbortController();
    this.tell("Refining ...");
    try {
      const body = { ...scenario, effort: "full" };
      const answer = await call("/answer", { method: "POST", body, signal: this.refining.signal });
      if (number === this.asked && !this.busy) {
        this.render(answer, true);
        this.tell("Searched");
      }
    } catch (error) {
      if (error.name !== "AbortError") this.tell(`Not refined: ${error.message}`);
    }
  }

  // Where nothing fits: the nearest changes that do, as buttons that make them.
  async findWays(scenario, number) {
    this.refining = new AbortController();
    this.tell("Looking for what would fit ...");
    try {
      const { ways } = await call("/ways-out", { method: "POST", body: scenario, signal: this.refining.signal });
      if (number !== this.asked || this.busy) return;
      at("ways").replaceChildren(element("p", { class: "hint" }, ways.length ? "These changes fit:" : "No single change that this page knows makes it fit."),
        ...ways.map((way) => this.wayButton(way)));
      at("ways").hidden = false;
      this.tell("");
    } catch (error) {
      if (error.name !== "AbortError") this.tell(`No change found: ${error.message}`);
    }
  }

  wayButton(way) {
    const cost = `${seconds(way.iteration_s)} per iteration${way.tokens_per_s ? `, ${count(way.tokens_per_s)} tokens/s` : ""}`;
    const button = element("button", { type: "button" }, element("strong", {}, way.label), element("span", { class: "hint" }, cost));
    button.addEventListener("click", () => this.controls.take(way.changes));
    return button;
  }

  tell(text) {
    at("status").textContent = text;
  }

  refuse(error) {
    at("sentence").textContent = error instanceof ApiError ? `This cannot be answered: ${error.message}` : `The server cannot be reached: ${error.message}`;
    at("answer").classList.add("refused");
    this.shown = null;
    at("ways").hidden = at("use").hidden = true;
    this.offer();
    this.tell("");
  }

  // What can be done with the answer that is shown; nothing while there is none.
  offer() {
    const plan = Boolean(this.shown && this.shown.plan);
    for (const id of ["save-plan", "save-trace", "save-report", "search"]) at(id).disabled = !plan;
    // A profile cannot tell what another micro-batch would take.
    at("search-configurations").disabled = Boolean(this.controls.workload());
  }

  render(answer, whole) {
    this.shown = answer;
    at("ways").hidden = true;
    at("answer").classList.remove("refused");
    at("answer").dataset.verdict = answer.verdict;
    at("answer").dataset.effort = answer.effort;
    at("sentence").textContent = answer.sentence;
    at("context").textContent = context(answer);
    at("tiles").replaceChildren(...tiles(answer));
    const entries = entriesOf(answer);
    drawLegend(at("legend"), entries.map((e) => e.view));
    drawTimelines(at("timelines"), entries);
    drawMemory(at("memory"), entries, answer.machine.unified_memory ? null : answer.limits.device_bytes);
    at("table").setAttribute("aria-busy", whole ? "false" : "true");
    if (whole || !at("table").childElementCount) drawTable(at("table"), answer.rows);
    const notes = [...failures(answer), ...(answer.plan ? answer.plan.reasons : []), ...answer.limits.notes];
    at("notes").replaceChildren(...[...new Set(notes)].map((n) => element("li", {}, n)));
    this.offerUse(answer);
    this.offer();
  }

  offerUse(answer) {
    at("use").hidden = answer.verdict !== "offload";
    if (!answer.use) return;
    at("use-trainer").textContent = answer.use.trainer;
    at("use-command").textContent = answer.use.command;
    at("use-json").textContent = `${JSON.stringify(answer.use.deepspeed, null, 2)}\n`;
  }

  savePlan() {
    save("plan.json", `${JSON.stringify(this.shown.plan, null, 2)}\n`);
  }

  async download(path, name, what) {
    this.tell(`Making ${what} ...`);
    try {
      const body = { plan: this.shown.plan, scenario: this.controls.scenario() };
      const response = await call(path, { method: "POST", body, raw: true });
      save(name, await response.text(), response.headers.get("content-type"));
      this.tell("");
    } catch (error) {
      this.tell(`No ${what}: ${error.message}`);
    }
  }

  copyLink() {
    return this.copy(`${location.origin}${location.pathname}?${this.controls.query()}`, "Link copied");
  }

  async copy(text, told) {
    try {
      await navigator.clipboard.writeText(text);
      this.tell(told);
    } catch {
      this.tell(text.length < 300 ? text : "Not copied: the browser allows it over https only"); // shown, to be copied by hand
    }
  }
}

function entriesOf(answer) {
  const titles = { stock: "Stock", plan: "Plan" };
  return ["stock", "plan"].filter((role) => answer.timelines[role]).map((role) => {
    const view = answer.timelines[role];
    const row = answer.rows.find((r) => r.role === role);
    const note = `${seconds(view.duration_s)}${row && !row.fits ? `, ${row.reason}` : ""}`;
    return { title: titles[role], note, view };
  });
}

function context(answer) {
  const w = answer.workload, m = answer.machine;
  const nodes = w.nodes > 1 ? `${w.nodes} nodes, ` : "";
  const kind = m.unified_memory ? `${m.device_name || m.name}, a machine without a GPU` : m.device_kind === "emulated" ? "a machine without a GPU, emulating one" : m.device_name || m.name;
  const source = m.measured_with === "preset" ? "a preset, estimated" : "measured";
  const size = w.model_params && w.model_params !== w.params ? `${params(w.model_params)} parameters, ${params(w.params)} per GPU,` : `${params(w.params)} parameters`;
  return `${w.name}: ${size} in ${count(w.layers)} layers and ${count(w.subgroups)} subgroups, on ${nodes}${kind} (${source}).`;
}

function tiles(answer) {
  const row = answer.rows.find((r) => r.role === (answer.verdict === "no offload" ? "no offload" : "plan"));
  if (!row) return [];
  const tile = (name, value, note) => element("div", { class: "tile" },
    element("p", { class: "tile-name" }, name), element("p", { class: "tile-value" }, value), element("p", { class: "tile-note" }, note));
  const what = answer.verdict === "no offload" ? "not offloading" : "with this plan";
  const limits = answer.limits;
  const useful = answer.goodput && answer.goodput.by_role[row.role];
  const goodput = useful ? [tile("Useful time", percent(useful.goodput), `a checkpoint every ${count(useful.interval_steps)} steps`)] : [];
  return [
    tile("Iteration", seconds(row.iteration_s), answer.bound_s ? `no plan below ${seconds(answer.bound_s)}` : what),
    tile("Against stock", times(row.speedup), what),
    tile("Tokens per second", row.tokens_per_s ? count(row.tokens_per_s) : "unknown", "all ranks together"),
    tile("GPU memory", gib(row.device_peak_bytes), `of ${gib(limits.device_bytes)} usable`),
    tile("Host memory", gib(row.host_peak_bytes), `of ${gib(limits.host_bytes)} per rank`),
    ...goodput,
  ];
}

// With failures: what checkpoints, lost work and restarts leave of the time, for whom.
function failures(answer) {
  if (!answer.goodput) return [];
  const named = [["plan", "the plan"], ["stock", "stock, which waits for its checkpoints,"], ["no offload", "not offloading, with the same waits,"]];
  const told = named.filter(([role]) => answer.goodput.by_role[role]).map(([role, name]) => {
    const row = answer.goodput.by_role[role];
    return `${name} trains ${percent(row.goodput)} of the time (a checkpoint every ${count(row.interval_steps)} steps, ${seconds(row.stall_s)} of waiting)`;
  });
  return [`With a failure every ${duration(answer.goodput.mtbf_s)} and ${seconds(answer.goodput.restart_s)} to restart, each at its best interval: ${told.join("; ")}.`];
}
