// Pickers and sliders; their state is the page's URL.

import { element, gib } from "./format.js";

const GIB = 2 ** 30;
const HOURS = [1, 2, 4, 8, 12, 24, 48, 96, 168, 336, 720];

// key: of the URL and of the state. steps: the values a slider stops at. own: the machine's value.
// unit: what the number beside it counts; each: how much of the state's unit one of them is.
const SLIDERS = [
  { key: "micro_batch", where: "model", label: "Micro-batch", steps: [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64], start: 1, unit: "samples", each: 1, show: (v) => `${v} ${v === 1 ? "sample" : "samples"}` },
  { key: "sequence", where: "model", label: "Sequence", steps: [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072], start: 2048, unit: "tokens", each: 1, show: (v) => `${v.toLocaleString("en-US")} tokens` },
  { key: "accumulation", where: "model", label: "Accumulation", steps: [1, 2, 4, 8, 16, 32, 64], start: 1, unit: "micro-batches", each: 1, show: (v) => `${v}×` },
  { key: "gpus", where: "machine", label: "GPUs", steps: [1, 2, 4, 8, 16, 32, 64, 128, 256], start: 1, unit: "", each: 1, show: (v) => `${v}` },
  { key: "device_memory_bytes", where: "machine", label: "GPU memory", steps: [8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 256, 288].map((n) => n * GIB), own: "device_memory_bytes", unit: "GiB", each: GIB, show: gib },
  { key: "host_memory_bytes", where: "machine", label: "Host memory of a node", steps: [16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096].map((n) => n * GIB), own: "host_memory_bytes", unit: "GiB", each: GIB, show: gib },
  { key: "link_bytes_per_s", where: "machine", label: "Link, each way", steps: [2, 4, 6, 8, 10, 12, 16, 20, 25, 32, 40, 50, 64, 100, 200, 450].map((n) => n * 1e9), own: "link_bytes_per_s", unit: "GB/s", each: 1e9, show: (v) => `${(v / 1e9).toFixed(v < 1e10 ? 1 : 0)} GB/s` },
  { key: "mtbf_s", where: "machine", label: "Time between failures", steps: [null, ...HOURS.map((h) => h * 3600)], start: null, unit: "hours", each: 3600, show: (v) => (v === null ? "never fails" : v < 86400 ? `${v / 3600} h` : `${v / 86400} days`) },
];
const CHOICES = [
  { key: "zero_stage", where: "model", label: "ZeRO stage", values: { 3: "3: state, gradients, parameters", 2: "2: state and gradients", 1: "1: state" }, read: Number },
  { key: "keep_activations", where: "model", label: "Activations", values: { false: "computed again in backward", true: "kept" }, read: (text) => text === "true" },
  { key: "tensor_parallel", where: "machine", label: "Tensor parallelism", values: { 1: "none", 2: "2 GPUs share each layer", 4: "4 GPUs share each layer", 8: "8 GPUs share each layer" }, read: Number },
];
const PROFILED = ["micro_batch", "sequence", "accumulation", "gpus", ...CHOICES.map((c) => c.key)]; // fixed by a profile

export class Controls {
  constructor(machines, models, workloads, changed) {
    this.machines = new Map(machines.map((m) => [m.name, m]));
    this.models = models;
    this.workloads = workloads;
    this.changed = changed;
    this.uploaded = {}; // name -> a config.json or machine.json of this browser
    this.state = {};
    this.parts = {};
    this.taken = {}; // slider -> a value that an answer proposed
    this.unknown = []; // what the link asked for and this page could not take
    this.build();
    this.read(new URLSearchParams(location.search));
  }

  // What the service is asked.
  scenario() {
    const s = this.state;
    const workload = this.workload();
    const machine = this.uploaded[`machine ${s.machine}`] || s.machine;
    const asked = { machine };
    if (workload) asked.workload = workload.name;
    else asked.model = this.uploaded[`model ${s.model}`] || s.model;
    for (const slider of SLIDERS) {
      const value = s[slider.key];
      if (workload && PROFILED.includes(slider.key)) continue;
      if (value !== null && value !== undefined && value !== this.ownValue(slider)) asked[slider.key] = value;
    }
    for (const choice of workload ? [] : CHOICES) {
      if (s[choice.key] !== standard(choice)) asked[choice.key] = s[choice.key];
    }
    return asked;
  }

  // What a search of configurations is asked: the same samples per step, on as many GPUs at most.
  search() {
    const s = this.state;
    const asked = { ...this.scenario(), gpus: s.gpus, global_batch: s.micro_batch * s.accumulation * s.gpus };
    delete asked.mtbf_s;
    return asked;
  }

  workload() {
    return this.workloads.find((w) => w.name === this.state.model);
  }

  ownValue(slider) {
    if (!slider.own) return slider.start;
    return this.machines.get(this.state.machine)[slider.own];
  }

  steps(slider) {
    let steps = slider.steps;
    if (slider.key === "gpus") {
      const machine = this.machines.get(this.state.machine);
      steps = steps.filter((n) => n <= (machine.multi_node ? 256 : machine.gpus_per_node));
    }
    // The machine's own value, and one that an answer proposed.
    const more = [this.ownValue(slider), this.taken[slider.key]].filter((v) => v !== undefined && !steps.includes(v));
    return more.length ? [...new Set([...steps, ...more])].sort((a, b) => a - b) : steps;
  }

  build() {
    this.picker("model", "controls-model", "Model");
    this.picker("machine", "controls-machine", "Machine");
    CHOICES.forEach((choice) => this.choice(choice));
    for (const slider of SLIDERS) this.slider(slider);
  }

  choice(choice) {
    const select = element("select", { id: `c-${choice.key}` },
      ...Object.entries(choice.values).map(([value, text]) => element("option", { value }, text)));
    if (choice.key === "zero_stage") select.prepend(select.querySelector("option[value='3']"));
    this.parts[choice.key] = select;
    select.addEventListener("change", () => {
      this.state[choice.key] = choice.read(select.value);
      this.tell();
    });
    document.getElementById(`controls-${choice.where}`).append(
      element("div", { class: "control" }, element("label", { for: `c-${choice.key}` }, choice.label), select));
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
    const row = element("div", { class: "control" },
      element("span", { class: "row" }, element("label", { for: id }, slider.label), element("span", { class: "number" }, number, unit)), input);
    number.addEventListener("change", () => this.typed(slider, number.value));
    input.addEventListener("input", () => {
      this.state[slider.key] = this.steps(slider)[Number(input.value)];
      this.show(slider);
      this.tell();
    });
    this.parts[slider.key] = { input, number, unit, row };
    document.getElementById(`controls-${slider.where}`).append(row);
  }

  // A number beside a slider: exactly that, whether the slider stops there or not.
  typed(slider, text) {
    const value = text === "" && slider.start === null ? null : Math.round(Number(text) * slider.each);
    if (value !== null && !(value > 0)) this.show(slider);
    else this.take({ [slider.key]: value });
  }

  // From a URL; what it does not say, or says wrongly, is the default.
  read(query) {
    const firstWorkload = this.workloads[0];
    const models = [...this.workloads.map((w) => w.name), ...this.models];
    const model = query.get("model");
    this.state.model = models.includes(model) ? model : firstWorkload ? firstWorkload.name : "Llama 3 8B";
    if (model && model !== this.state.model) this.unknown.push(`the model “${model}”`);
    const machine = query.get("machine");
    const usual = this.workload() ? this.workload().machine : "h100-node";
    this.state.machine = this.machines.has(machine) ? machine : usual;
    if (machine && machine !== this.state.machine) this.unknown.push(`the machine “${machine}”`);
    for (const slider of SLIDERS) {
      const value = Number(query.get(slider.key));
      const usable = query.has(slider.key) && Number.isFinite(value) && value > 0;
      this.state[slider.key] = usable ? value : this.ownValue(slider);
      if (usable) this.taken[slider.key] = value;
      if (query.has(slider.key) && !usable) {
        this.unknown.push(`${slider.label.toLowerCase()} ${query.get(slider.key)}`);
      }
    }
    for (const choice of CHOICES) {
      const value = query.get(choice.key);
      this.state[choice.key] = value in choice.values ? choice.read(value) : standard(choice);
    }
    this.fill();
  }

  // A sentence about a link that cannot be shown as it was meant; empty: it can.
  strange() {
    const named = this.unknown.join(", ");
    return named ? `This link names ${named}, which this server does not offer (an upload stays in its browser): shown with the nearest it has.` : "";
  }

  fill() {
    const option = (name, text) => element("option", { value: name }, text || name);
    const measured = this.workloads.map((w) => option(w.name, `${w.name} (profiled)`));
    const own = Object.keys(this.uploaded).filter((n) => n.startsWith("model ")).map((n) => option(n.slice(6)));
    this.parts.model.replaceChildren(...measured, ...own, ...this.models.map((n) => option(n)));
    const machines = [...this.machines.values()].filter((m) => m.estimates || this.workload());
    this.parts.machine.replaceChildren(...machines.map((m) => option(m.name, machineText(m))));
    this.parts.model.value = this.state.model;
    this.parts.machine.value = this.state.machine;
    SLIDERS.forEach((slider) => this.show(slider));
    for (const choice of CHOICES) {
      this.parts[choice.key].value = String(this.state[choice.key]);
      this.parts[choice.key].disabled = Boolean(this.workload());
    }
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
    const fixed = Boolean(this.workload()) && PROFILED.includes(slider.key);
    const text = fixed ? "as profiled" : slider.show(this.state[slider.key]);
    const value = this.state[slider.key];
    number.value = value === null || fixed ? "" : String(+(value / slider.each).toFixed(1));
    number.placeholder = fixed ? "" : "never";
    unit.textContent = fixed ? text : slider.unit;
    input.setAttribute("aria-valuetext", text);
    input.disabled = number.disabled = fixed;
    row.classList.toggle("fixed", fixed);
  }

  // Another machine: its own memories and link; everything else stays.
  toMachine() {
    for (const slider of SLIDERS) if (slider.own) this.state[slider.key] = this.ownValue(slider);
    this.fill();
  }

  // A profiled workload belongs to the machine it was profiled on; estimates need another.
  toModel() {
    const workload = this.workload();
    const machine = this.machines.get(this.state.machine);
    if (workload && machine.name !== workload.machine) this.state.machine = workload.machine;
    else if (!workload && !machine.estimates) this.state.machine = "h100-node";
    else {
      this.fill();
      return;
    }
    this.toMachine();
  }

  add(kind, name, content) {
    this.uploaded[`${kind} ${name}`] = content;
    if (kind === "machine") this.machines.set(name, machineFacts(content));
    this.state[kind] = name;
    if (kind === "machine") this.toMachine();
    else this.toModel();
    this.tell();
  }

  query() {
    const query = new URLSearchParams({ model: this.state.model, machine: this.state.machine });
    for (const slider of SLIDERS) {
      const value = this.state[slider.key];
      if (value !== null && value !== this.ownValue(slider)) query.set(slider.key, value);
    }
    for (const choice of CHOICES) if (this.state[choice.key] !== standard(choice)) query.set(choice.key, this.state[choice.key]);
    return query.toString();
  }

  // Values that an answer proposes.
  take(changes) {
    this.taken = { ...this.taken, ...changes };
    for (const slider of SLIDERS) if (slider.key in changes) this.state[slider.key] = changes[slider.key];
    this.fill();
    this.tell();
  }

  tell() {
    history.replaceState(null, "", `?${this.query()}`);
    this.changed();
  }
}

function standard(choice) {
  return choice.key === "zero_stage" ? 3 : choice.key === "keep_activations" ? false : 1;
}

function machineText(machine) {
  return machine.device_name && machine.preset ? `${machine.name}: ${machine.device_name}` : machine.name;
}

function machineFacts(machine) {
  return {
    name: machine.name, device_name: machine.device_name || "", preset: false,
    gpus_per_node: machine.gpus_per_node || 1, multi_node: Boolean(machine.network_bytes_per_s),
    device_memory_bytes: machine.device_memory_bytes, host_memory_bytes: machine.host_memory_bytes,
    estimates: Boolean(machine.device_flops_per_s), link_bytes_per_s: machine.h2d_bytes_per_s.median,
  };
}

function nearest(steps, value) {
  const gaps = steps.map((s) => Math.abs((s || 0) - (value || 0)));
  return gaps.indexOf(Math.min(...gaps));
}
