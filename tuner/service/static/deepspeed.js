// Conversions between a DeepSpeed config and the controls.

const AUTO = "auto";
// The values that a trainer fills in from its own arguments.
const STARTED = {
  train_batch_size: AUTO, train_micro_batch_size_per_gpu: AUTO, gradient_accumulation_steps: AUTO, gradient_clipping: AUTO,
  bf16: { enabled: true }, zero_optimization: { offload_optimizer: { device: "cpu" } },
};
const BATCH = { micro_batch: "train_micro_batch_size_per_gpu", accumulation: "gradient_accumulation_steps" };

export function isDeepSpeed(content) {
  return "zero_optimization" in content || Object.keys(STARTED).some((key) => key in content);
}

// The config's own numbers, for the controls that show them.
export function numbersOf(config, gpus) {
  const found = {};
  for (const [control, key] of Object.entries(BATCH)) if (config[key] > 0) found[control] = config[key];
  const each = config.train_batch_size / gpus / (found.accumulation || 1);
  if (found.micro_batch === undefined && Number.isInteger(each)) found.micro_batch = each;
  const { stage } = config.zero_optimization || {};
  return [1, 2, 3].includes(stage) ? { ...found, zero_stage: stage } : found;
}

// The config of a request, with the batch size and the ZeRO stage of the controls.
export function withNumbers(config, state) {
  const asked = structuredClone(config);
  const total = asked.train_batch_size > 0;
  if (total) delete asked.train_batch_size; // it follows from the other two
  for (const [control, key] of Object.entries(BATCH)) if (asked[key] !== AUTO && (key in asked || total)) asked[key] = state[control];
  if (asked.zero_optimization && asked.zero_optimization.stage !== undefined) asked.zero_optimization.stage = state.zero_stage;
  return asked;
}

export function precisionOf(config) {
  const on = (name) => config[name] && (config[name].enabled === true || config[name].enabled === AUTO);
  if (!config || on("bf16") || on("bfloat16")) return "bf16";
  return on("fp16") ? "fp16" : "fp32";
}

export function withPrecision(config, precision) {
  const { bfloat16, ...made } = structuredClone(config || STARTED);
  for (const name of ["bf16", "fp16"]) {
    if (name === precision || made[name]) made[name] = { ...made[name], enabled: name === precision };
  }
  return made;
}

export function offloadOf(config) {
  const device = (name) => (((config || {}).zero_optimization || {})[name] || {}).device;
  if (device("offload_optimizer") === "nvme") return "nvme";
  return device("offload_param") && device("offload_param") !== "none" ? "parameters" : "optimizer";
}

export function withOffload(config, offload) {
  const made = structuredClone(config || STARTED);
  const zero = (made.zero_optimization = { ...made.zero_optimization });
  zero.offload_optimizer = { ...zero.offload_optimizer, device: offload === "nvme" ? "nvme" : "cpu" };
  if (offload !== "optimizer") zero.offload_param = { ...zero.offload_param, device: "cpu" };
  else delete zero.offload_param;
  return made;
}
