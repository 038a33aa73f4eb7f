// Where the page is: its query names a view, a job, a run, or the scenario that is asked.

import { element } from "./format.js";

export function here() {
  return new URLSearchParams(location.search);
}

// A new place, with the old one behind the browser's Back.
export function go(query) {
  history.pushState(null, "", `?${query}`);
  dispatchEvent(new Event("popstate"));
}

// A link within the page; with a key held it opens as any link does.
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
