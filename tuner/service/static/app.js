// Starts the page: reads the catalogue, builds the controls, answers the first question.

import { AnswerView } from "./answer.js";
import { call, takeToken } from "./api.js";
import { Controls } from "./controls.js";
import { WorkView } from "./jobs.js";

const at = (id) => document.getElementById(id);

function showView(name) {
  for (const view of ["what-if", "work"]) {
    at(view).hidden = view !== name;
    at(`tab-${view}`).setAttribute("aria-pressed", String(view === name));
  }
}

async function readFile(controls) {
  const [file] = at("file").files;
  if (!file) return;
  try {
    const content = JSON.parse(await file.text());
    const kind = content && content.h2d_bytes_per_s ? "machine" : "model";
    const name = String(content.name || content._name_or_path || file.name.replace(/\.json$/, "")).slice(0, 60);
    controls.add(kind, name, content);
    at("file-told").textContent = `${name} is now the ${kind}.`;
  } catch (error) {
    at("file-told").textContent = `${file.name} must be JSON, but: ${error.message}`;
  }
}

async function start() {
  takeToken();
  at("tab-what-if").addEventListener("click", () => showView("what-if"));
  at("tab-work").addEventListener("click", () => showView("work"));
  const [{ machines }, { models, workloads }] = await Promise.all([call("/machines"), call("/models")]);
  let view = null;
  const controls = new Controls(machines, models, workloads, () => view.ask());
  view = new AnswerView(controls);
  at("file").addEventListener("change", () => readFile(controls));
  at("search").addEventListener("click", () => submit("plan", controls.scenario()));
  at("search-configurations").addEventListener("click", () => submit("search", controls.search()));
  at("foot").textContent = workloads.length ? `Opened with ${workloads[0].name}, profiled on ${workloads[0].label}. Presets are estimates from data sheets and published runs.` : "Presets are estimates from data sheets and published runs; a profile of your machine (tune profile) is the better source.";
  at("strange").textContent = controls.strange();
  at("strange").hidden = !controls.strange();
  await view.ask();
  await new WorkView().start();
}

async function submit(kind, body) {
  try {
    await call(`/jobs/${kind}`, { method: "POST", body });
    showView("work");
  } catch (error) {
    at("status").textContent = error.message;
  }
}

start().catch((error) => {
  at("sentence").textContent = error.status === 401
    ? "This server asks for a token: open the address that tune serve printed, with #token=..."
    : `The page cannot start: ${error.message}`;
});
