// The list of documents: each a leaf that can be dragged by its punched edge, moved with arrow keys
// or buttons, and removed. The list knows nothing of the server; it is told what to show.

import { SOURCES, duration, plural, sourceOf } from "./words.js";

const MARKS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class Leaves {
  /** `changed` is called after every addition, removal and move, `speak` with what happened. */
  constructor(list, template, { changed, speak }) {
    this.list = list;
    this.template = template;
    this.changed = changed;
    this.speak = speak;
    this.items = new Map();
    this.numAdded = 0;
  }

  /** The documents in their order: `{element, mark, title, text}`. */
  get documents() {
    return [...this.list.children].map((element) => this.items.get(element));
  }

  add(title, text) {
    const element = this.template.content.firstElementChild.cloneNode(true);
    const mark = MARKS[this.numAdded % MARKS.length];
    this.numAdded += 1;
    this.items.set(element, { element, mark, title, text });
    const titled = element.querySelector(".leaf-title");
    const marked = document.createElement("span");
    marked.className = "mark";
    marked.textContent = mark;
    titled.append(marked, title);
    element.querySelector("pre").textContent = text;
    this.#label(element, title);
    this.#listen(element);
    this.list.append(element);
    this.show(element, null);
    this.#arrange();
  }

  clear() {
    this.list.replaceChildren();
    this.items.clear();
    this.numAdded = 0;
    this.speak("All documents removed");
    this.#arrange();
  }

  /** Shows where a document came from in the last answer; null for one that was not read yet. */
  show(element, report) {
    const { text } = this.items.get(element) ?? {};
    const facts = report
      ? [
          plural(report.tokens, "token"),
          duration(report.seconds),
          report.recomputed ? `${report.recomputed.toLocaleString("en")} computed again` : "",
        ]
      : [plural(text.length, "character")];
    element.dataset.source = report ? sourceOf(report) : "new";
    element.querySelector(".badge").textContent = SOURCES[element.dataset.source] ?? report.source;
    element.querySelector(".leaf-facts").textContent = facts.filter(Boolean).join(" · ");
  }

  /** Marks the documents that are being read, until it is called with false. */
  reading(elements, state) {
    for (const element of elements) element.toggleAttribute("data-reading", state);
  }

  /** Moves a document by so many places, as far as there are any. */
  move(element, by) {
    const there = by < 0 ? element.previousElementSibling : element.nextElementSibling;
    if (!there) return;
    // the neighbour moves, so that what has the focus or the pointer keeps it
    this.#glide([element, there], () => {
      if (by < 0) element.after(there);
      else element.before(there);
    });
    this.#arrange();
    this.#say(element);
  }

  #label(element, title) {
    const name = (selector, text) => element.querySelector(selector).setAttribute("aria-label", text);
    name(".handle", `Move ${title}: drag, or use the arrow keys`);
    name(".up", `Move ${title} up`);
    name(".down", `Move ${title} down`);
    name(".remove", `Remove ${title}`);
  }

  #listen(element) {
    const handle = element.querySelector(".handle");
    const step = (by, button) => {
      this.move(element, by);
      if (button.disabled) handle.focus();
    };
    const up = element.querySelector(".up");
    const down = element.querySelector(".down");
    up.addEventListener("click", () => step(-1, up));
    down.addEventListener("click", () => step(1, down));
    element.querySelector(".remove").addEventListener("click", () => this.#remove(element));
    handle.addEventListener("keydown", (event) => {
      const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (!by) return;
      event.preventDefault();
      this.move(element, by);
    });
    handle.addEventListener("pointerdown", (event) => this.#drag(element, handle, event));
  }

  #remove(element) {
    const next = element.nextElementSibling ?? element.previousElementSibling;
    this.speak(`${this.items.get(element).title} removed`);
    this.items.delete(element);
    element.remove();
    next?.querySelector(".remove").focus();
    this.#arrange();
  }

  #drag(element, handle, down) {
    if (down.button !== 0) return;
    down.preventDefault();
    handle.focus({ preventScroll: true });
    handle.setPointerCapture(down.pointerId);
    const before = [...this.list.children];
    let start = down.clientY + scrollY;
    element.classList.add("dragged");

    const follow = (event) => {
      if (event.clientY < 40) scrollBy(0, -12);
      if (event.clientY > innerHeight - 40) scrollBy(0, 12);
      const shift = () => event.clientY + scrollY - start;
      for (;;) {
        const down = shift() > 0;
        const there = down ? element.nextElementSibling : element.previousElementSibling;
        if (!there || Math.abs(shift()) < there.offsetHeight / 2 + 6) break;
        const top = element.offsetTop;
        this.#glide([there], () => (down ? element.before(there) : element.after(there)));
        start += element.offsetTop - top;
      }
      element.style.transform = `translateY(${shift()}px)`;
    };
    const finish = (cancelled) => {
      over.abort();
      element.classList.remove("dragged");
      element.style.transform = "";
      if (cancelled) this.list.append(...before);
      const moved = before.some((leaf, index) => leaf !== this.list.children[index]);
      if (!moved) return;
      this.#arrange();
      this.#say(element);
    };
    const over = new AbortController();
    const { signal } = over;
    handle.addEventListener("pointermove", follow, { signal });
    handle.addEventListener("pointerup", () => finish(false), { signal });
    handle.addEventListener("pointercancel", () => finish(true), { signal });
    addEventListener("keydown", (event) => event.key === "Escape" && finish(true), { signal });
  }

  /** Runs `rearrange` and lets the elements slide from where they were to where they are. */
  #glide(elements, rearrange) {
    const tops = elements.map((element) => element.getBoundingClientRect().top);
    rearrange();
    if (calm.matches) return;
    elements.forEach((element, index) => {
      const from = tops[index] - element.getBoundingClientRect().top;
      element.animate([{ transform: `translateY(${from}px)` }, { transform: "none" }], {
        duration: 160,
        easing: "ease-out",
      });
    });
  }

  #arrange() {
    for (const element of this.list.children) {
      element.querySelector(".up").disabled = !element.previousElementSibling;
      element.querySelector(".down").disabled = !element.nextElementSibling;
    }
    this.changed();
  }

  #say(element) {
    const place = [...this.list.children].indexOf(element) + 1;
    this.speak(`${this.items.get(element).title} is now ${place} of ${this.list.children.length}`);
  }
}
