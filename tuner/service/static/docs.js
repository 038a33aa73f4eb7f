// The page with all routes of the API. It shows the fields and the answer of each route, from openapi.json.

import { call, takeToken } from "./api.js";
import { element } from "./format.js";

const at = (id) => document.getElementById(id);

// Returns the schema that a reference names.
function resolved(schema, all) {
  const name = schema && schema.$ref && schema.$ref.split("/").pop();
  return name ? all.components.schemas[name] : schema || {};
}

// Returns a type in words: number, text, or one of several values.
function kind(schema, all) {
  const s = resolved(schema, all);
  const either = s.anyOf || s.oneOf;
  if (either) return [...new Set(either.map((one) => kind(one, all)))].join(" or ");
  if (s.enum) return s.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (s.const !== undefined) return JSON.stringify(s.const);
  if (s.type === "array") return `list of ${kind(s.items, all)}`;
  return schema && schema.$ref ? schema.$ref.split("/").pop() : s.type || "any";
}

// A description without backticks.
function plain(text) {
  return (text || "").replaceAll("`", "");
}

function limits(schema) {
  const s = schema.anyOf ? schema.anyOf[0] : schema;
  const told = [["minimum", "≥"], ["exclusiveMinimum", ">"], ["maximum", "≤"], ["exclusiveMaximum", "<"]].filter(([key]) => key in s).map(([key, sign]) => `${sign} ${s[key] >= 1e9 ? s[key].toExponential() : s[key]}`);
  if ("default" in schema && schema.default !== null) told.push(`default ${JSON.stringify(schema.default)}`);
  return told.join(", ");
}

function fields(schema, all) {
  const { properties, required = [], description } = resolved(schema, all);
  if (!properties) return element("p", { class: "hint" }, kind(schema, all));
  const rows = Object.entries(properties).map(([name, one]) => element("tr", {},
    element("th", { scope: "row" }, element("code", {}, name)), element("td", {}, kind(one, all)),
    element("td", {}, [required.includes(name) ? "must be given" : "", limits(one), plain(one.description)].filter(Boolean).join("; "))));
  return element("div", { class: "scroll", tabindex: 0 }, element("p", { class: "hint" }, plain(description)), element("table", { class: "strategies fields" }, element("tbody", {}, ...rows)));
}

function route(path, method, operation, all) {
  const body = operation.requestBody && operation.requestBody.content["application/json"];
  const good = operation.responses["200"] || operation.responses["201"];
  const parts = [element("p", {}, plain(operation.description || operation.summary))];
  if (operation.parameters) parts.push(element("p", { class: "hint" }, `Parameters: ${operation.parameters.map((one) => `${one.name} (${kind(one.schema, all)})`).join(", ")}`));
  if (body) parts.push(element("h3", {}, "Request"), fields(body.schema, all));
  for (const [type, content] of Object.entries(good.content || {})) {
    parts.push(element("h3", {}, `Answer, ${type}`), content.schema && type === "application/json" ? fields(content.schema, all) : element("p", { class: "hint" }, good.description || ""));
  }
  return element("details", { class: "panel use" }, element("summary", {}, element("code", {}, `${method.toUpperCase()} ${path}`)), ...parts);
}

async function start() {
  takeToken();
  const all = await call("/openapi.json");
  const routes = Object.entries(all.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, operation]) => route(path, method, operation, all)));
  at("routes").replaceChildren(...routes);
  at("told").textContent = `${routes.length} routes, version ${all.info.version}.`;
}

start().catch((error) => {
  at("told").textContent = error.status === 401 ? "This server needs a token. Open the address that tune serve printed." : error.message;
});
