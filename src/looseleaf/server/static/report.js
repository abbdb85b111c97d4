// What the server reports about an answer: the prompt drawn to scale, the figures, and one row for
// every answer so far.

import { MEANINGS, SOURCES, duration, plural, sourceOf } from "./words.js";

function make(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

export function drawLegend(list, sources) {
  const entries = Object.keys(MEANINGS).filter((source) => sources.has(source));
  list.replaceChildren(
    ...entries.map((source) => {
      const badge = make("span", { className: "badge", title: MEANINGS[source] }, SOURCES[source]);
      badge.dataset.source = source;
      return make("li", {}, badge);
    }),
  );
}

/** The prompt from its first token to its last; documents keep the mark they have in the list. */
export function drawStrip(strip, run, { small = false } = {}) {
  const { documents } = run.report;
  const spoken = [];
  const chunks = [];
  let end = 0;
  const text = (upTo) => {
    if (upTo <= end) return;
    const chunk = block("chunk text", upTo - end, `Text: ${plural(upTo - end, "token")} at ${end}`);
    if (!small) chunk.append(make("span", {}, "text"));
    chunks.push(chunk);
    spoken.push(`${plural(upTo - end, "token")} of text`);
  };
  documents.forEach((entry, index) => {
    text(entry.offset);
    end = entry.offset + entry.tokens;
    const { mark, title } = run.sent[index];
    const source = sourceOf(entry);
    const again = entry.recomputed ? `, of them ${entry.recomputed} computed again` : "";
    const word = SOURCES[source] ?? source;
    const hint = `${title}: ${plural(entry.tokens, "token")} at ${entry.offset}, ${word}${again}`;
    const chunk = block("chunk", entry.tokens, hint);
    chunk.dataset.source = source;
    chunk.append(make("span", { className: "title" }, small ? mark : title));
    if (!small) chunk.append(make("span", { className: "where" }, `${entry.tokens} at ${entry.offset}`));
    chunks.push(chunk);
    spoken.push(hint);
  });
  text(run.usage.prompt_tokens);
  strip.classList.toggle("small-strip", small);
  strip.setAttribute("role", "img");
  strip.setAttribute("aria-label", `Prompt: ${spoken.join("; ")}`);
  strip.replaceChildren(...chunks);
}

function block(className, tokens, hint) {
  const element = make("div", { className, title: hint });
  element.style.flex = `${tokens} 1 0`;
  return element;
}

/** The numbers of the last answer. */
export function drawFigures(list, { report, usage }) {
  const all = report.document_tokens_reused + report.document_tokens_computed;
  const decoding = report.times.total - report.times.first_token;
  const speed = decoding > 0 ? (usage.completion_tokens - 1) / decoding : 0;
  const waited = report.times.queued >= 0.001 ? `after ${duration(report.times.queued)} in the queue` : "";
  const figures = [
    ...(report.reuse?.level === "discover"
      ? [["Discovered", report.reuse.discovered, `of ${plural(usage.prompt_tokens, "prompt token")}`]]
      : []),
    ["Computed", report.document_tokens_computed, `of ${plural(all, "document token")}`],
    ["Reused", report.document_tokens_reused, `of ${plural(all, "document token")}`],
    ...(report.document_tokens_recomputed
      ? [["Computed again", report.document_tokens_recomputed, `by ${report.policies.fuse.selector}`]]
      : []),
    ["Prefix cache", report.text_tokens_cached, `of ${plural(report.text_tokens, "text token")}`],
    ["First token", duration(report.times.first_token), waited],
    [
      "Whole answer",
      duration(report.times.total),
      plural(usage.completion_tokens, "token") + (speed > 0 ? `, ${Math.round(speed)} a second` : ""),
    ],
  ];
  list.replaceChildren(
    ...figures.map(([name, value, note]) => {
      const shown = typeof value === "number" ? value.toLocaleString("en") : value;
      const box = make("div", {}, make("dt", {}, name), make("dd", {}, shown, make("small", {}, note)));
      return box;
    }),
  );
}

/** Adds a row on top: what was asked, the prompt in small, what it cost. */
export function addRun(rows, run) {
  const strip = make("div", { className: "strip" });
  drawStrip(strip, run, { small: true });
  const number = (content) => make("td", { className: "number" }, content);
  const row = make(
    "tr",
    {},
    make("td", {}, String(rows.children.length + 1)),
    make("td", {}, make("div", { className: "clamped", title: run.question }, run.question)),
    make("td", {}, strip),
    number(run.report.document_tokens_computed.toLocaleString("en")),
    number(duration(run.report.times.first_token)),
  );
  rows.prepend(row);
}
