// Numbers as people read them, names as people know them, and elements without markup.

export function strategyName(row) {
  const name = row.label || row.strategy;
  return row.role === "plan" ? `${name}, this plan` : name[0].toUpperCase() + name.slice(1);
}

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "unknown";
  if (value >= 100) return `${value.toFixed(0)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  if (value >= 0.0995) return `${(value * 1e3).toFixed(0)} ms`;
  return `${(value * 1e3).toFixed(1)} ms`;
}

export function duration(value) {
  if (value >= 86400) return `${+(value / 86400).toFixed(1)} days`;
  return value >= 3600 ? `${+(value / 3600).toFixed(1)} h` : seconds(value);
}

export function gib(bytes) {
  const value = bytes / 2 ** 30;
  if (value < 0.995) return `${(bytes / 2 ** 20).toFixed(0)} MiB`;
  return `${value >= 99.95 ? value.toFixed(0) : value.toFixed(1)} GiB`;
}

export function count(value) {
  return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
}

export function params(value) {
  if (value >= 1e9) return `${(value / 1e9).toFixed(2)} B`;
  return `${(value / 1e6).toFixed(1)} M`;
}

export function times(value) {
  return `${value >= 99.5 ? value.toFixed(0) : value.toFixed(value < 9.95 ? 2 : 1)}×`;
}

export function percent(value) {
  return `${(100 * value).toFixed(1)}%`;
}

// An element with text and children; text is always text. Attributes: no style, no handlers.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

export function shape(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Round steps for an axis: at most `most` ticks from 0 to `end`.
export function ticks(end, most) {
  if (!(end > 1e-300)) return [0]; // nothing lasts: no step could ever reach the end
  const rough = end / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) || power;
  const found = [];
  for (let i = 0; i * step <= end * 1.0001; i += 1) found.push(i * step);
  return found;
}
