// The answer on the page: its text, its reasoning, and its tool calls, as they grow.

const byId = (id) => document.getElementById(id);

/** An empty answer to `question`. */
export function clearAnswer(question) {
  byId("asked").textContent = question;
  for (const id of ["answer-text", "answer-end", "thoughts-text"]) byId(id).textContent = "";
  byId("calls").replaceChildren();
  byId("calls").hidden = true;
  byId("thoughts").hidden = true;
}

/** Adds the delta of a chunk. */
export function addDelta(delta) {
  if (delta.content) byId("answer-text").append(delta.content);
  if (delta.reasoning_content) {
    byId("thoughts").hidden = false;
    byId("thoughts-text").append(delta.reasoning_content);
  }
  for (const call of delta.tool_calls ?? []) addCall(call);
}

/** Whether anything of the answer is shown. */
export function hasAnswer() {
  return ["answer-text", "thoughts-text", "calls"].some((id) => byId(id).textContent);
}

function addCall({ index, function: { name = "", arguments: text = "" } }) {
  const list = byId("calls");
  list.hidden = false;
  while (list.children.length <= index) list.append(callItem());
  const [shown, values] = list.children[index].children;
  shown.append(name);
  values.append(text);
}

function callItem() {
  const item = document.createElement("li");
  const name = document.createElement("strong");
  const values = document.createElement("code");
  item.append(name, values);
  return item;
}

/** The tools of a request from the text of the field, a JSON list of functions. Throws an Error. */
export function readTools(text) {
  if (!text.trim()) return {};
  let functions;
  try {
    functions = JSON.parse(text);
  } catch (error) {
    throw new Error(`The tools are no JSON: ${error.message}`);
  }
  if (!Array.isArray(functions)) throw new Error("The tools are a JSON list of functions.");
  const tools = functions.map((one) => (one?.function ? one : { type: "function", function: one }));
  return { tools };
}
