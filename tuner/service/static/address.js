// The page's address: its query names a view, a job, a run, or the scenario that is shown.

import { element } from "./format.js";

export function here() {
  return new URLSearchParams(location.search);
}

// Goes to a new address, from which the browser's Back returns to the old one.
export function go(query) {
  history.pushState(null, "", `?${query}`);
  dispatchEvent(new Event("popstate"));
}

// A link within the page. With a modifier key, it opens in a new tab or window like any other link.
export function link(query, ...content) {
  const made = element("a", { href: `?${query}` }, ...content);
  keepHere(made);
  return made;
}

export function keepHere(anchor) {
  anchor.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    go(new URL(anchor.href).search.slice(1));
  });
}
