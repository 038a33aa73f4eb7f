// Starts the page: loads the lists of models and machines, builds the controls, and answers the first question.

import { here, go, keepHere } from "./address.js";
import { AnswerView } from "./answer.js";
import { call, takeToken } from "./api.js";
import { Controls } from "./controls.js";
import { WorkView } from "./jobs.js";

const at = (id) => document.getElementById(id);

function showView(name) {
  for (const view of ["what-if", "work"]) {
    at(view).hidden = view !== name;
    if (view === name) at(`tab-${view}`).setAttribute("aria-current", "page");
    else at(`tab-${view}`).removeAttribute("aria-current");
  }
}

// Takes a text that was pasted or opened. `name`: name of the file.
function take(controls, view, text, name = "") {
  if (!text.trim()) return;
  try {
    const content = JSON.parse(text);
    at("file-told").textContent = isPlan(content) ? view.show(content, name || "pasted plan") : controls.add(content, name.replace(/\.json$/, ""));
    at("pasted").value = "";
  } catch (error) {
    at("file-told").textContent = `${name || "The pasted text"} must be JSON that this page can use: ${error.message}`;
  }
}

// Returns true for a file that `tune plan` wrote.
function isPlan(content) {
  return Boolean(content) && typeof content === "object" && "subgroup_size" in content && ("ways" in content || "placement" in content);
}

// Loads a style sheet that did not arrive once more, because the page is unreadable without it.
function mendStyle() {
  if (getComputedStyle(document.documentElement).getPropertyValue("--bg")) return;
  const sheet = document.querySelector("link[href='/style.css']");
  sheet.replaceWith(sheet.cloneNode());
}

async function start() {
  mendStyle();
  takeToken();
  const [{ machines }, { models, workloads }] = await Promise.all([call("/machines"), call("/models")]);
  const controls = new Controls(machines, models, workloads, () => view.moved());
  const view = new AnswerView(controls);
  const work = new WorkView(() => view.again());
  const route = () => {
    const query = here();
    const isWork = ["view", "job", "run"].some((key) => query.has(key));
    showView(isWork ? "work" : "what-if");
    return isWork ? work.open(query) : view.open(query);
  };
  addEventListener("popstate", route);
  ["tab-work", "opened-close"].forEach((id) => keepHere(at(id)));
  at("tab-what-if").addEventListener("click", (event) => {
    event.preventDefault();
    go(view.at || controls.query());
  });
  at("file").addEventListener("change", async () => {
    const [file] = at("file").files;
    if (file) take(controls, view, await file.text(), file.name);
  });
  at("pasted").addEventListener("input", (event) => {
    if (event.inputType === "insertFromPaste") take(controls, view, at("pasted").value);
  });
  at("pasted").addEventListener("change", () => take(controls, view, at("pasted").value));
  at("own-file").addEventListener("click", () => {
    at("upload").open = true;
    at("pasted").focus();
  });
  at("config-gone").addEventListener("click", () => controls.addConfig(null));
  at("search").addEventListener("click", () => submit("plan", { ...controls.scenario(), robust: true }));
  at("search-configurations").addEventListener("click", () => submit("search", controls.search()));
  const presets = "Presets are estimates from data sheets and published runs. A profile of your machine (tune profile) is more accurate. On the one GPU that was measured so far (H200, a 1.3 B model), a plan took 0.55 s per iteration where 0.35 s had been predicted, and DeepSpeed alone took 1.38 s.";
  at("foot").textContent = [...workloads.map((w) => `The list of models also has ${w.name}, profiled on ${w.label}.`), presets].join(" ");
  await Promise.all([route(), work.start()]);
}

async function submit(kind, body) {
  try {
    const job = await call(`/jobs/${kind}`, { method: "POST", body });
    go(`job=${job.id}`);
  } catch (error) {
    at("status").textContent = error.message;
  }
}

start().catch((error) => {
  at("sentence").textContent = error.status === 401
    ? "This server needs a token. Open the address that tune serve printed, which ends with #token=..."
    : `The page cannot start: ${error.message}`;
});
