// Words and numbers as the page shows them.

/** What is said about where a document's keys and values came from. */
export const SOURCES = {
  new: "not read yet",
  cached: "from cache",
  computed: "computed",
  awaited: "awaited",
  recomputed: "recomputed",
  loaded: "loaded",
};

/** The word for a document of a report; what was computed again of it is told of one found. */
export function sourceOf({ source, recomputed }) {
  return source === "cached" && recomputed ? "recomputed" : source;
}

/** What these words mean, for the legend and its tooltips. */
export const MEANINGS = {
  cached: "Keys and values were there already, whatever the position",
  computed: "Computed for this answer, and kept",
  awaited: "Another request was computing it; this one waited for the result",
  recomputed: "Found, and partly computed again for this prompt",
  loaded: "Read from host memory, disk or a remote store",
};

/** Seconds as text, null as nothing. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  const ms = seconds * 1000;
  if (ms === 0) return "0 ms";
  if (ms < 9.95) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

export function plural(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}
