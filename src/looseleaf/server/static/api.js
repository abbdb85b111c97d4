// The server's API as the page uses it: the models, and one streamed answer. URLs are relative, so
// the page also works behind a path of a proxy.

/** A refusal of the server, or its silence: a sentence, the HTTP status (0: no answer at all). */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  const sent = { "Content-Type": "application/json" };
  if (key) sent.Authorization = `Bearer ${key}`;
  return sent;
}

async function request(url, options) {
  let response;
  try {
    response = await fetch(url, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is it still running?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let message = `The server answered ${response.status} ${response.statusText}`.trim() + ".";
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    // not in OpenAI's error shape, such as the page of a proxy: the status says what there is to say
  }
  const wait = response.headers.get("Retry-After");
  if (wait) message += `\nTry again in ${wait} s.`;
  const id = response.headers.get("X-Request-Id");
  if (response.status >= 500 && id) message += `\nRequest ${id}`;
  return new ApiError(message, response.status);
}

/** The models that are served. */
export async function models(key) {
  const response = await request("v1/models", { headers: headers(key) });
  return (await response.json()).data;
}

/** The chunks of a streamed chat completion, as they come. Ends with the stream; throws ApiError. */
export async function* chat(body, key, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: headers(key),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, response.status);
    yield chunk;
  }
  throw new ApiError("The connection ended before the answer did.");
}

/** The data of each server-sent event. An event may be cut anywhere, also within a character. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The connection broke before the answer was complete.");
    }
    if (part.done) return;
    const lines = (rest + part.value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      else if (line === "" && data.length) {
        yield data.join("\n");
        data = [];
      }
    }
  }
}
