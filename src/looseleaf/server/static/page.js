// The page: documents in, a question, the answer as it streams, and what it cost.

import { addDelta, clearAnswer, hasAnswer, readTools } from "./answer.js";
import { ApiError, chat, models } from "./api.js";
import { Leaves } from "./leaves.js";
import { addRun, drawFigures, drawLegend, drawStrip } from "./report.js";
import { sourceOf } from "./words.js";

const MAX_FILE_BYTES = 8 * 1024 * 1024;
const byId = (id) => document.getElementById(id);
const store = storage();

const seen = new Set(["cached", "computed", "awaited"]);
let running = null;
let answered = [];

const leaves = new Leaves(byId("leaves"), byId("leaf"), {
  changed: documentsChanged,
  speak: (text) => (byId("spoken").textContent = text),
});

/** Settings of this browser; without them (a private window that forbids it) nothing is kept. */
function storage() {
  const read = (area, name) => {
    try {
      return area()[name] ?? "";
    } catch {
      return "";
    }
  };
  const write = (area, name, value) => {
    try {
      area()[name] = value;
    } catch {
      // the setting holds until the page is closed
    }
  };
  return {
    get key() { return read(() => sessionStorage, "looseleaf-key"); },
    set key(value) { write(() => sessionStorage, "looseleaf-key", value); },
    get theme() { return read(() => localStorage, "looseleaf-theme"); },
    set theme(value) { write(() => localStorage, "looseleaf-theme", value); },
  };
}

// errors

function fail(message) {
  byId("error-text").textContent = message;
  byId("error").hidden = false;
}

function noError() {
  byId("error").hidden = true;
}

byId("close-error").addEventListener("click", noError);

// documents

function documentsChanged() {
  const count = leaves.documents.length;
  byId("documents-count").textContent = count || "";
  byId("clear-documents").hidden = count === 0;
  showOrder();
}

/** Says so when the documents of the last answer are there, but in another order. */
function showOrder() {
  const now = leaves.documents;
  const same = now.length === answered.length && now.every((document) => answered.includes(document));
  const moved = same && now.some((document, index) => document !== answered[index]);
  byId("order-changed").hidden = !moved;
  byId("keys").hidden = moved;
}

async function addFiles(files) {
  noError();
  const refused = [];
  for (const file of files) {
    try {
      leaves.add(file.name, await readText(file));
    } catch (error) {
      refused.push(`${file.name} ${error.message}`);
    }
  }
  if (refused.length) fail(refused.join("\n"));
}

async function readText(file) {
  if (file.size > MAX_FILE_BYTES) throw new Error("is larger than 8 MiB: cut it into parts.");
  let bytes;
  try {
    bytes = await file.arrayBuffer();
  } catch {
    throw new Error("can't be read: drop files, not folders.");
  }
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw new Error("is not text in UTF-8: convert it to text first.");
  }
  if (text.includes("\0")) throw new Error("is not a text file: convert it to text first.");
  if (!text.trim()) throw new Error("is empty.");
  return text;
}

byId("clear-documents").addEventListener("click", () => {
  leaves.clear();
  byId("choose-files").focus();
});
byId("choose-files").addEventListener("click", () => byId("files").click());
byId("files").addEventListener("change", async ({ target }) => {
  await addFiles([...target.files]);
  target.value = "";
});

function showPaste(open) {
  byId("paste").hidden = !open;
  byId("open-paste").setAttribute("aria-expanded", String(open));
  if (open) byId("paste-title").focus();
  else byId("open-paste").focus();
}

byId("open-paste").addEventListener("click", () => showPaste(byId("paste").hidden));
byId("close-paste").addEventListener("click", () => showPaste(false));
byId("paste").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("paste-text").value;
  if (!text.trim()) return fail("The document is empty: paste its text.");
  noError();
  leaves.add(byId("paste-title").value.trim() || "Pasted text", text);
  byId("paste").reset();
  showPaste(false);
});

// pasted anywhere but into a field, a text becomes a document
document.addEventListener("paste", (event) => {
  if (event.target.closest?.("input, textarea")) return;
  const { files } = event.clipboardData;
  const text = event.clipboardData.getData("text/plain");
  if (files.length) addFiles([...files]);
  else if (text.trim()) leaves.add("Pasted text", text);
});

const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
let depth = 0;
addEventListener("dragenter", (event) => {
  if (!hasFiles(event)) return;
  depth += 1;
  byId("drop-cover").hidden = false;
});
addEventListener("dragleave", (event) => {
  if (!hasFiles(event)) return;
  depth -= 1;
  if (depth <= 0) byId("drop-cover").hidden = true;
});
addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
addEventListener("drop", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  depth = 0;
  byId("drop-cover").hidden = true;
  addFiles([...event.dataTransfer.files]);
});

byId("load-example").addEventListener("click", async () => {
  noError();
  try {
    const response = await fetch("static/examples.json");
    if (!response.ok) throw new Error();
    const { documents, questions } = await response.json();
    for (const { title, text } of documents) leaves.add(title, text);
    byId("suggestions").replaceChildren(...questions.map(suggestion));
    byId("suggestions").hidden = false;
    byId("question").value = questions[0];
    byId("question").focus();
  } catch {
    fail("The example can't be loaded. Is the server still running?");
  }
});

function suggestion(question) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = question;
  button.addEventListener("click", () => {
    byId("question").value = question;
    byId("question").focus();
  });
  return button;
}

// the server

async function connect() {
  const server = byId("server");
  try {
    const served = await models(store.key);
    byId("model").replaceChildren(...served.map(({ id }) => new Option(id, id)));
    byId("model").hidden = served.length < 2;
    server.dataset.state = "ready";
    server.textContent = served.map(({ id }) => id).join(", ");
    byId("reference-note").hidden = !served.some(({ id }) => /reference/.test(id));
  } catch (error) {
    const locked = error.status === 401;
    server.dataset.state = locked ? "locked" : "away";
    server.textContent = locked ? "API key needed" : "no connection";
    if (locked) askForKey(store.key ? error.message : "This server asks for an API key.");
    else fail(error.message);
  }
}

function showOptions(open) {
  byId("options").hidden = !open;
  byId("open-options").setAttribute("aria-expanded", String(open));
}

function askForKey(message) {
  showOptions(true);
  fail(message);
  byId("api-key").focus();
}

byId("open-options").addEventListener("click", () => showOptions(byId("options").hidden));
byId("api-key").value = store.key;
byId("api-key").addEventListener("change", ({ target }) => {
  store.key = target.value.trim();
  noError();
  connect();
});

byId("theme").value = store.theme;
function paint() {
  document.documentElement.dataset.theme = byId("theme").value;
  store.theme = byId("theme").value;
}
byId("theme").addEventListener("change", paint);

// the question

function body(documents, question) {
  const system = byId("system").value.trim();
  return {
    model: byId("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: question }],
    documents: documents.map(({ title, text }) => ({ title, text })),
    max_completion_tokens: byId("max-tokens").valueAsNumber,
    temperature: byId("temperature").valueAsNumber,
    ...fuse(),
    ...readTools(byId("tools").value),
    ...thinking(),
  };
}

/** The variable of the chat template for models that think, if it is chosen. */
function thinking() {
  const choice = byId("thinking").value;
  return choice ? { chat_template_kwargs: { enable_thinking: choice === "on" } } : {};
}

/** The policy for documents that meet, if one is chosen; an empty share leaves it to the server. */
function fuse() {
  const selector = byId("fuse").value;
  if (!selector) return {};
  const percent = byId("ratio").valueAsNumber;
  const ratio = byId("ratio").disabled || Number.isNaN(percent) ? {} : { ratio: percent / 100 };
  return { fuse: { selector, ...ratio } };
}

function chooseFuse() {
  // the first tokens are a number of each document, and everything is everything
  byId("ratio").disabled = ["", "first", "all"].includes(byId("fuse").value);
}
byId("fuse").addEventListener("change", chooseFuse);

function working(state) {
  byId("send").disabled = state;
  byId("stop").hidden = !state;
  byId("answer-text").setAttribute("aria-busy", String(state));
}

async function ask() {
  const question = byId("question").value.trim();
  if (running) return;
  if (!question) return fail("Ask something: the question is empty.");
  if (!byId("ask").reportValidity()) return;
  noError();
  const sent = leaves.documents;
  let asked;
  try {
    asked = body(sent, question);
  } catch (error) {
    showOptions(true);
    return fail(error.message);
  }
  const elements = sent.map(({ element }) => element);
  running = new AbortController();
  byId("empty").hidden = true;
  byId("answer").hidden = false;
  byId("report").hidden = true;
  clearAnswer(question);
  leaves.reading(elements, true);
  working(true);
  byId("answer").scrollIntoView({ block: "nearest" });
  const run = { question, sent, report: null, usage: null };
  try {
    for await (const chunk of chat(asked, store.key, running.signal)) take(chunk, run);
    finish(run);
  } catch (error) {
    if (error.name === "AbortError") byId("answer-end").textContent = "Stopped.";
    else if (error.status === 401) askForKey(error.message);
    else fail(error instanceof ApiError ? error.message : `The answer can't be read: ${error.message}`);
    if (!hasAnswer()) byId("answer").hidden = error.name !== "AbortError";
  } finally {
    leaves.reading(elements, false);
    working(false);
    running = null;
  }
}

function take(chunk, run) {
  const choice = chunk.choices?.[0];
  if (choice?.delta) addDelta(choice.delta);
  if (choice?.finish_reason === "length") {
    byId("answer-end").textContent = "Cut at the longest answer that was asked for; see Options.";
  }
  if (chunk.usage) run.usage = chunk.usage;
  if (chunk.looseleaf) {
    run.report = chunk.looseleaf;
    showSources(run);
  }
}

function showSources(run) {
  run.report.documents.forEach((entry, index) => {
    const { element } = run.sent[index];
    seen.add(sourceOf(entry));
    if (element.isConnected) leaves.show(element, entry);
    leaves.reading([element], false);
  });
  drawLegend(byId("legend"), seen);
}

function finish(run) {
  if (!run.report || !run.usage) return;
  drawStrip(byId("strip"), run);
  drawFigures(byId("figures"), run);
  const { usage, report } = run;
  byId("raw").textContent = JSON.stringify({ usage, looseleaf: report }, null, 2);
  byId("report").hidden = false;
  answered = run.sent;
  showOrder();
  addRun(byId("runs"), run);
  byId("history").hidden = byId("runs").children.length < 2;
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask();
});
byId("stop").addEventListener("click", () => running?.abort());

paint();
chooseFuse();
drawLegend(byId("legend"), seen);
documentsChanged();
connect();
