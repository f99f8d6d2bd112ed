// Requests to the server that this page came from, with the key that the person gave.

const KEY = "headrace-key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = () => sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";

/** Keep the key in this tab, or in this browser. */
export function keepKey(value, remember) {
  sessionStorage.removeItem(KEY);
  localStorage.removeItem(KEY);
  if (value) (remember ? localStorage : sessionStorage).setItem(KEY, value);
}

let askForKey = async () => false;
/** `ask(refusal)` opens the dialog; it resolves to whether there is another key to try. */
export const onRefusal = ask => (askForKey = ask);

// Relative, so that a proxy's prefix stays.
async function send(path, body, signal, ownKey) {
  for (;;) {
    const sent = ownKey || key();
    const headers = sent ? { authorization: `Bearer ${sent}` } : {};
    const options = { headers, signal, cache: "no-store", credentials: "same-origin" };
    if (body !== undefined) {
      headers["content-type"] = "application/json";
      Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    }
    const response = await fetch(path, options);
    if (response.ok) return response;
    const message = response.status === 401 ? "The server does not take this key." : await reason(response);
    if (response.status !== 401 || ownKey || !(await askForKey(message)))
      throw new ApiError(response.status, message);
  }
}

async function reason(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    return body.error?.message ?? body.message ?? body.error ?? text;
  } catch {
    return text.slice(0, 500) || `status ${response.status}`;
  }
}

export const read = async path => (await send(path)).json();
export const readText = async path => (await send(path)).text();
/** `ownKey` is sent instead of the kept key. */
export const post = async (path, body, ownKey) => (await send(path, body, undefined, ownKey)).json();

/** The JSON events of a stream, until `[DONE]`. */
export async function* events(path, body, signal) {
  const response = await send(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError(0, "The connection ended before the answer did.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.code ?? 0, event.error.message);
      yield event;
    }
  }
}
