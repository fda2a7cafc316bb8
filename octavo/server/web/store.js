// Conversations, kept in this browser (IndexedDB). Where that is blocked they live as long as the page.

const NAME = "octavo";
const STORE = "conversations";

let opening = null;
const memory = new Map();
const channel = "BroadcastChannel" in window ? new BroadcastChannel("octavo") : null;

function open() {
  opening ??= new Promise((resolve) => {
    let asked;
    try {
      asked = indexedDB.open(NAME, 1);
    } catch {
      resolve(null);
      return;
    }
    asked.onupgradeneeded = () => asked.result.createObjectStore(STORE, { keyPath: "id" });
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = asked.onblocked = () => resolve(null);
  });
  return opening;
}

async function run(mode, work) {
  const db = await open();
  if (!db) return null;
  return new Promise((resolve, reject) => {
    const transaction = db.transaction(STORE, mode);
    const asked = work(transaction.objectStore(STORE));
    transaction.oncomplete = () => resolve(asked.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

/** True while conversations outlive the page. */
export const isDurable = async () => (await open()) !== null;

/** All conversations, the newest first. */
export async function loadAll() {
  const all = (await run("readonly", (s) => s.getAll())) ?? [...memory.values()];
  return all.sort((a, b) => b.updated - a.updated);
}

export async function save(conversation) {
  const copy = structuredClone(conversation);
  if ((await run("readwrite", (s) => s.put(copy))) === null) memory.set(copy.id, copy);
  channel?.postMessage({ id: conversation.id });
}

export async function remove(id) {
  await run("readwrite", (s) => s.delete(id));
  memory.delete(id);
  channel?.postMessage({ id });
}

/** Call back when another tab has changed a conversation. */
export function onOtherTab(callback) {
  channel?.addEventListener("message", (event) => callback(event.data.id));
}
