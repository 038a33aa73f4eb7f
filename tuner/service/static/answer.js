// The right side of the page: sentence, tiles, pictures and table. It first shows a quick answer, and then a refined
// one.

import { here } from "./address.js";
import { call, save } from "./api.js";
import { scenarioOf } from "./found.js";
import { Buyer } from "./buyer.js";
import { chosen, drawCompared } from "./compare.js";
import { between, count, duration, element, gib, params, percent, seconds, times } from "./format.js";
import { drawKinds } from "./kinds.js";
import { drawMemory } from "./memory.js";
import { around, drawSweep, sweep } from "./sweep.js";
import { drawTable } from "./table.js";
import { difference, drawLegend, drawTimelines } from "./timeline.js";

const REST_MS = 900; // time without a move after which the slower search starts
const SLOW_MS = 3000;
const SLOW = "Still computing. A server's first answer takes a minute, because it compiles the simulator ...";
const at = (id) => document.getElementById(id);

export class AnswerView {
  constructor(controls) {
    this.controls = controls;
    this.shown = null; // the answer on the page
    this.asked = 0; // number of the latest question
    this.busy = false;
    this.pending = false;
    this.at = null; // the address of the scenario that is shown
    this.plan = null; // the plan of a job or a file, which is shown instead of the plan of a search
    this.pinned = null; // {query, facts, answer}
    this.buyer = new Buyer(controls);
    at("pin").addEventListener("click", () => this.pin());
    at("sweep").addEventListener("toggle", () => this.sweep());
    at("swept").addEventListener("change", () => this.sweep());
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

  // Shows what an address names: a scenario, or a job's result (`from`, and `row` for a search job).
  async open(query) {
    if (query.toString() === this.at) return;
    this.at = query.toString();
    this.wait(); // the page still shows the answer of another address
    try {
      await this.openPin(query.get("pin"));
      this.plan = await this.place(query);
      this.planFrom = "This plan was found by a job.";
      if (this.controls.missing()) throw new Error(this.controls.missing());
    } catch (error) {
      at("tiles").replaceChildren(); // the page shows no answer of another address
      this.refuse(error, this.controls.missing() ? "This link cannot be shown" : undefined);
      at("context").textContent = this.controls.missing() ? "An upload stays in the browser that made it, and a machine may have been deleted. Choose a model and a machine to get an answer for them." : "";
      return;
    }
    at("strange").textContent = this.controls.strange();
    at("strange").hidden = !this.controls.strange();
    await this.ask();
  }

  // Sets the controls to what an address names. Returns the plan of the job that it names, or null.
  async place(query) {
    if (!query.has("from")) {
      if (query.toString() !== this.controls.query()) this.controls.read(query);
      return null;
    }
    const [id, row] = [query.get("from"), query.get("row")];
    const [asked, result] = await Promise.all([call(`/jobs/${id}/request`), call(`/jobs/${id}/result`)]);
    const found = row === null ? {} : scenarioOf(result.front[row].configuration, asked.ds_config);
    this.controls.load({ ...asked, ...found }, query.get("pin"));
    return result.plan || null;
  }

  // The scenario to compare with, which is a part of the address too.
  async openPin(address) {
    if (address === (this.pinned && this.pinned.query)) return;
    this.pinned = null;
    if (!address) return;
    const plan = await this.place(new URLSearchParams(address));
    if (this.controls.missing()) throw new Error(`of the pinned scenario. ${this.controls.missing()}`);
    const [scenario, facts] = [this.controls.scenario(), this.controls.facts()];
    const answer = await call("/answer", { method: "POST", body: { ...scenario, ...(plan && { plan }), peers: false } });
    this.pinned = { query: address, facts, answer };
  }

  pin() {
    const query = here();
    query.delete("pin");
    this.pinned = this.pinned ? null : { query: query.toString(), facts: this.controls.facts(), answer: this.shown };
    this.controls.pinned = this.pinned && this.pinned.query;
    if (this.pinned) query.set("pin", this.pinned.query);
    history.replaceState(null, "", `?${query}`);
    this.at = here().toString();
    this.render(this.shown, true);
  }

  compare(answer) {
    const query = here();
    query.delete("pin");
    if (this.pinned && query.toString() === this.pinned.query) this.pinned.answer = answer; // the answer may be a refined one by now
    at("pin").textContent = this.pinned ? "Unpin" : "Pin to compare";
    at("pin").ariaPressed = String(Boolean(this.pinned));
    at("compared").hidden = !this.pinned;
    if (this.pinned) drawCompared(at("comparison"), this.pinned, { facts: this.controls.facts(), answer });
  }

  // Shows the values around the scenario on the page, while the panel is open.
  sweep() {
    if (this.sweeping) this.sweeping.abort();
    const known = this.controls.sweepable();
    const select = at("swept");
    const found = (key) => known.find((control) => control.key === key);
    const wanted = found(select.value) || found("device_memory_bytes") || found("host_memory_bytes");
    select.replaceChildren(...known.map((c) => element("option", { value: c.key }, c.unit ? `${c.label} (${c.unit})` : c.label)));
    select.value = wanted.key;
    if (!at("sweep").open || !this.shown) return;
    this.sweeping = new AbortController();
    const there = this.controls.state[wanted.key];
    const values = around(this.controls.steps(wanted), there);
    const changes = values.map((value) => this.controls.with(wanted, value));
    sweep(this.controls.job(), values, changes, this.shown.plan, this.sweeping.signal, (points, waiting) => {
      drawSweep(at("swept-chart"), wanted, points, there, waiting, (value) => this.controls.take(this.controls.with(wanted, value)));
    });
  }

  // Shows a plan file that the user opened, for the scenario of the controls. Returns a sentence about it.
  show(plan, name) {
    this.plan = plan;
    this.planFrom = `This plan comes from ${name}.`;
    this.ask();
    return `The page shows the plan of ${name}, for the model and machine above. Move a control to search again.`;
  }

  // The user moved a control, so the scenario is no longer that of a job.
  moved() {
    this.at = here().toString();
    this.plan = null;
    this.ask();
  }

  // Called when the server can be reached again.
  again() {
    if (!this.shown && this.at !== null) this.ask();
  }

  // Asks one quick question at a time. Of the moves during a question, only the last one is asked.
  async ask(moved = performance.now()) {
    this.movedAt = moved;
    clearTimeout(this.timer);
    if (this.refining) this.refining.abort();
    this.wait();
    if (this.busy) {
      this.pending = true;
      return;
    }
    this.busy = true;
    const slow = setTimeout(() => this.tell(SLOW), SLOW_MS);
    const number = (this.asked += 1);
    const scenario = this.controls.scenario();
    const asked = this.plan ? { ...scenario, plan: this.plan } : scenario;
    try {
      const first = await call("/answer", { method: "POST", body: { ...asked, peers: false } });
      this.render(first, false);
      requestAnimationFrame(() => performance.measure("answer", { start: moved, end: performance.now() }));
      if (!this.pending) {
        // Only rows of other systems and of the plan's variants are missing. With the plan, the server need not search again.
        const body = { ...asked, ...(first.plan && { plan: first.plan }), timelines: false };
        const whole = await call("/answer", { method: "POST", body });
        this.render({ ...whole, timelines: first.timelines }, true);
      }
    } catch (error) {
      this.refuse(error);
    }
    clearTimeout(slow);
    if (at("status").textContent === SLOW) this.tell("");
    this.busy = false;
    if (this.pending) {
      this.pending = false;
      this.ask(this.movedAt);
    } else if (number === this.asked && this.shown) {
      this.sweep();
      this.timer = setTimeout(() => this.refine(scenario, number), REST_MS);
    }
  }

  // Searches like `tune plan`, in the background. The next move cancels the search.
  async refine(scenario, number) {
    const quick = this.shown;
    if (quick.verdict === "impossible") {
      await this.findWays(this.controls.job(), number);
      return;
    }
    if (!searchable(quick, scenario) || this.plan) return;
    this.refining = new AbortController();
    this.effort("This is a quick plan. Searching for a better one ...");
    try {
      const body = { ...scenario, effort: "full" };
      const answer = await call("/answer", { method: "POST", body, signal: this.refining.signal });
      if (number !== this.asked || this.busy) return;
      this.render(answer, true);
      this.effort(searched(quick, answer));
      this.sweep();
    } catch (error) {
      if (error.name !== "AbortError") this.effort(`This is a quick plan. The search for a better one failed: ${error.message}`);
    }
  }

  // If no plan fits: shows the nearest changes with which a plan fits, as buttons that make the changes.
  async findWays(scenario, number) {
    this.refining = new AbortController();
    this.tell("Looking for changes with which a plan fits ...");
    try {
      const { ways, another_way: another } = await call("/ways-out", { method: "POST", body: scenario, signal: this.refining.signal });
      if (number !== this.asked || this.busy) return;
      at("ways").replaceChildren(element("p", { class: "hint" }, ways.length ? "With one of these changes a plan fits, the cheapest first:" : "No plan fits with any change that this page can try."),
        ...ways.map((way) => this.wayButton(way)), element("p", { class: "hint" }, `${another}.`));
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

  // Dims the old answer, and takes back what was said about it, until the new answer is there.
  wait() {
    at("answer").classList.add("stale");
    at("table").setAttribute("aria-busy", "true");
    at("effort").textContent = "";
    this.tell("");
  }

  tell(text) {
    at("status").textContent = text;
  }

  effort(text) {
    at("effort").textContent = text;
  }

  refuse(error, what = error instanceof TypeError ? "The server cannot be reached" : "This question cannot be answered") {
    at("sentence").textContent = `${what}: ${error.message}`;
    at("answer").classList.add("refused");
    at("answer").classList.toggle("empty", !at("tiles").childElementCount);
    at("answer").classList.remove("stale");
    at("table").setAttribute("aria-busy", "false");
    this.shown = null;
    at("ways").hidden = at("use").hidden = at("cost").hidden = true;
    this.offer();
    this.effort("");
    this.tell("");
  }

  // Enables the buttons that the present answer allows.
  offer() {
    const plan = Boolean(this.shown && this.shown.plan);
    at("pin").disabled = !this.shown;
    for (const id of ["save-plan", "save-trace", "save-report", "search"]) at(id).disabled = !plan;
    // A profiled workload does not show how other micro-batch sizes would perform.
    at("search-configurations").disabled = !this.shown || Boolean(this.controls.workload());
  }

  render(answer, whole) {
    this.shown = answer;
    at("ways").hidden = true;
    at("answer").classList.remove("refused", "empty", "stale");
    at("answer").dataset.verdict = answer.verdict;
    at("answer").dataset.effort = answer.effort;
    at("sentence").textContent = answer.sentence;
    at("context").textContent = context(answer);
    const advised = answer.verdict === "offload";
    this.effort(this.plan ? this.planFrom : advised && isNearBound(answer) ? NEAR_BOUND : "");
    at("save-plan").classList.toggle("primary", advised);
    at("save-plan").textContent = advised || !answer.plan ? "Download plan.json" : "Download the plan anyway";
    at("tiles").replaceChildren(...tiles(answer));
    this.buyer.show(answer);
    this.compare(answer);
    const entries = entriesOf(answer, this.pinned);
    drawLegend(at("legend"), entries.map((e) => e.view));
    drawTimelines(at("timelines"), entries);
    at("difference").textContent = advised && answer.timelines.plan ? difference(answer.timelines.stock, answer.timelines.plan) : "";
    at("kinds-panel").hidden = !answer.memory;
    const { device_bytes: device, host_bytes: host, storage_bytes: storage } = answer.limits;
    if (answer.memory) drawKinds(at("kinds"), answer.memory, { device: answer.machine.unified_memory ? null : device, host, storage });
    at("memory-title").textContent = `${answer.machine.unified_memory ? "The GPU's part of the memory" : "GPU memory"} over the same iteration`;
    drawMemory(at("memory"), entries, answer.machine.unified_memory ? null : answer.limits.device_bytes);
    at("table").setAttribute("aria-busy", whole ? "false" : "true");
    if (whole || !at("table").childElementCount) drawTable(at("table"), answer.rows, chosen(answer));
    const notes = [...failures(answer), ...(answer.plan ? answer.plan.reasons : []), ...answer.limits.notes, ...answer.notes];
    at("notes").replaceChildren(...[...new Set(notes)].map((n) => element("li", {}, n)));
    this.offerFaster(answer.faster || []);
    this.offerUse(answer);
    this.offer();
  }

  // Changes with which the same samples train faster, as buttons.
  offerFaster(changes) {
    if (!changes.length) return;
    at("ways").replaceChildren(element("p", { class: "hint" }, "The same samples, faster:"), ...changes.map((one) => this.wayButton(one)));
    at("ways").hidden = false;
  }

  offerUse(answer) {
    at("use").hidden = answer.verdict === "impossible" || !answer.use;
    if (at("use").hidden) return;
    at("use").classList.toggle("no-plan", answer.verdict === "no offload");
    at("use-title").textContent = answer.verdict === "no offload" ? "Train without offload" : "Train with this plan";
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
      const body = { plan: this.shown.plan, scenario: this.controls.job() };
      const response = await call(path, { method: "POST", body, raw: true });
      save(name, await response.text(), response.headers.get("content-type"));
      this.tell("");
    } catch (error) {
      this.tell(`No ${what}: ${error.message}`);
    }
  }

  copyLink() {
    return this.copy(location.href, "Link copied");
  }

  async copy(text, told) {
    try {
      await navigator.clipboard.writeText(text);
      this.tell(told);
    } catch {
      this.tell(text.length < 300 ? text : "Not copied: the browser allows copying over https only"); // shown, so that the user can copy it by hand
    }
  }
}

const NEAR_BOUND = "Within 0.5% of a lower bound: a longer search cannot find a plan that is much faster.";

// Rounds down, like `least_text`, so that the printed lower bound is still a lower bound.
function roundedDown(value) {
  const digit = value >= 100 ? 1 : value >= 1 ? 1e-2 : value >= 0.0995 ? 1e-3 : 1e-4;
  return Math.floor(value / digit) * digit;
}

function isNearBound(answer) {
  return answer.bound_s && planned(answer).iteration_s < answer.bound_s * 1.005;
}

function planned(answer) {
  return answer.rows.find((row) => row.role === "plan");
}

// Returns true if a longer search could find a better plan.
function searchable(answer, scenario) {
  return answer.plan && (scenario.mtbf_s || (answer.verdict === "offload" && !isNearBound(answer)));
}

function searched(quick, answer) {
  if (isNearBound(answer)) return NEAR_BOUND;
  const saved = 1 - planned(answer).iteration_s / planned(quick).iteration_s;
  return saved > 1e-3 ? `Searched: ${percent(saved)} faster than the quick plan.` : "Searched: the quick plan is the best one found.";
}

function entriesOf(answer, pinned) {
  const entry = (title, shown, role) => {
    const view = shown.timelines[role];
    const row = shown.rows.find((r) => r.role === role);
    const told = shown.plan && shown.plan.prediction;
    // The table has the mean over steps that clip and steps that do not.
    const early = role === "plan" && told && told.clip_rate ? " if the step does not clip" : "";
    return view && { role: title === "Pinned" ? "pinned" : role, title, note: `${seconds(view.duration_s)}${early}${row && !row.fits ? ", does not fit" : ""}`, view };
  };
  const beside = pinned && pinned.answer !== answer && entry("Pinned", pinned.answer, advisedBy(pinned.answer) || "stock");
  const advised = advisedBy(answer);
  return [entry("Stock", answer, "stock"), advised && entry(advised === "plan" ? "Plan" : "Not offloading", answer, advised), beside].filter(Boolean);
}

// The role of the timeline that the sentence is about. None if no plan fits.
function advisedBy(answer) {
  return ["no offload", "plan"].find((role) => answer.timelines[role] && (role === "plan" || answer.verdict === role));
}

function context(answer) {
  const w = answer.workload, m = answer.machine;
  const nodes = w.nodes > 1 ? `${w.nodes} nodes, ` : "";
  const kind = m.unified_memory ? `${m.device_name || m.name}, a machine without a GPU` : m.device_kind === "emulated" ? "a machine without a GPU, which emulates one" : m.device_name || m.name;
  const source = m.measured_with === "preset" ? "a preset, estimated" : "measured";
  const size = w.model_params && w.model_params !== w.params ? `${params(w.model_params)} parameters, ${params(w.params)} per GPU,` : `${params(w.params)} parameters`;
  const subgroups = (answer.plan && answer.plan.subgroups.length) || w.subgroups;
  return `${w.name}: ${size} in ${count(w.layers)} layers and ${count(subgroups)} subgroups, on ${nodes}${kind} (${source}).`;
}

function tiles(answer) {
  const row = chosen(answer);
  if (!row) return [];
  const tile = (name, value, ...notes) => element("div", { class: "tile" },
    element("p", { class: "tile-name" }, name), element("p", { class: "tile-value" }, value), ...notes.map((note) => element("p", { class: "tile-note" }, note)));
  const what = answer.verdict === "no offload" ? "not offloading" : "with this plan";
  const best = answer.best_stock;
  const other = best && answer.rows.some((one) => one.role === "best stock");
  const against = other ? `${what}. DeepSpeed alone at its best (${best.name}): ${seconds(best.iteration_s)}, ${times(row.speedup_over_best)}` : what;
  const limits = answer.limits;
  const useful = answer.goodput && answer.goodput.by_role[row.role];
  const goodput = useful ? [tile("Useful time", percent(useful.goodput), `a checkpoint every ${count(useful.interval_steps)} steps`)] : [];
  return [
    tile("Iteration", seconds(row.iteration_s), ...[interval(answer, row), answer.bound_s ? `no plan below ${seconds(roundedDown(answer.bound_s))}` : what].filter(Boolean)),
    row.speedup ? tile("Against stock", isVague(row) ? "faster" : times(row.speedup), ...[gain(row), against].filter(Boolean)) : tile("Stock", "does not fit", stockReason(answer)),
    tile("Tokens/s", row.tokens_per_s ? count(row.tokens_per_s) : "unknown", "all ranks together"),
    ...(answer.machine.unified_memory
      ? [tile("Memory", gib(row.device_peak_bytes + row.host_peak_bytes), `of ${gib(limits.host_bytes)} per rank, for the GPU's part too`)]
      : [tile("GPU memory", gib(row.device_peak_bytes), `of ${gib(limits.device_bytes)} usable`), tile("Host memory", gib(row.host_peak_bytes), `of ${gib(limits.host_bytes)} per rank`)]),
    ...goodput,
  ];
}

function interval(answer, row) {
  const told = row.iteration_low_s ? row : row.role === "plan" && answer.plan && answer.plan.prediction;
  const shown = told ? between(told.iteration_low_s, told.iteration_high_s, seconds) : "";
  return shown && `${shown} in nine runs of ten`;
}

function gain(row) {
  return row.speedup_low ? between(row.speedup_low, row.speedup_high, times) : "";
}

// An interval whose ends differ by more than a factor of 2 supports no number with two digits.
function isVague(row) {
  return row.speedup_low > 1 && row.speedup_high > 2 * row.speedup_low;
}

function stockReason(answer) {
  const stock = answer.rows.find((row) => row.role === "stock");
  return stock ? stock.reason : "";
}

// If failures are simulated: shows the share of time that checkpoints, lost work and restarts leave for training.
function failures(answer) {
  if (!answer.goodput) return [];
  const named = [["plan", "the plan"], ["stock", "DeepSpeed alone, which waits for its checkpoints,"], ["no offload", "not offloading, with the same waits,"]];
  const told = named.filter(([role]) => answer.goodput.by_role[role]).map(([role, name]) => {
    const row = answer.goodput.by_role[role];
    return `${name} trains ${percent(row.goodput)} of the time (a checkpoint every ${count(row.interval_steps)} steps, ${seconds(row.stall_s)} of waiting)`;
  });
  return [`With a failure every ${duration(answer.goodput.mtbf_s)} and ${seconds(answer.goodput.restart_s)} to restart, each at its best interval: ${told.join("; ")}.`];
}
