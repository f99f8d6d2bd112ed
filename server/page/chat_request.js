// What is sent to /v1/chat/completions, and the same request as a program.

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed",
  "repetition_penalty", "presence_penalty", "frequency_penalty",
];
// Fields that OpenAI's client does not name.
const EXTRA = new Set(["top_k", "min_p", "repetition_penalty", "chat_template_kwargs"]);

/** The request that continues `messages`, nodes of a conversation. Throws if a field is not JSON. */
export function chatRequest(settings, messages, model) {
  const body = { model, messages: messages.filter(hasContent).map(asMessage) };
  if (settings.system?.trim()) body.messages.unshift({ role: "system", content: settings.system });
  for (const name of NUMBERS) if (settings[name]) body[name] = Number(settings[name]);
  if (settings.stop) body.stop = settings.stop.split("\n").filter(Boolean);
  if (settings.thinking) body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  const tools = parsed(settings, "tools", "Tools");
  if (tools?.length) body.tools = tools;
  const schema = parsed(settings, "schema", "JSON schema");
  if (schema)
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  return body;
}

function parsed(settings, name, label) {
  if (!settings[name]?.trim()) return null;
  try {
    return JSON.parse(settings[name]);
  } catch (error) {
    throw Object.assign(new Error(`${label}: ${error.message}`), { field: name });
  }
}

// An answer that failed before its first token has nothing to send.
const hasContent = node => node.role !== "assistant" || node.text || node.calls?.length;

function asMessage(node) {
  if (node.role === "tool") return { role: "tool", tool_call_id: node.callId, content: node.text };
  const images = (node.images ?? []).map(url => ({ type: "image_url", image_url: { url } }));
  const content = images.length ? [...images, { type: "text", text: node.text }] : node.text;
  if (!node.calls?.length) return { role: node.role, content };
  const calls = node.calls.map(({ id, name, arguments: given }) => ({
    id, type: "function", function: { name, arguments: given },
  }));
  return { role: "assistant", content: node.text || null, tool_calls: calls };
}

const address = () => new URL("v1", document.baseURI.replace(/[?#].*/, "")).href;

export function asCurl(body, hasKey) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const key = hasKey ? ` \\\n  -H "Authorization: Bearer $HEADRACE_API_KEY"` : "";
  return `curl ${address()}/chat/completions${key} \\\n  -H 'Content-Type: application/json' \\\n  -d '${json}'`;
}

export function asPython(body, hasKey) {
  const entries = Object.entries(body);
  const named = entries.filter(([name]) => !EXTRA.has(name));
  const extra = entries.filter(([name]) => EXTRA.has(name));
  if (extra.length) named.push(["extra_body", Object.fromEntries(extra)]);
  const lines = named.map(([name, value]) => `    ${name}=${literal(value, 1)},`);
  const key = hasKey ? 'os.environ["HEADRACE_API_KEY"]' : '"none"';
  return `${hasKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(address())}, api_key=${key})
answer = client.chat.completions.create(
${lines.join("\n")}
)
print(answer.choices[0].message.content)
`;
}

/** A JSON value as Python writes it. */
function literal(value, depth) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  // JSON's escapes mean the same in Python, but for halves of surrogate pairs, which it never writes.
  if (typeof value !== "object") return JSON.stringify(value);
  const isList = Array.isArray(value);
  const inside = isList
    ? value.map(each => literal(each, depth + 1))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${literal(each, depth + 1)}`);
  const [open, close] = isList ? "[]" : "{}";
  if (!inside.length) return open + close;
  const pad = "    ".repeat(depth);
  return `${open}\n${inside.map(each => `${pad}    ${each},\n`).join("")}${pad}${close}`;
}
