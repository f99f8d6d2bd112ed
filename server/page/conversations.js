// Conversations: trees of messages, kept in this browser.
//
// An edit or another answer is a sibling of the message it replaces, so nothing is lost; `leaf` is
// the end of the branch that is shown.

const ROOT = "root";
let database = null;

const finished = request =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

const store = mode => database.transaction("conversations", mode).objectStore("conversations");

/** All kept conversations, the latest first. Without storage they live as long as the page. */
export async function load() {
  try {
    const request = indexedDB.open("headrace", 1);
    request.onupgradeneeded = () => request.result.createObjectStore("conversations", { keyPath: "id" });
    database = await finished(request);
    return (await finished(store("readonly").getAll())).sort((a, b) => b.changed - a.changed);
  } catch {
    database = null;
    return [];
  }
}

export async function save(conversation) {
  conversation.changed = Date.now();
  if (database) await finished(store("readwrite").put(conversation));
}

export async function remove(conversation) {
  if (database) await finished(store("readwrite").delete(conversation.id));
}

// `crypto.randomUUID` is for HTTPS and localhost only.
const newId = () => Array.from(crypto.getRandomValues(new Uint32Array(3)), n => n.toString(36)).join("");

export function create(settings) {
  const root = { id: ROOT, parent: null, children: [] };
  return { id: newId(), title: "", changed: Date.now(), settings, nodes: { [ROOT]: root }, leaf: ROOT };
}

/** Add a message behind `parent`, which becomes the end of the shown branch. */
export function append(conversation, parent, fields) {
  const node = { id: newId(), parent, children: [], text: "", ...fields };
  conversation.nodes[node.id] = node;
  conversation.nodes[parent].children.push(node.id);
  conversation.leaf = node.id;
  if (!conversation.title && node.role === "user") conversation.title = node.text.trim().slice(0, 60);
  return node;
}

/** The messages from the first to `leaf`. */
export function path(conversation, leaf = conversation.leaf) {
  const found = [];
  for (let node = conversation.nodes[leaf]; node.parent !== null; node = conversation.nodes[node.parent])
    found.unshift(node);
  return found;
}

export const siblings = (conversation, node) => conversation.nodes[node.parent].children;

/** Show the sibling `step` further, down to its latest message. */
export function turn(conversation, node, step) {
  const all = siblings(conversation, node);
  let next = conversation.nodes[all[all.indexOf(node.id) + step]];
  while (next.children.length) next = conversation.nodes[next.children.at(-1)];
  conversation.leaf = next.id;
}

/** A new conversation that holds the messages up to `node`. */
export function branch(conversation, node) {
  const copy = create(structuredClone(conversation.settings));
  for (const { parent: _parent, children: _children, id: _id, ...fields } of path(conversation, node.id))
    append(copy, copy.leaf, structuredClone(fields));
  copy.title = `${conversation.title} (branch)`;
  return copy;
}
