// Calls of the service's routes, with JSON in both directions, the token if there is one, and errors as sentences.

const KEY = "ebbtide-token";

export function takeToken() {
  const match = location.hash.match(/^#token=([\w.~-]+)$/);
  if (match) {
    sessionStorage.setItem(KEY, match[1]);
    history.replaceState(null, "", location.pathname + location.search);
  }
}

export class ApiError extends Error {
  constructor(status, errors) {
    super(errors.map((e) => `${e.key && !e.rule.startsWith(e.key) ? `${e.key}: ` : ""}${e.rule}${e.value ? ` (got ${e.value})` : ""}`).join("; "));
    this.status = status;
    this.errors = errors;
  }
}

export async function call(path, { method = "GET", body, signal, raw = false } = {}) {
  const headers = {};
  const token = sessionStorage.getItem(KEY);
  if (token) headers.authorization = `Bearer ${token}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(`/api/v1${path}`, {
    method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!response.ok) throw new ApiError(response.status, await errorsOf(response));
  return raw ? response : response.json();
}

async function errorsOf(response) {
  try {
    const { errors } = await response.json();
    if (Array.isArray(errors)) return errors;
  } catch {
    // the body is not JSON: it is the page of a proxy, or the connection ended
  }
  return [{ key: "", rule: `the server answered ${response.status}`, value: null }];
}

// Calls `tell(kind, data)` for each server-sent event, and reconnects until the signal ends it. Uses fetch, because
// EventSource cannot send a token.
export async function listen(path, tell, signal) {
  for (let wait = 500; !signal.aborted; wait = Math.min(10000, wait * 2)) {
    try {
      const response = await call(path, { signal, raw: true });
      wait = 500;
      await tell("open", {});
      await readEvents(response.body.getReader(), tell);
    } catch (error) {
      if (signal.aborted) return;
      tell("lost", { message: error.message });
    }
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

async function readEvents(reader, tell) {
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const kind = block.match(/^event: (.*)$/m);
      const data = block.match(/^data: (.*)$/m);
      if (kind && data) tell(kind[1], JSON.parse(data[1]));
    }
  }
}

export function save(name, text, type = "application/json") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
