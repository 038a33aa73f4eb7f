// Selects and sliders. Their state is in the page's URL.

import { go } from "./address.js";
import { isDeepSpeed, numbersOf, offloadOf, precisionOf, withNumbers, withOffload, withPrecision } from "./deepspeed.js";
import { OF_A_JOB } from "./form.js";
import { element, gib, GIB } from "./format.js";

// The settings of a job come from the fields of the class `Job`, by `controls_of_a_job`. `about`: help. `profiled`: a
// profiled workload contains the setting. `unless`: value of another setting with which this one has no effect.

function counter(control) {
  const { unit, unset, standard, each } = control;
  const show = (v) => (v === null ? unset : unit === "%" ? `${+(v / each).toFixed(1)}%` : `${v.toLocaleString("en-US")} ${v === 1 ? unit.replace(/(ch)es$|s$/, "$1") : unit}`.trim());
  return { ...control, start: standard, show, brief: control.where.startsWith("more-") ? null : (v) => (v < 1024 ? `${v}` : `${+(v / 1024).toFixed(1)}k`) };
}

const HOURS = [1, 2, 4, 8, 12, 24, 48, 96, 168, 336, 720];

// key: name in the URL and in the state. steps: the values at which a slider stops. own: field with the machine's
// value. unit: unit of the number beside the slider. each: size of this unit in the state's unit. brief: short text
// for a sweep's axis. batch: true if a larger value trains more tokens per iteration. least: 0 if 0 is allowed.
const SLIDERS = [
  ...OF_A_JOB.filter((control) => control.steps).map(counter),
  { key: "device_memory_bytes", where: "machine", label: "GPU memory", steps: [8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 256, 288].map((n) => n * GIB), own: "device_memory_bytes", unit: "GiB", each: GIB, show: gib, brief: (v) => `${+(v / GIB).toFixed(1)}` },
  { key: "host_memory_bytes", where: "machine", label: "Host memory of a node", steps: [16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096].map((n) => n * GIB), own: "host_memory_bytes", unit: "GiB", each: GIB, show: gib, brief: (v) => `${+(v / GIB).toFixed(1)}` },
  { key: "link_bytes_per_s", where: "machine", label: "CPU-GPU link, one way", steps: [2, 4, 6, 8, 10, 12, 16, 20, 25, 32, 40, 50, 64, 100, 200, 450].map((n) => n * 1e9), own: "link_bytes_per_s", unit: "GB/s", each: 1e9, show: (v) => `${(v / 1e9).toFixed(v < 1e10 ? 1 : 0)} GB/s`, brief: (v) => `${+(v / 1e9).toFixed(1)}` },
  { key: "storage_bytes", where: "more-machine", label: "Storage for state, per node", steps: [null, ...[64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384].map((n) => n * GIB)], start: null, unit: "GiB", each: GIB, show: (v) => (v === null ? "none" : gib(v)) },
  { key: "endurance_bytes", where: "more-machine", label: "Rated endurance of the drives", steps: [null, ...[150, 300, 600, 1200, 3000, 7000, 14000, 28000].map((n) => n * 1e12)], start: null, unit: "TB", each: 1e12, show: (v) => (v === null ? "not known" : `${(v / 1e12).toLocaleString("en-US")} TB written`) },
  { key: "mtbf_s", most: 1e10, where: "more-machine", label: "Time between failures", steps: [null, ...HOURS.map((h) => h * 3600)], start: null, unit: "hours", each: 3600, show: (v) => (v === null ? "never" : v < 86400 ? `${v / 3600} h` : `${v / 86400} days`) },
];
// standard: the value that is not sent to the service. from, into: read it from a DeepSpeed config, and write it
// there.
const CHOICES = [
  ...OF_A_JOB.filter((control) => control.values),
  { key: "precision", where: "more-model", label: "Precision", values: [["bf16", "bf16"], ["fp16", "fp16"], ["fp32", "fp32"]], from: precisionOf, into: withPrecision },
  { key: "offload", where: "more-model", label: "DeepSpeed offloads", values: [["optimizer", "optimizer state"], ["parameters", "state and parameters"], ["nvme", "state (to NVMe) and parameters"]], from: offloadOf, into: withOffload },
];
const SAID = CHOICES.filter((c) => !c.into);
const UNSHOWN = ["subgroup_size"]; // settings without a control, because only rows of a search set them
// The page's own numbers, which no request contains: tokens to train on, and the price of a GPU for an hour.
const OWN_NUMBERS = ["tokens", "price"];
const OTHER_PARTS = ["model", "machine", "ds_config", "pin", "view", "job", "run", "from", "row"]; // of an address
const FIRST = { model: "Llama 3 8B", machine: "rtx4090" };
const MOST_IN_ADDRESS = 6000; // characters of a DeepSpeed config. A longer one stays in this browser

export class Controls {
  constructor(machines, models, workloads, changed) {
    this.machines = new Map(machines.map((m) => [m.name, m]));
    this.models = models;
    this.workloads = workloads;
    this.changed = changed;
    this.uploaded = {}; // name -> a config.json or machine.json uploaded in this browser
    this.state = {};
    this.parts = {};
    this.kept = {}; // settings of a job or a link without a control
    this.numbers = {}; // OWN_NUMBERS that the user has set
    this.taken = {}; // slider -> a value that an answer proposed
    this.pinned = null; // the address of the pinned scenario
    this.unknown = []; // parts of the link that this page does not know
    this.build();
    this.read(new URLSearchParams());
  }

  // The body of a request for a plan or an answer, without settings that have no effect, which the service refuses.
  scenario() {
    const s = this.state;
    const workload = this.workload();
    const asked = { machine: this.uploaded[`machine ${s.machine}`] || s.machine };
    if (workload) asked.workload = workload.name;
    else asked.model = this.uploaded[`model ${s.model}`] || s.model;
    for (const slider of SLIDERS) {
      const value = s[slider.key];
      if (this.fixed(slider)) continue;
      const said = slider.key === "gpus" || value !== this.ownValue(slider);
      if (value !== null && value !== undefined && said) asked[slider.key] = value;
    }
    for (const choice of SAID) {
      if (!this.fixed(choice) && s[choice.key] !== choice.standard) asked[choice.key] = s[choice.key];
    }
    if (s.ds_config && !workload) asked.ds_config = withNumbers(s.ds_config, s);
    const sent = { ...this.kept, ...asked };
    const idle = OF_A_JOB.filter((control) => this.idle(control)).map((control) => control.key);
    if (!sent.storage_bytes && offloadOf(s.ds_config) !== "nvme") idle.push("endurance_bytes");
    for (const key of idle) delete sent[key];
    return sent;
  }

  // The training job and the machine of a request that does not ask for a plan.
  job() {
    const { mtbf_s, endurance_bytes, ...job } = this.scenario();
    return job;
  }

  // The training job of a request about any machine.
  anyMachine() {
    const { machine, gpus, device_memory_bytes, host_memory_bytes, link_bytes_per_s, ...job } = this.job();
    return job;
  }

  // The address of the same training job on the machine of a row of `/cards`.
  queryAt({ machine, gpus }) {
    const query = new URLSearchParams(this.query());
    for (const key of ["device_memory_bytes", "host_memory_bytes", "link_bytes_per_s", "gpus"]) query.delete(key);
    query.set("machine", machine);
    if (gpus > 1 || gpus !== this.machines.get(machine).default_gpus) query.set("gpus", gpus);
    return query.toString();
  }

  // True if the profile fixes the choice.
  fixed(control) {
    return Boolean(this.workload()) && Boolean(control.into || control.profiled);
  }

  // True if another choice leaves this one without an effect.
  idle({ unless }) {
    return Boolean(unless) && this.state[unless.key] === unless.value;
  }

  // The body of a request for a search of configurations: the same number of samples per step, and at most the same
  // number of GPUs.
  search() {
    const s = this.state;
    return { ...this.job(), gpus: s.gpus, global_batch: s.micro_batch * s.accumulation * s.gpus };
  }

  workload() {
    return this.workloads.find((w) => w.name === this.state.model);
  }

  ownValue(slider) {
    if (slider.key === "gpus") return this.machines.get(this.state.machine).default_gpus;
    if (!slider.own) return slider.start;
    return this.machines.get(this.state.machine)[slider.own];
  }

  steps(slider) {
    let steps = slider.steps;
    if (slider.key === "gpus") {
      const machine = this.machines.get(this.state.machine);
      const most = Math.max(...this.family().map((m) => m.gpus_per_node));
      steps = steps.filter((n) => n <= (machine.multi_node ? 256 : most));
    }
    // Stops at the machine's own value, and at a value that an answer proposed.
    const more = [this.ownValue(slider), this.taken[slider.key]].filter((v) => v !== undefined && !steps.includes(v));
    return more.length ? [...new Set([...steps, ...more])].sort((a, b) => a - b) : steps;
  }

  // The presets with the same card on other hosts: rtx4090, rtx4090-x2, ... Of any other machine, only itself.
  family() {
    const { name } = this.machines.get(this.state.machine);
    const base = name.replace(/-x\d+$/, "");
    const found = [...this.machines.values()].filter((m) => m.preset && (m.name === base || m.name.replace(/-x\d+$/, "") === base));
    return found.some((m) => m.name === name) ? found.sort((a, b) => a.gpus_per_node - b.gpus_per_node) : [this.machines.get(name)];
  }

  // The settings with which a control has a value. More GPUs than a host has are on another host with the same card.
  with(control, value) {
    if (control.key !== "gpus") return { [control.key]: value };
    const [now, family] = [this.machines.get(this.state.machine), this.family()];
    const host = family.length > 1 && family.find((m) => m.gpus_per_node >= value);
    return host && host.name !== now.name ? { machine: host.name, gpus: value } : { gpus: value };
  }

  // Sets a control. The memory and the link of another host apply, except those that the user has set.
  put(control, value) {
    const { machine } = this.with(control, value);
    if (machine) this.toHost(machine);
    this.set(control, value);
  }

  toHost(name) {
    const own = SLIDERS.filter((s) => s.own && this.state[s.key] === this.ownValue(s));
    this.state.machine = name;
    for (const slider of own) this.state[slider.key] = this.ownValue(slider);
  }

  build() {
    this.picker("model", "controls-first", "Model to train");
    this.picker("machine", "controls-first", "On this machine");
    CHOICES.forEach((choice) => this.choice(choice));
    for (const slider of SLIDERS) this.slider(slider);
  }

  choice(choice) {
    const select = element("select", { id: `c-${choice.key}` },
      ...choice.values.map(([value, text]) => element("option", { value: String(value) }, text)));
    this.parts[choice.key] = select;
    select.addEventListener("change", () => {
      const [value] = choice.values[select.selectedIndex];
      if (choice.into) this.state.ds_config = choice.into(this.state.ds_config, value);
      else this.state[choice.key] = value;
      this.fill();
      this.tell();
    });
    document.getElementById(`controls-${choice.where}`).append(
      element("div", { class: "control", title: choice.about }, element("label", { for: `c-${choice.key}` }, choice.label), select));
  }

  picker(key, where, label) {
    const select = element("select", { id: `c-${key}` });
    this.parts[key] = select;
    select.addEventListener("change", () => {
      this.state[key] = select.value;
      if (key === "machine") this.toMachine();
      else this.toModel();
      this.tell();
    });
    document.getElementById(where).append(
      element("div", { class: "control" }, element("label", { for: `c-${key}` }, label), select));
  }

  slider(slider) {
    const id = `c-${slider.key}`;
    const input = element("input", { type: "range", id, min: 0, step: 1 });
    const number = element("input", { type: "number", id: `n-${slider.key}`, min: 0, step: "any", "aria-label": `${slider.label}, ${slider.unit}` });
    const unit = element("span", { class: "unit" }, slider.unit);
    const row = element("div", { class: "control", title: slider.about },
      element("span", { class: "row" }, element("label", { for: id }, slider.label), element("span", { class: "number" }, number, unit)), input);
    number.addEventListener("change", () => this.typed(slider, number.value));
    input.addEventListener("input", () => {
      this.put(slider, this.steps(slider)[Number(input.value)]);
      if (slider.key === "gpus") this.fill();
      else this.show(slider);
      this.tell();
    });
    this.parts[slider.key] = { input, number, unit, row };
    document.getElementById(`controls-${slider.where}`).append(row);
  }

  // The number beside a slider sets exactly this value, even if the slider does not stop there.
  typed(slider, text) {
    const exact = Number(text) * slider.each;
    const value = text === "" && slider.start === null ? null : slider.each < 1 ? +exact.toPrecision(12) : Math.round(exact);
    const most = this.most(slider);
    const wrong = value !== null && !isAllowed(slider, value) ? `must be a number ${slider.least === 0 ? "from 0 on" : "greater than 0"}` : value > most ? `must be at most ${slider.show(most)}${slider.key === "gpus" ? ": no host with more of this card is known" : ""}` : "";
    const { number } = this.parts[slider.key];
    number.setCustomValidity(wrong);
    number.setAttribute("aria-invalid", String(Boolean(wrong)));
    if (wrong) number.reportValidity();
    else this.take(this.with(slider, value));
  }

  // The largest value that the service accepts, or that the machine has.
  most(slider) {
    return slider.key === "gpus" ? Math.max(...this.steps(slider)) : slider.most || 1e18;
  }

  // Sets the state from a URL. Values that are missing or wrong get their defaults.
  read(query) {
    this.unknown = [];
    this.pinned = query.get("pin");
    const first = this.workloads.find((w) => w.first);
    const models = [...this.workloads.map((w) => w.name), ...this.names("model"), ...this.models];
    const model = query.get("model");
    this.state.model = models.includes(model) ? model : first ? first.name : FIRST.model;
    if (model && model !== this.state.model) this.unknown.push(`the model “${model}”`);
    const machine = query.get("machine");
    const usual = this.workload() ? this.workload().machine : FIRST.machine;
    this.state.machine = this.machines.has(machine) ? machine : usual;
    if (machine && machine !== this.state.machine) this.unknown.push(`the machine “${machine}”`);
    const known = [...OTHER_PARTS, ...SLIDERS.map((s) => s.key), ...SAID.map((c) => c.key), ...UNSHOWN, ...OWN_NUMBERS];
    this.unknown.push(...[...query.keys()].filter((key) => !known.includes(key)).map((key) => `the setting “${key}”`));
    this.state.ds_config = this.readConfig(query.get("ds_config"));
    for (const slider of SLIDERS) {
      const value = Number(query.get(slider.key));
      const usable = query.has(slider.key) && Number.isFinite(value) && isAllowed(slider, value);
      if (query.has(slider.key) && !usable) this.unknown.push(`${slider.label} “${query.get(slider.key)}”`);
      this.set(slider, usable ? value : null);
    }
    this.numbers = {};
    for (const key of OWN_NUMBERS) if (Number(query.get(key)) > 0) this.numbers[key] = Number(query.get(key));
    for (const choice of SAID) {
      const found = choice.values.find(([value]) => String(value) === query.get(choice.key));
      if (query.has(choice.key) && !found) this.unknown.push(`${choice.label} “${query.get(choice.key)}”`);
      this.state[choice.key] = found ? found[0] : choice.standard;
    }
    this.keep((key) => {
      const text = query.get(key);
      return ["true", "false"].includes(text) ? text === "true" : text === null ? undefined : Number(text);
    });
    this.fill();
  }

  readConfig(text) {
    try {
      return text ? Object(JSON.parse(text)) : null;
    } catch {
      this.unknown.push("a DeepSpeed config that is cut off");
      return null;
    }
  }

  // Sets the state to the settings of a job.
  load(asked, pinned = null) {
    this.pinned = pinned;
    const named = (kind, source, known) => {
      if (typeof source === "string") return source;
      const name = String(source.name || source._name_or_path || "a model").slice(0, 60);
      if (!known(name)) this.keepUpload(kind, name, source);
      return name;
    };
    this.unknown = [];
    const { workload } = asked;
    this.state.machine = named("machine", asked.machine || "h100-node", (name) => this.machines.has(name));
    if (!this.machines.has(this.state.machine)) throw new Error(`The machine “${this.state.machine}” is no longer on this server`);
    this.state.model = workload ? workload.name || workload : named("model", asked.model, (name) => this.models.includes(name));
    if (workload && !this.workload()) throw new Error(`The profile “${this.state.model}” is no longer on this server`);
    this.state.ds_config = asked.ds_config || null;
    for (const slider of SLIDERS) this.set(slider, asked[slider.key] ?? null);
    for (const choice of SAID) this.state[choice.key] = asked[choice.key] ?? choice.standard;
    this.keep((key) => asked[key]);
    this.fill();
  }

  // Keeps those settings of a question that have no control.
  keep(valueOf) {
    const asked = UNSHOWN.map((key) => [key, valueOf(key)]);
    this.kept = Object.fromEntries(asked.filter(([, value]) => typeof value === "boolean" || Number.isFinite(value)));
  }

  // Sets a slider to a value, which need not be one of its stops. null: the default.
  set(slider, value) {
    this.state[slider.key] = value === null ? this.ownValue(slider) : value;
    if (value !== null) this.taken[slider.key] = value;
  }

  keepUpload(kind, name, content) {
    this.uploaded[`${kind} ${name}`] = content;
    if (kind === "machine") this.machines.set(name, machineFacts(content));
  }

  names(kind) {
    return Object.keys(this.uploaded).filter((n) => n.startsWith(`${kind} `)).map((n) => n.slice(kind.length + 1));
  }

  // Returns what a link names and this server does not have, or an empty string.
  missing() {
    const named = new Intl.ListFormat("en").format(this.unknown);
    return named && `It names ${named}, which this server does not have.`;
  }

  // Returns a sentence about the settings that have no control, or an empty string.
  strange() {
    const kept = Object.entries(this.kept).map(([key, value]) => `${key} ${value}`).join(", ");
    return kept && `These settings of the question have no control on this page: ${kept}.`;
  }

  fill() {
    const option = (name, text) => element("option", { value: name }, text || name);
    const measured = this.workloads.map((w) => option(w.name, `${w.name} (profiled)`));
    this.parts.model.replaceChildren(...measured, ...this.names("model").map((n) => option(n)), ...this.models.map((n) => option(n)));
    const machines = [...this.machines.values()].filter((m) => m.estimates || this.workload());
    const groups = new Map();
    for (const machine of machines) {
      const group = groupOf(machine);
      groups.set(group, [...(groups.get(group) || []), option(machine.name, machineText(machine))]);
    }
    this.parts.machine.replaceChildren(...GROUPS_OF_MACHINES.filter((g) => groups.has(g)).map((g) => element("optgroup", { label: g }, ...groups.get(g))));
    this.parts.model.value = this.state.model;
    this.parts.machine.value = this.state.machine;
    SLIDERS.forEach((slider) => this.show(slider));
    const { ds_config: config } = this.state;
    for (const choice of CHOICES) {
      this.parts[choice.key].value = String(choice.from ? choice.from(config) : this.state[choice.key]);
      this.parts[choice.key].disabled = this.fixed(choice) || this.idle(choice);
    }
    document.getElementById("config").hidden = !config;
    document.getElementById("config-keys").textContent = !config ? "" : this.workload() ? "not used, because a profiled workload contains its own settings" : Object.keys(config).join(", ");
    for (const where of ["more-model", "more-machine"]) {
      if (this.changedIn(where)) document.getElementById(`controls-${where}`).parentElement.open = true;
    }
  }

  // Every control with its value, as texts.
  facts() {
    const { state } = this;
    const config = state.ds_config;
    return [
      ["Model", state.model], ["Machine", state.machine],
      ...SLIDERS.map((s) => [s.label, this.fixed(s) ? "as profiled" : s.show(state[s.key])]),
      ...CHOICES.map((c) => [c.label, c.values.find(([value]) => value === (c.from ? c.from(config) : state[c.key]))[1]]),
      ["DeepSpeed config", config ? JSON.stringify(config) : "none"],
      ...UNSHOWN.map((key) => [key, key in this.kept ? String(this.kept[key]) : "usual"]),
    ];
  }

  // The sliders that a sweep can vary, and the stops of a slider.
  sweepable() {
    return SLIDERS.filter((s) => s.brief && !this.fixed(s) && !this.parts[s.key].row.hidden);
  }

  // Returns true if a control there does not have its usual value.
  changedIn(where) {
    const { state } = this;
    return SLIDERS.some((s) => s.where === where && state[s.key] !== this.ownValue(s))
      || SAID.some((c) => c.where === where && state[c.key] !== c.standard)
      || (where === "more-model" && Boolean(state.ds_config));
  }

  show(slider) {
    const { input, number, unit, row } = this.parts[slider.key];
    const steps = this.steps(slider);
    let index = steps.indexOf(this.state[slider.key]);
    if (index < 0) {
      index = nearest(steps, this.state[slider.key]);
      this.state[slider.key] = steps[index];
    }
    input.max = steps.length - 1;
    input.value = index;
    const fixed = this.fixed(slider);
    const text = fixed ? "as profiled" : slider.show(this.state[slider.key]);
    const value = this.state[slider.key];
    number.setCustomValidity("");
    number.setAttribute("aria-invalid", "false");
    number.value = value === null || fixed ? "" : String(+(value / slider.each).toFixed(1));
    number.placeholder = fixed || slider.start !== null ? "" : slider.show(null);
    unit.textContent = fixed ? text : slider.unit;
    input.setAttribute("aria-valuetext", text);
    input.disabled = number.disabled = fixed || this.idle(slider);
    row.classList.toggle("fixed", fixed);
    // Without a GPU, the emulated GPU's memory is a part of the host's memory.
    row.hidden = slider.key === "device_memory_bytes" && this.machines.get(this.state.machine).unified_memory;
  }

  // After a change of the machine, takes its memory sizes, its link and its number of GPUs. All other settings stay.
  toMachine() {
    for (const slider of SLIDERS) if (slider.own || slider.key === "gpus") this.state[slider.key] = this.ownValue(slider);
    this.fill();
  }

  // A profiled workload needs the machine that it was profiled on, and other models need another machine.
  toModel() {
    const workload = this.workload();
    const machine = this.machines.get(this.state.machine);
    if (workload && machine.name !== workload.machine) this.state.machine = workload.machine;
    else if (!workload && !machine.estimates) this.state.machine = FIRST.machine;
    else {
      this.fill();
      return;
    }
    this.toMachine();
  }

  // Takes a pasted or opened JSON object. Its kind follows from its content. Returns a sentence about it.
  add(content, name) {
    if (content === null || typeof content !== "object" || Array.isArray(content)) throw new Error("it must be an object, as in config.json");
    if (isDeepSpeed(content)) return this.addConfig(content);
    if (content.layers && content.subgroups) throw new Error("this is a profiled workload. To show it, start the server with tune serve --show FOLDER");
    const kind = content.h2d_bytes_per_s ? "machine" : "model";
    const called = String(content.name || content._name_or_path || name || "pasted").slice(0, 60);
    this.keepUpload(kind, called, content);
    this.state[kind] = called;
    if (kind === "machine") this.toMachine();
    else this.toModel();
    this.tell();
    return `${called} is now the ${kind}.`;
  }

  addConfig(config) {
    this.state.ds_config = config;
    const numbers = config && numbersOf(config, this.state.gpus);
    if (numbers && numbers.zero_stage) this.state.zero_stage = numbers.zero_stage;
    this.take(numbers || {});
    return this.workload() ? "The DeepSpeed config is used after you choose a model. A profiled workload contains its own settings." : "The DeepSpeed config is now used.";
  }

  query() {
    const query = new URLSearchParams({ model: this.state.model, machine: this.state.machine });
    for (const slider of SLIDERS) {
      const value = this.state[slider.key];
      const said = slider.key === "gpus" ? value > 1 || value !== this.ownValue(slider) : value !== this.ownValue(slider);
      if (value !== null && said) query.set(slider.key, value);
    }
    for (const choice of SAID) if (this.state[choice.key] !== choice.standard) query.set(choice.key, this.state[choice.key]);
    for (const [key, value] of Object.entries(this.kept)) query.set(key, value);
    const config = this.state.ds_config ? JSON.stringify(this.state.ds_config) : "";
    if (config && config.length < MOST_IN_ADDRESS) query.set("ds_config", config);
    for (const [key, value] of Object.entries(this.numbers)) query.set(key, value);
    if (this.pinned) query.set("pin", this.pinned);
    return query.toString();
  }

  // Takes the values that an answer proposes. The browser's Back undoes this.
  take(changes) {
    this.unknown = [];
    if (changes.machine) this.toHost(changes.machine);
    for (const slider of SLIDERS) if (slider.key in changes) this.set(slider, changes[slider.key]);
    for (const choice of SAID) if (choice.key in changes) this.state[choice.key] = changes[choice.key] ?? choice.standard;
    this.keep((key) => (key in changes ? changes[key] : this.kept[key]));
    this.fill();
    go(this.query());
  }

  // Sets a number of the page's own, about which the server is not asked.
  own(key, value) {
    if (value > 0) this.numbers[key] = value;
    else delete this.numbers[key];
  }

  tell() {
    this.unknown = [];
    history.replaceState(null, "", `?${this.query()}`);
    this.changed();
  }
}

const GROUPS_OF_MACHINES = ["Measured and uploaded", "GeForce and RTX", "Data center"];

function groupOf(machine) {
  if (!machine.preset) return GROUPS_OF_MACHINES[0];
  return /RTX/.test(machine.device_name) ? GROUPS_OF_MACHINES[1] : GROUPS_OF_MACHINES[2];
}

// A preset by its card, with the number of cards where a host has several.
export function machineText(machine, host = "host with") {
  if (!machine.preset || !machine.device_name) return machine.name;
  const card = machine.device_name.replace(/^NVIDIA (GeForce )?/, "");
  if (machine.default_gpus > 1) return `${machine.default_gpus} × ${card}`;
  return machine.gpus_per_node > 1 ? `${card}, ${host} ${machine.gpus_per_node}` : card;
}

function machineFacts(machine) {
  return {
    name: machine.name, device_name: machine.device_name || "", preset: false, default_gpus: 1,
    gpus_per_node: machine.gpus_per_node || 1, multi_node: Boolean(machine.network_bytes_per_s),
    device_memory_bytes: machine.device_memory_bytes, host_memory_bytes: machine.host_memory_bytes,
    unified_memory: Boolean(machine.unified_memory), estimates: Boolean(machine.device_flops_per_s), link_bytes_per_s: machine.h2d_bytes_per_s.median,
  };
}

function isAllowed(slider, value) {
  return value > 0 || (value === 0 && slider.least === 0);
}

function nearest(steps, value) {
  const gaps = steps.map((s) => Math.abs((s || 0) - (value || 0)));
  return gaps.indexOf(Math.min(...gaps));
}
