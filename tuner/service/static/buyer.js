// What a buyer asks: hours and cost for a number of tokens, and the machines side by side.

import { link } from "./address.js";
import { call } from "./api.js";
import { chosen } from "./compare.js";
import { machineText } from "./controls.js";
import { count, duration, element, gib, seconds } from "./format.js";

const BILLION = 1e9;
const PRICES = "ebbtide-prices"; // in the browser's storage: card -> price of a GPU for an hour
const AT_ONCE = 3; // machines of one request, so that rows appear one after the other
const at = (id) => document.getElementById(id);
// Columns: title, value to sort by, text.
const COLUMNS = [
  ["Machine", (row) => row.text],
  ["Tokens/s", (row) => row.tokens_per_s, count],
  ["Iteration", (row) => row.iteration_s, seconds],
  ["Time", (row) => row.time_s, duration],
  ["Price", (row) => row.price], // of a GPU for an hour, an input
  ["Cost", (row) => row.cost, count],
  ["GPU memory", (row) => row.device_peak_bytes, gib],
  ["Host memory", (row) => row.host_peak_bytes, gib],
  ["Way to train", (row) => row.way],
];

export class Buyer {
  constructor(controls) {
    this.controls = controls;
    this.rows = [];
    this.sort = { column: "Tokens/s", down: true };
    this.prices = storedPrices();
    at("n-tokens").addEventListener("input", () => this.train(Number(at("n-tokens").value) * BILLION));
    at("n-price").addEventListener("input", () => this.price(this.card, Number(at("n-price").value)));
    at("cards").addEventListener("toggle", () => this.compare());
  }

  train(tokens) {
    this.controls.own("tokens", tokens);
    this.address();
    this.tell();
    this.draw();
  }

  // Sets the price of a card. The page's address has that of the card of the answer.
  price(card, value) {
    if (value > 0) this.prices[card] = value;
    else delete this.prices[card];
    try {
      localStorage.setItem(PRICES, JSON.stringify(this.prices));
    } catch {
      // without storage, prices are kept until the page is closed
    }
    if (card === this.card) this.controls.own("price", value);
    this.address();
    this.fill();
    this.tell();
    this.drawCosts();
  }

  // Only after an input of the user, because an answer may come while the page shows a job.
  address() {
    history.replaceState(null, "", `?${this.controls.query()}`);
  }

  get tokens() {
    return this.controls.numbers.tokens || BILLION;
  }

  show(answer) {
    this.answer = answer;
    const [{ numbers }, card] = [this.controls, answer.machine.device_name];
    if (numbers.price && card !== this.card) this.prices[card] = numbers.price;
    this.card = card;
    this.controls.own("price", this.prices[card]);
    this.fill();
    this.tell();
    this.compare();
  }

  fill() {
    if (document.activeElement !== at("n-tokens")) at("n-tokens").value = this.tokens / BILLION;
    if (document.activeElement !== at("n-price")) at("n-price").value = this.prices[this.card] || "";
  }

  // The sentence about the answer on the page.
  tell() {
    const row = chosen(this.answer);
    // The rows are sorted: the first is DeepSpeed alone at its best.
    const stock = this.answer.rows.find((other) => ["stock", "best stock"].includes(other.role) && other.fits);
    at("cost").hidden = !row || !row.tokens_per_s;
    at("cards").hidden = Boolean(this.controls.workload());
    if (at("cost").hidden) return;
    const gpus = this.answer.workload.ranks_per_node * this.answer.workload.nodes;
    const took = (one) => this.tokens / one.tokens_per_s;
    const price = this.prices[this.card];
    const costs = (one) => count(this.costOf({ ...one, gpus, device_name: this.card }));
    at("cost-time").textContent = duration(took(row));
    at("cost-stock").textContent = stock && stock !== row ? `, and ${duration(took(stock))} with DeepSpeed alone` : "";
    at("cost-total").textContent = !price ? ". Enter your price to see the cost." : `: ${costs(row)} in all${stock && stock !== row ? `, and ${costs(stock)} with DeepSpeed alone` : ""}.`;
  }

  // Asks for the machines a few at a time, while the table is open.
  async compare() {
    if (!at("cards").open || !this.answer || this.controls.workload()) return;
    const asked = this.controls.anyMachine();
    if (JSON.stringify(asked) === this.asked) {
      this.draw();
      return;
    }
    if (this.asking) this.asking.abort();
    const { signal } = (this.asking = new AbortController());
    this.asked = JSON.stringify(asked);
    this.rows = [];
    const names = [...this.controls.machines.values()].filter((m) => m.estimates && !this.controls.uploaded[`machine ${m.name}`]).map((m) => m.name);
    try {
      for (let n = 0; n < names.length; n += AT_ONCE) {
        at("cards-told").textContent = `${n} of ${names.length} machines ...`;
        const { rows } = await call("/cards", { method: "POST", body: { ...asked, machines: names.slice(n, n + AT_ONCE) }, signal });
        this.rows.push(...rows);
        this.draw();
      }
      at("cards-told").textContent = "";
    } catch (error) {
      if (error.name === "AbortError") return;
      this.asked = null;
      at("cards-told").textContent = `The machines cannot be compared: ${error.message}`;
    }
  }

  draw() {
    if (!this.rows.length) return;
    const shown = this.rows.map((row) => ({
      ...row, text: machineText(this.controls.machines.get(row.machine), "one of"),
      time_s: row.tokens_per_s ? this.tokens / row.tokens_per_s : null, price: this.prices[row.device_name], cost: this.costOf(row),
      way: { plan: "offload with a plan", "no offload": "no offload" }[row.role] || row.reason,
    }));
    const { column, down } = this.sort;
    const [, valueOf] = COLUMNS.find(([name]) => name === column);
    shown.sort((a, b) => compared(valueOf(a), valueOf(b), down));
    const head = element("tr", {}, ...COLUMNS.map(([name]) => this.head(name)));
    const body = shown.map((row) => this.line(row));
    const { dataset, parentElement } = document.activeElement;
    const priced = document.activeElement.matches("#cards-table input") && parentElement.parentElement.dataset.machine;
    at("cards-table").replaceChildren(element("table", { class: "strategies blocks" }, element("thead", {}, head), element("tbody", {}, ...body)));
    if (dataset.column) at("cards-table").querySelector(`[data-column="${dataset.column}"]`).focus();
    if (priced) this.lineOf(priced).querySelector("input").focus();
  }

  costOf(row) {
    const price = this.prices[row.device_name];
    return price && row.tokens_per_s ? (this.tokens / row.tokens_per_s / 3600) * row.gpus * price : null;
  }

  // Fills in prices and costs without a new order of the rows, so that an input keeps its place.
  drawCosts() {
    for (const row of this.rows) {
      const line = this.lineOf(row.machine);
      const cost = this.costOf(row);
      line.querySelector("[data-name=Cost]").textContent = cost === null ? "–" : count(cost);
      const input = line.querySelector("input");
      if (document.activeElement !== input) input.value = this.prices[row.device_name] || "";
    }
  }

  lineOf(machine) {
    return at("cards-table").querySelector(`tr[data-machine="${CSS.escape(machine)}"]`);
  }

  priceInput(row) {
    const input = element("input", { type: "number", min: 0, step: "any", placeholder: "price", "aria-label": `Price of one GPU of ${row.text} for an hour` });
    input.value = row.price || "";
    input.addEventListener("input", () => this.price(row.device_name, Number(input.value)));
    return element("td", { class: "number", "data-name": "Price" }, input);
  }

  head(name) {
    const { column, down } = this.sort;
    const button = element("button", { type: "button", class: "sort", "data-column": name }, name, column === name ? (down ? " ↓" : " ↑") : "");
    button.addEventListener("click", () => {
      this.sort = { column: name, down: column === name ? !down : name === "Tokens/s" };
      this.draw();
    });
    const isText = ["Machine", "Way to train"].includes(name);
    return element("th", { scope: "col", class: isText ? null : "number", "aria-sort": column === name ? (down ? "descending" : "ascending") : null }, button);
  }

  line(row) {
    const here = row.machine === this.controls.state.machine;
    const cells = COLUMNS.slice(1).map(([name, valueOf, show]) => {
      if (name === "Price") return this.priceInput(row);
      const value = valueOf(row);
      return element("td", { class: show ? "number" : "fits", "data-name": name }, value === null || value === undefined ? "–" : show ? show(value) : value);
    });
    return element("tr", { class: `${here ? "chosen" : ""} ${row.role ? "" : "unfit"}`.trim(), "data-machine": row.machine },
      element("th", { scope: "row" }, link(this.controls.queryAt(row), row.text)), ...cells);
  }
}

function storedPrices() {
  try {
    return Object(JSON.parse(localStorage.getItem(PRICES)));
  } catch {
    return {};
  }
}

// Rows without a value are last in both directions.
function compared(a, b, down) {
  const none = (value) => value === null || value === undefined;
  if (none(a) || none(b)) return none(a) - none(b);
  const order = typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
  return down ? -order : order;
}
