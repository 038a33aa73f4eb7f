// Numbers and names as texts, and HTML elements without markup in strings.

export const GIB = 2 ** 30;
export const ROLE_NAMES = { stock: "Stock", plan: "Plan", "no offload": "No offload" };

export function strategyName(row) {
  const name = row.label || row.strategy;
  return `${name[0].toUpperCase()}${name.slice(1)}${row.role === "plan" ? ", this plan" : ""}`;
}

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "unknown";
  if (value >= 100) return `${value.toFixed(0)} s`;
  if (value >= 0.9995) return `${value.toFixed(2)} s`;
  if (value >= 0.0995) return `${(value * 1e3).toFixed(0)} ms`;
  return `${(value * 1e3).toFixed(1)} ms`;
}

export function duration(value) {
  if (value >= 86400) return `${+(value / 86400).toFixed(1)} days`;
  return value >= 3600 ? `${+(value / 3600).toFixed(1)} h` : seconds(value);
}

export function gib(bytes) {
  const value = bytes / GIB;
  if (value < 0.995) return `${(bytes / 2 ** 20).toFixed(0)} MiB`;
  return `${value >= 99.95 ? value.toFixed(0) : value.toFixed(1)} GiB`;
}

export function count(value) {
  return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
}

export function params(value) {
  if (value >= 1e9) return `${(value / 1e9).toFixed(2)} B`;
  return `${+(value / 1e6).toFixed(1)} M`;
}

export function times(value) {
  return `${value >= 99.5 ? value.toFixed(0) : value.toFixed(value < 9.95 ? 2 : 1)}×`;
}

// An interval as text. Empty if its ends do not differ.
export function between(low, high, show) {
  return high - low > 1e-3 * high ? `${show(low)} to ${show(high)}` : "";
}

export function percent(value) {
  return `${(100 * value).toFixed(1)}%`;
}

// An element with text and children. Text is never parsed as HTML. Styles and handlers are not allowed as attributes.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// Shows a text beside the pointer, while it is on an element. The text must also be on the page for keyboards.
export function tip(host, textOf) {
  host.addEventListener("pointermove", (event) => {
    const text = textOf(event);
    if (!text) return hideTip();
    const box = tipBox();
    box.textContent = text;
    box.hidden = false;
    const [x, y] = [event.clientX + 14, event.clientY + 18];
    box.style.left = `${Math.max(4, Math.min(x, innerWidth - box.offsetWidth - 8))}px`;
    box.style.top = `${y + box.offsetHeight > innerHeight ? event.clientY - box.offsetHeight - 10 : y}px`;
  });
  for (const ended of ["pointerleave", "pointercancel"]) host.addEventListener(ended, hideTip);
}

function tipBox() {
  const found = document.querySelector(".tip");
  if (found) return found;
  document.body.append(element("div", { class: "tip", "aria-hidden": "true", hidden: true }));
  return tipBox();
}

function hideTip() {
  tipBox().hidden = true;
}

const SVG = "http://www.w3.org/2000/svg";

export function shape(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Draws into host at its width, now and whenever the width changes.
export function atWidth(host, draw) {
  let width = host.clientWidth;
  draw(width || 640);
  if (host.observer) host.observer.disconnect();
  host.observer = new ResizeObserver(() => {
    if (host.clientWidth === width) return;
    width = host.clientWidth;
    draw(width || 640);
  });
  host.observer.observe(host);
}

// Round steps for an axis: at most about `most` ticks from `start` to `end`.
export function ticks(end, most, start = 0) {
  if (!(end - start > 1e-300)) return [start]; // an interval of length 0, for which no step would reach the end
  const rough = (end - start) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) || power;
  const found = [];
  for (let i = Math.ceil(start / step); i * step <= end + (end - start) * 1e-4; i += 1) found.push(i * step);
  return found;
}
