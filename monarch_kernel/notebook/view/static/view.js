// @ts-check
/**
 * Draws meshes of ranks, in the widget of a cell and in the panel of JupyterLab; both pass it the messages of the kernel.
 *
 * Theory of operation. `mount` builds one `Mesh` for each mesh of a frame. Meshes keep their elements: a new frame writes only
 * what differs from the page, so focus, open tracebacks and text selections stay. The page draws only the newest frame, once
 * per animation frame. A timer updates durations and histories every second. The ranks of a large mesh are tiles of one canvas;
 * only tiles that changed are drawn again. For the keyboard and screen readers one element, the cursor, lies over the canvas.
 * All text of the kernel enters the page as text nodes, never as HTML.
 *
 * @typedef {import("./view.js").State} State
 * @typedef {import("./view.js").RankFrame} RankFrame
 * @typedef {import("./view.js").ErrorFrame} ErrorFrame
 * @typedef {import("./view.js").KnobFrame} KnobFrame
 * @typedef {import("./view.js").LoopFrame} LoopFrame
 * @typedef {import("./view.js").MeshFrame} MeshFrame
 * @typedef {import("./view.js").Frame} Frame
 * @typedef {import("./view.js").Command} Command
 * @typedef {import("./view.js").ReplyMessage} ReplyMessage
 * @typedef {[number, number]} Rates bytes per second, in and out
 */

const VERSION = 1;
const ALIVE_MS = 5000;
/** The view reports a kernel that has not answered by then. */
const LATE_MS = 5000;
const SECONDS = 60;
/** After this long without a frame throughput is zero, because traffic causes frames. */
const STILL_S = 3;
const ARMED_MS = 5000;
const MAX_REPLIES = 4;
/** Of a text as part of a sentence. */
const SHOWN_CHARACTERS = 40;
/** The width from which a card shows all that it has in few lines, that which it needs, and that of a compact card, in pixels. */
const CARD_WIDTH = 276;
const LEAST_CARD_WIDTH = 226;
const COMPACT_WIDTH = 236;
/** The distance between cards, as in the style sheet. */
const CARD_GAP = 8;
/** Cards that would take more rows than this are compact, unless the user chooses. */
const MAX_FULL_ROWS = 2;

/** Values of a curve are equal if they differ by less than this part of them: means of equal values differ by rounding. */
const ROUNDING = 1e-9;

/** @type {State[]} */
const STATES = ["starting", "idle", "running", "failed", "dead", "stopped"];
/** The order of counts: states that need attention first. @type {State[]} */
const COUNTED = ["dead", "failed", "starting", "running", "idle", "stopped"];

const SQUARE = "M3 1H13a2 2 0 0 1 2 2V13a2 2 0 0 1-2 2H3a2 2 0 0 1-2-2V3a2 2 0 0 1 2-2Z";
const TRIANGLE = "M8 1.2Q8.8 1.2 9.2 2L15.2 13.4Q15.8 15 14.2 15H1.8Q.2 15 .8 13.4L6.8 2Q7.2 1.2 8 1.2Z";
/**
 * The tile of each state, in a box of 16 units. Tiles differ without colour, too.
 * @type {Record<State, {outline: string, fill: number, dash?: boolean, mark?: string}>}
 */
const TILES = {
  starting: { outline: SQUARE, fill: 0, dash: true },
  idle: { outline: SQUARE, fill: 0 },
  running: { outline: SQUARE, fill: 0.6 },
  failed: { outline: TRIANGLE, fill: 1, mark: "M8 5.6V9.6M8 12V12.4" },
  dead: { outline: SQUARE, fill: 1, mark: "M5 5L11 11M11 5L5 11" },
  stopped: { outline: "M5 5H11V11H5Z", fill: 1 },
};

// --- Text -------------------------------------------------------------------------------------------------------------

/** Formats bytes, `512 B`, `1.5 KiB`, `12 MiB`, like `format_nbytes` of `base/text.py`. @param {number} nbytes */
function bytes(nbytes) {
  if (nbytes < 1023.5) return `${Math.round(nbytes)} B`;
  let value = nbytes;
  for (const unit of ["KiB", "MiB", "GiB", "TiB"]) {
    value /= 1024;
    if (value < 9.95) return `${value.toFixed(1)} ${unit}`;
    if (value < 1023.5) return `${value.toFixed(0)} ${unit}`;
  }
  return `${(value / 1024).toFixed(0)} PiB`;
}

/** Formats a part of a number of bytes, `61 / 80 GiB`, in the unit of the whole. @param {number} part @param {number} whole */
function bytesOf(part, whole) {
  const [value, unit] = bytes(whole).split(" ");
  const scale = whole / Number(value);
  return `${(part / scale).toFixed(value.includes(".") ? 1 : 0)} / ${value} ${unit}`;
}

/** Formats whole seconds, since it changes every second: `4 s`, `4 min 05 s`, `2 h 03 min`. @param {number} seconds */
function span(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const two = (/** @type {number} */ value) => String(value).padStart(2, "0");
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
  return `${Math.floor(whole / 86400)} d ${two(Math.floor((whole % 86400) / 3600))} h`;
}

/** Formats a moment as its time of day, with the date if that is another day. @param {number} at @param {number} now */
function moment(at, now) {
  const date = new Date(at * 1000);
  return date.toDateString() === new Date(now * 1000).toDateString() ? date.toLocaleTimeString() : date.toLocaleString();
}

/** Keeps a figure and its unit in one line. @param {string} text */
const whole = (text) => text.replaceAll(" ", "\u00a0");

/** Separates figures, so that no line begins with it. */
const DOT = "\u00a0· ";

/** @param {number} count @param {string} noun */
const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

// Terminal control sequences: colours, window titles and others.
const CONTROL = /\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]/g;

/** @param {string} text */
const plain = (text) => String(text).replace(CONTROL, "");

/** @param {MeshFrame} mesh */
const rankCount = (mesh) => mesh.axes.reduce((count, [, size]) => count * size, 1);

/** Formats the point of a rank: `dp 10, tp 4`. @param {number} rank @param {[string, number][]} axes */
function pointOf(rank, axes) {
  /** @type {string[]} */
  const parts = [];
  for (let i = axes.length - 1, rest = rank; i >= 0; i--) {
    const [name, size] = axes[i];
    parts.unshift(`${name} ${rest % size}`);
    rest = Math.floor(rest / size);
  }
  return parts.join(", ");
}

/** Whether ranks in brackets, such as `[0-3,7]`, include a rank. @param {string} ranks @param {number} rank */
function names(ranks, rank) {
  return ranks.replace(/[[\]…]/g, "").split(",").some((part) => {
    const [first, last = first] = part.split("-").map(Number);
    return part !== "" && first <= rank && rank <= last;
  });
}

/** Unpacks the states of many ranks, which `frames.pack_states` packed. @param {string} packed @param {number} count */
function unpackStates(packed, count) {
  const states = new Uint8Array(count);
  for (let i = 0; i < packed.length; i++) {
    const both = parseInt(packed[i], 36);
    states[2 * i] = Math.floor(both / 6);
    if (2 * i + 1 < count) states[2 * i + 1] = both % 6;
  }
  return states;
}

// --- Elements ---------------------------------------------------------------------------------------------------------

/**
 * Makes an element with classes, attributes and children.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag @param {string} [classes] @param {Record<string, string>} [attributes] @param {...(Node | string)} children
 * @returns {HTMLElementTagNameMap[K]}
 */
function element(tag, classes = "", attributes = {}, ...children) {
  const made = document.createElement(tag);
  if (classes) made.className = classes;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** @param {string} tag @param {Record<string, string>} attributes @param {...Node} children */
function drawing(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Writes the text of an element, unless it has this text already. @param {Element} node @param {string} text */
function write(node, text) {
  const child = node.firstChild;
  if (child instanceof Text && child === node.lastChild) {
    if (child.data !== text) child.data = text;
  } else if (node.textContent !== text) {
    node.textContent = text;
  }
}

/** @param {Element} node @param {string} name @param {string} value */
function mark(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

/** @param {HTMLElement} node @param {boolean} isShown */
function show(node, isShown) {
  if (node.hidden === isShown) node.hidden = !isShown;
}

/** Writes the text of an element, and hides the element if the text is empty. @param {HTMLElement} node @param {string} text */
function writeOrHide(node, text) {
  write(node, text);
  show(node, text !== "");
}

/** Writes lines as the items of a list, and hides the list without lines. @param {HTMLElement} list @param {string[]} lines */
function drawLines(list, lines) {
  show(list, lines.length > 0);
  while (list.children.length > lines.length) list.lastElementChild?.remove();
  while (list.children.length < lines.length) list.append(element("li", "mk-note"));
  lines.forEach((line, i) => write(list.children[i], line));
}

/** @param {string} label @param {(event: MouseEvent) => void} onClick @param {string} [classes] */
function button(label, onClick, classes = "mk-button") {
  const made = element("button", classes, { type: "button" }, label);
  made.addEventListener("click", (event) => {
    if (made.getAttribute("aria-disabled") !== "true") onClick(event);
  });
  return made;
}

/** Sets `aria-disabled`, since `disabled` takes the focus from a pressed button. @param {HTMLElement} made @param {boolean} can */
const enable = (made, can) => mark(made, "aria-disabled", String(!can));

/** Disables a button whose command would have no effect, and says why. @param {HTMLElement} made @param {boolean} can @param {string} why */
function withhold(made, can, why) {
  enable(made, can && why === "");
  if (made.title !== why) made.title = why;
}

/**
 * Makes a button that acts when it is pressed twice, but not on a double click.
 * @param {string} label @param {string} question @param {(text: string) => void} announce @param {() => void} onConfirm
 */
function confirmed(label, question, announce, onConfirm) {
  let timer = 0;
  const disarm = () => {
    clearTimeout(timer);
    timer = 0;
    write(made, label);
    made.classList.remove("mk-armed");
  };
  const made = button(label, (event) => {
    if (event.detail > 1) return;
    const isSure = timer !== 0;
    disarm();
    if (isSure) return onConfirm();
    timer = window.setTimeout(disarm, ARMED_MS);
    write(made, question);
    made.classList.add("mk-armed");
    announce(`${question} Press again to confirm.`);
  });
  made.addEventListener("blur", disarm);
  made.addEventListener("keydown", (event) => event.key === "Escape" && disarm());
  return made;
}

/** The tile of a state, next to its word. */
class Tile {
  constructor() {
    this.outline = drawing("path", {});
    this.mark = drawing("path", { class: "mk-mark" });
    this.node = drawing("svg", { viewBox: "0 0 16 16", "aria-hidden": "true", class: "mk-tile" }, this.outline, this.mark);
  }

  /** @param {State} state */
  draw(state) {
    const tile = TILES[state] ?? TILES.stopped;
    mark(this.node, "class", `mk-tile mk-is-${state}`);
    mark(this.outline, "d", tile.outline);
    mark(this.mark, "d", tile.mark ?? "");
  }
}

// --- Histories --------------------------------------------------------------------------------------------------------

/** The rates of the last minute, one for each second. */
class History {
  constructor() {
    /** @type {Rates[]} */
    this.rates = Array.from({ length: SECONDS }, () => /** @type {Rates} */ ([0, 0]));
    /** The second of the last rate; 0 if the next `tell` or `advance` sets it. */
    this.second = 0;
    /** The last rates that `tell` received, and when. @type {Rates} */
    this.last = [0, 0];
    this.toldAt = 0;
  }

  /** @param {Rates[]} rates */
  seed(rates) {
    this.rates = [...this.rates, ...rates].slice(-SECONDS);
    this.second = 0;
  }

  /** @param {Rates} rates @param {number} at */
  tell(rates, at) {
    this.advance(at);
    this.last = rates;
    this.toldAt = at;
    this.rates[SECONDS - 1] = rates;
  }

  /** @param {number} at */
  advance(at) {
    const second = Math.floor(at);
    if (this.second === 0) this.second = second;
    const missing = Math.min(second - this.second, SECONDS);
    for (let i = missing - 1; i >= 0; i--) this.rates.push(second - i - this.toldAt <= STILL_S ? this.last : [0, 0]);
    if (missing > 0) {
      this.rates.splice(0, missing);
      this.second = second;
    }
  }

  /** @param {number} at @returns {Rates} */
  current(at) {
    return at - this.toldAt <= STILL_S ? this.last : [0, 0];
  }

  peak() {
    return Math.max(...this.rates.flat());
  }
}

/** A history as an area (in) and a line (out). */
class Chart {
  /** @param {string} classes */
  constructor(classes) {
    this.area = drawing("path", { class: "mk-area" });
    this.into = drawing("path", { class: "mk-in" });
    this.out = drawing("path", { class: "mk-out" });
    this.node = drawing(
      "svg",
      { viewBox: `0 0 ${SECONDS - 1} 100`, preserveAspectRatio: "none", class: classes, "aria-hidden": "true" },
      this.area, this.into, this.out,
    );
  }

  /** @param {History} history */
  draw(history) {
    const top = history.peak();
    this.node.classList.toggle("mk-still", top === 0);
    if (top === 0) return;
    const line = (/** @type {0 | 1} */ which) => history.rates.map((each, i) => `${i} ${height(each[which], top)}`).join("L");
    const into = line(0);
    mark(this.area, "d", `M0 100L${into}L${SECONDS - 1} 100Z`);
    mark(this.into, "d", `M${into}`);
    mark(this.out, "d", `M${line(1)}`);
  }
}

/** Leaves space above and below for the width of the line. @param {number} rate @param {number} top */
const height = (rate, top) => Math.round(98 - (94 * rate) / top);

/** The throughput of a mesh: two figures, and a chart of the last minute. */
class Traffic {
  constructor() {
    this.chart = new Chart("mk-chart");
    this.into = element("span", "mk-figure");
    this.out = element("span", "mk-figure");
    this.peak = element("span", "mk-peak");
    const key = (/** @type {string} */ which) =>
      drawing("svg", { viewBox: "0 0 14 8", class: "mk-key", "aria-hidden": "true" },
        drawing("path", { d: "M0 4H14", class: `mk-${which}` }));
    this.node = element("div", "mk-traffic", { role: "group", "aria-label": "Throughput" },
      element("div", "mk-rates", {},
        element("span", "mk-rate", {}, key("in"), element("span", "mk-label", {}, "in"), this.into),
        element("span", "mk-rate", {}, key("out"), element("span", "mk-label", {}, "out"), this.out)),
      element("div", "mk-plot", {}, /** @type {Node} */ (this.chart.node), this.peak));
  }

  /** @param {History} history @param {number} at */
  draw(history, at) {
    const [into, out] = history.current(at);
    write(this.into, `${bytes(into)}/s`);
    write(this.out, `${bytes(out)}/s`);
    const top = history.peak();
    write(this.peak, top > 0 ? `${whole("60 s")}, at most ${whole(`${bytes(top)}/s`)}` : `none in the last ${whole("60 s")}`);
    this.chart.draw(history);
  }
}

// --- Ranks of a small mesh --------------------------------------------------------------------------------------------

/** @param {number} restarts */
const restarted = (restarts) => (restarts === 1 ? "restarted once" : `restarted ${restarts} times`);

/** Describes what a rank does: its line, after its activity unless the line starts with that. @param {RankFrame} rank */
function doing(rank) {
  const { activity = "", line = "" } = rank;
  return !line || line.startsWith(activity) ? line || activity : `${activity}: ${line}`;
}

/**
 * The error of a rank, after its time, as a word, the time and the rest: compact cards omit the time. A rank that runs had the
 * error before. @param {RankFrame} rank @param {number} now
 */
function errorParts({ error = "", error_at, state }, now) {
  const time = error && error_at ? moment(error_at, now) : "";
  if (!error || state !== "running") return ["", time && `${time}: `, error];
  return ["earlier", time && `, ${time}`, `: ${error}`];
}

/**
 * Describes the waits in collectives that a rank takes part in, or that wait for it. @param {number} rank
 * @param {MeshFrame} mesh @param {boolean} isBrief whether the page shows the collective and the whole text already
 */
function waitsOf(rank, mesh, isBrief = false) {
  const found = (mesh.waits ?? []).map((wait) => {
    const { missing = "" } = wait;
    const isMissing = names(missing, rank);
    if (names(wait.ranks, rank)) return isBrief && missing && !isMissing ? `waits for ${missing}` : wait.text;
    return isMissing ? `${waiters(wait)} for this rank` : "";
  });
  return found.filter(Boolean).join(" · ");
}

/** @param {import("./view.js").WaitFrame} wait */
const waiters = ({ ranks, text }) => (ranks ? `${ranks} ${/^\[\d+\]$/.test(ranks) ? "waits" : "wait"}` : text);

/** Says that a rank has ended, if it has. @param {string} name @param {State} state */
const endOf = (name, state) => (state === "dead" ? `${name} is dead` : state === "stopped" ? `${name} was stopped` : "");

/** One rank of a small mesh. */
class Card {
  /** @param {number} number @param {Mesh} mesh */
  constructor(number, mesh) {
    this.replies = new Replies(mesh);
    const ask = (/** @type {Command} */ command) => mesh.ask(command, { ranks: [number] }, { replies: this.replies });
    /** The replies take a separate row below that of the card. */
    this.below = element("li", "mk-below", {}, this.replies.node);
    /** @type {RankFrame} */
    this.rank = { rank: number, state: "starting" };
    this.history = new History();
    this.drawnSecond = 0;
    this.tile = new Tile();
    this.state = element("span", "mk-state");
    this.time = element("span", "mk-time");
    this.doing = element("span", "mk-doing");
    this.waits = element("span", "mk-waits");
    this.stall = element("div", "mk-stall");
    this.errorParts = ["", "mk-error-time", ""].map((classes) => element("span", classes));
    this.error = element("div", "mk-error", {}, ...this.errorParts);
    this.said = element("div", "mk-said");
    this.labels = ["memory", "cpu", "in", "out"].map((name) => element("dt", "mk-label", {}, name));
    this.figures = this.labels.map(() => element("dd", "mk-figure"));
    this.chart = new Chart("mk-spark");
    this.where = element("span", "mk-where");
    this.again = element("span", "mk-restarts");
    this.place = element("div", "mk-place", {}, this.where, this.again);
    this.interrupt = button("Interrupt", () => ask("interrupt"), "mk-button mk-small");
    this.logs = button("Logs", () => ask("logs"), "mk-button mk-small");
    this.traceback = button("Traceback", () => ask("traceback"), "mk-button mk-small");
    this.tools = element("div", "mk-tools", { role: "group", "aria-label": `Actions for rank ${number}` },
      this.interrupt, this.logs, this.traceback);
    this.menu = button("···", () => this.toggle(), "mk-button mk-menu");
    mark(this.menu, "aria-label", `Actions for rank ${number}`);
    this.toggle(false);
    this.activity = element("div", "mk-activity", {}, this.doing, this.waits);
    this.usage = element("div", "mk-usage", {},
      element("dl", "mk-figures", {}, ...this.labels.map((label, i) => element("div", "", {}, label, this.figures[i]))),
      /** @type {Node} */ (this.chart.node));
    this.node = element("li", "mk-card", { "data-rank": String(number) },
      element("div", "mk-card-head", {}, this.tile.node, element("span", "mk-rank", {}, `rank ${number}`), this.state,
        this.time, this.menu),
      this.activity, this.stall, this.error, this.said, this.usage, this.place, this.tools);
  }

  /** @param {boolean} [isOpen] */
  toggle(isOpen = this.tools.hidden) {
    show(this.tools, isOpen);
    mark(this.menu, "aria-expanded", String(isOpen));
    this.node?.classList.toggle("mk-open", isOpen);
  }

  /** @param {boolean} isOpen whether the kernel is connected */
  enable(isOpen) {
    const { rank, state } = this.rank;
    withhold(this.interrupt, isOpen, endOf(`rank ${rank}`, state));
    withhold(this.logs, isOpen, state === "stopped" ? `${endOf(`rank ${rank}`, state)}, and its output is no longer kept` : "");
  }

  /** @param {RankFrame} rank @param {MeshFrame} mesh @param {number} at */
  draw(rank, mesh, at) {
    this.rank = rank;
    mark(this.node, "data-state", rank.state);
    this.tile.draw(rank.state);
    write(this.state, rank.state);
    const isUp = rank.state !== "starting" && rank.state !== "dead" && rank.state !== "stopped";
    write(this.doing, doing(rank));
    show(this.activity, rank.state === "running");
    const stall = waitsOf(rank.rank, mesh, Boolean(rank.waits));
    writeOrHide(this.stall, stall);
    mark(this.stall, "title", waitsOf(rank.rank, mesh));
    writeOrHide(this.waits, rank.waits && !stall.includes(rank.waits) ? `waits in ${rank.waits}` : "");
    errorParts(rank, at).forEach((part, i) => write(this.errorParts[i], part));
    show(this.error, Boolean(rank.error));
    this.error.classList.toggle("mk-past", rank.state === "running");
    mark(this.error, "title", rank.error ?? "");
    writeOrHide(this.said, rank.said ?? "");
    show(this.usage, isUp);
    show(this.traceback, Boolean(rank.error));
    mark(this.said, "title", rank.said ?? "");
    const memory = rank.rss ? bytes(rank.rss) : "";
    const cpu = rank.cpu ? `${rank.cpu} %` : "";
    const gpu = rank.gpu_total ? bytesOf(rank.gpu_used ?? 0, rank.gpu_total) : "";
    // A rank with a GPU shows the use of the GPU here, and that of its process with the other details.
    write(this.labels[0], gpu ? "gpu mem" : "memory");
    write(this.labels[1], gpu ? "gpu" : "cpu");
    write(this.figures[0], gpu || memory || "–");
    write(this.figures[1], gpu ? `${rank.gpu_use ?? 0} %` : cpu || "–");
    const where = [mesh.axes.length > 1 ? pointOf(rank.rank, mesh.axes) : "", rank.host,
      rank.pid || rank.error ? rank.device : "", rank.pid ? whole(`pid ${rank.pid}`) : "", gpu && whole(memory), gpu && cpu && whole(`cpu ${cpu}`),
      rank.late && whole(`late ${rank.late}`)];
    write(this.where, where.filter(Boolean).join(" · "));
    write(this.again, rank.restarts ? restarted(rank.restarts) : "");
    show(this.place, Boolean(this.where.textContent || rank.restarts));
    this.history.tell([rank.in_rate ?? 0, rank.out_rate ?? 0], at);
    this.replies.check(at);
    this.tick(at);
  }

  /** @param {number} at */
  tick(at) {
    write(this.time, this.rank.since && this.rank.state === "running" ? span(at - this.rank.since) : "");
    this.history.advance(at);
    const rates = this.history.current(at);
    rates.forEach((rate, i) => write(this.figures[2 + i], rate ? `${bytes(rate)}/s` : "–"));
    // The page has many of these small charts: draw each once a second.
    if (this.drawnSecond === this.history.second) return;
    this.drawnSecond = this.history.second;
    this.chart.draw(this.history);
  }
}

/**
 * Chooses the number of columns: a divisor of the number of cards, so that all rows are full, if one takes more than half of
 * the columns that fit; else as few as fill the least number of rows.
 * @param {number} count @param {number} fit how many columns fit
 */
function columnsOf(count, fit) {
  for (let columns = Math.min(count, fit); 2 * columns > fit; columns--) if (count % columns === 0) return columns;
  return Math.ceil(count / Math.ceil(count / fit));
}

/** @param {number} room @param {number} width */
const fitting = (room, width) => Math.max(1, Math.floor((room + CARD_GAP) / (width + CARD_GAP)));

/** The user's choice between compact and full cards, which the browser keeps for each name of a mesh. */
const Density = {
  /** @param {string} mesh @returns {boolean | null} */
  isCompact(mesh) {
    try {
      const chosen = localStorage.getItem(`monarch-kernel:cards:${mesh}`);
      return chosen === null ? null : chosen === "compact";
    } catch {
      return null; // the browser stores nothing for this page
    }
  },

  /** @param {string} mesh @param {boolean} isCompact */
  choose(mesh, isCompact) {
    try {
      localStorage.setItem(`monarch-kernel:cards:${mesh}`, isCompact ? "compact" : "full");
    } catch {
      // the choice then ends with the page
    }
  },
};

/**
 * The cards of a small mesh. They take as many columns as fit, in rows of equal length where possible. Where full cards would
 * take many rows, they are compact: two lines each, and all the rest once the card is opened.
 */
class Cards {
  /** @param {Mesh} mesh */
  constructor(mesh) {
    this.mesh = mesh;
    /** @type {Map<number, Card>} */
    this.cards = new Map();
    /** What the user chose; null for the view's own choice. */
    this.chosen = Density.isCompact(mesh.name);
    this.isCompact = false;
    /** The width and the number of cards of the current layout. */
    this.width = 0;
    this.count = 0;
    this.node = element("ul", "mk-cards", { "aria-label": `Ranks of ${mesh.name}` });
    this.resized = new ResizeObserver(() => this.arrange());
    this.resized.observe(this.node);
  }

  /** @param {number} count */
  arrange(count = this.cards.size) {
    const width = this.node.clientWidth;
    if (!width || !count || (width === this.width && count === this.count)) return;
    this.width = width;
    this.count = count;
    this.lay();
  }

  lay() {
    const { count, width } = this;
    // Two narrow cards side by side are better than a column of wide ones.
    const fit = Math.max(fitting(width, CARD_WIDTH), Math.min(2, fitting(width, LEAST_CARD_WIDTH)));
    const full = columnsOf(count, fit);
    this.isCompact = this.chosen ?? Math.ceil(count / full) > MAX_FULL_ROWS;
    const columns = this.isCompact ? columnsOf(count, fitting(width, COMPACT_WIDTH)) : full;
    this.node.style.setProperty("--mk-columns", String(columns));
    this.node.classList.toggle("mk-compact", this.isCompact);
    this.mesh.sayDensity(this.isCompact);
  }

  /** Shows compact cards in place of full ones, or the reverse, from now on. */
  turn() {
    this.chosen = !this.isCompact;
    Density.choose(this.mesh.name, this.chosen);
    if (this.width) this.lay();
  }

  /** @param {MeshFrame} frame @param {number} at */
  draw(frame, at) {
    const ranks = frame.ranks ?? [];
    this.arrange(ranks.length);
    for (const rank of ranks) {
      let card = this.cards.get(rank.rank);
      if (!card) {
        card = new Card(rank.rank, this.mesh);
        this.cards.set(rank.rank, card);
        this.node.append(card.node, card.below);
      }
      card.draw(rank, frame, at);
    }
    for (const [number, card] of this.cards) {
      if (ranks.some((rank) => rank.rank === number)) continue;
      card.node.remove();
      card.below.remove();
      this.cards.delete(number);
    }
  }

  /** @param {number} at */
  tick(at) {
    for (const card of this.cards.values()) card.tick(at);
  }

  enable() {
    for (const card of this.cards.values()) card.enable(this.mesh.page.isOpen);
  }

  dispose() {
    this.resized.disconnect();
  }
}

// --- Ranks of a large mesh --------------------------------------------------------------------------------------------

const MAX_PITCH = 22;
const MIN_PITCH = 7;
const MAX_HEIGHT = 450;
/** A map of more ranks takes the whole width of the page. */
const HUGE = 2048;
const BLOCK_GAP = 4;
/** How far row labels extend above the tiles. */
const LABELS_TOP = 3;

/** Chooses a row length that divides the block, if one is not much too short. @param {number} block @param {number} room */
function partOf(block, room) {
  for (let columns = room; columns > room / 3; columns--) if (block % columns === 0) return columns;
  return 2 ** Math.floor(Math.log2(room));
}

/** The positions of the tiles of ranks. */
class Layout {
  /**
   * Tiles are as large as fits. A row holds a power of two of whole blocks of the last axis, or a part of one block.
   * Rows with the same index on the first axis form a group, if they are several.
   * @param {[string, number][]} axes @param {number} width
   */
  constructor(axes, width) {
    this.axes = axes;
    this.count = axes.reduce((count, [, size]) => count * size, 1);
    this.block = axes[axes.length - 1][1];
    /** How many ranks share an index on the first axis. */
    this.outer = this.count / axes[0][1];
    this.columns = this.rows = 1;
    this.gap = this.rowGap = 0;
    for (this.pitch = MAX_PITCH; this.pitch > MIN_PITCH; this.pitch--) {
      this.fit(width);
      if (this.height <= MAX_HEIGHT) return;
    }
    this.fit(width);
  }

  /** @param {number} width */
  fit(width) {
    const { block, count, pitch } = this;
    const room = Math.max(1, Math.floor(width / pitch));
    let columns = block <= room ? block : partOf(block, room);
    const wide = () => 2 * columns * pitch + ((2 * columns) / block - 1) * BLOCK_GAP;
    while (columns >= block && 2 * columns <= count && wide() <= width) columns *= 2;
    this.columns = columns;
    this.rows = Math.ceil(count / columns);
    this.gap = columns > block ? BLOCK_GAP : 0;
    const isSplit = this.axes.length > 2 || columns < block;
    this.rowGap = isSplit && this.outer % columns === 0 && this.outer < count ? BLOCK_GAP : 0;
  }

  /** The width of all tiles. */
  get width() {
    return this.x(this.columns - 1) + this.pitch;
  }

  get height() {
    return this.y(this.rows - 1) + this.pitch;
  }

  /** @param {number} column */
  x(column) {
    return column * this.pitch + Math.floor(column / this.block) * this.gap;
  }

  /** @param {number} row */
  y(row) {
    return row * this.pitch + Math.floor((row * this.columns) / this.outer) * this.rowGap;
  }

  /** Finds the rank at a point, or -1. @param {number} x @param {number} y */
  rankAt(x, y) {
    if (x < 0 || y < 0 || x >= this.width || y >= this.height) return -1;
    let column = Math.min(this.columns - 1, Math.floor(x / this.pitch));
    while (column > 0 && this.x(column) > x) column--;
    let row = Math.min(this.rows - 1, Math.floor(y / this.pitch));
    while (row > 0 && this.y(row) > y) row--;
    const rank = row * this.columns + column;
    return rank < this.count ? rank : -1;
  }

  /** Labels a row with its index on the first axis, if the row starts there, or with its first rank. @param {number} row */
  label(row) {
    const first = row * this.columns;
    if (this.axes.length === 1 || this.outer % this.columns > 0 && this.columns % this.outer > 0) return String(first);
    if (first % this.outer > 0) return "";
    return `${this.axes[0][0]} ${first / this.outer}`;
  }

  /** Describes the layout for the caption. */
  describe() {
    const [name, size] = this.axes[this.axes.length - 1];
    const others = this.axes.slice(0, -1).map(([other]) => other).join(", ");
    if (!others) return `${name} from left to right, ${counted(this.columns, "rank")} a row`;
    if (this.columns < size) return `${name} from left to right, then ${others}`;
    return this.columns === size ? `columns: ${name}` : `each block: ${name} 0 to ${size - 1}`;
  }
}

/** A map of the states of many ranks: tiles on one canvas, with a cursor. */
class HeatMap {
  /** @param {Mesh} mesh @param {(rank: number) => void} onInspect */
  constructor(mesh, onInspect) {
    this.mesh = mesh;
    this.onInspect = onInspect;
    this.states = new Uint8Array(0);
    /** @type {[string, number][]} */
    this.axes = [];
    this.at = 0;
    /** The width that the map is drawn for; 0 while it is unknown, for example in a hidden panel. */
    this.width = 0;
    this.grid = new Layout([["", 1]], MAX_PITCH);
    /** The width of the row labels. */
    this.left = 0;
    this.colours = "";
    /** The pixels of each state's tile, and below those of the whole map. @type {Uint32Array[]} */
    this.sprites = [];
    this.image = new ImageData(1, 1);
    this.pixels = new Uint32Array(1);
    this.ratio = 1;
    this.canvas = element("canvas", "mk-canvas", { "aria-hidden": "true" });
    this.context = /** @type {CanvasRenderingContext2D} */ (this.canvas.getContext("2d"));
    // Otherwise the command-mode shortcuts of JupyterLab would take the arrow keys.
    this.cursor = element("div", "mk-cursor", { role: "gridcell", tabindex: "0", "data-lm-suppress-shortcuts": "true" });
    this.hover = element("div", "mk-hover", { "aria-hidden": "true" });
    this.hover.hidden = true;
    const row = element("div", "mk-row", { role: "row" }, this.cursor);
    this.map = element("div", "mk-map", { role: "grid", "aria-label": `States of the ranks of ${mesh.name}` },
      this.canvas, this.hover, row);
    this.caption = element("div", "mk-caption");
    // The canvas reads the colours of the theme from these elements.
    this.palette = STATES.map((state) => element("span", `mk-is-${state}`));
    this.probe = element("span", "mk-probe");
    this.node = element("div", "mk-heat", {}, this.map, this.caption,
      element("div", "", { hidden: "" }, ...this.palette, this.probe));
    this.cursor.addEventListener("keydown", (event) => this.onKey(event));
    this.cursor.addEventListener("focus", () => this.move(this.at, false));
    this.map.addEventListener("pointermove", (event) => this.onPoint(event));
    this.map.addEventListener("pointerleave", () => this.onLeave());
    this.map.addEventListener("click", (event) => {
      const rank = this.rankAt(event);
      if (rank < 0) return;
      this.move(rank, false);
      this.cursor.focus({ preventScroll: true });
    });
    this.resized = new ResizeObserver(() => this.resize());
    this.resized.observe(this.node);
  }

  /** @param {MeshFrame} frame */
  draw(frame) {
    const count = rankCount(frame);
    const states = unpackStates(frame.states ?? "", count);
    const isOther = count !== this.states.length || String(frame.axes) !== String(this.axes);
    const before = this.states;
    this.states = states;
    this.axes = frame.axes;
    if (isOther) {
      this.node.classList.toggle("mk-huge", count > HUGE);
      this.width = 0;
      this.resize();
    } else if (this.width) {
      let isChanged = false;
      for (let rank = 0; rank < count; rank++) {
        if (states[rank] === before[rank]) continue;
        this.paint(rank);
        isChanged = true;
      }
      if (isChanged) this.put();
    }
    this.label();
  }

  /** Draws the map again if the theme has changed. */
  tick() {
    if (this.width && this.readColours()) this.paintAll();
  }

  resize() {
    const width = this.node.clientWidth;
    if (!width || !this.states.length || width === this.width) return;
    this.width = width;
    const axes = this.axes.filter(([, size]) => size > 1);
    this.left = this.measureLabels(axes);
    this.grid = new Layout(axes.length ? axes : [["", 1]], width - this.left - 4);
    this.ratio = window.devicePixelRatio || 1;
    const size = [this.left + this.grid.width, LABELS_TOP + this.grid.height + LABELS_TOP];
    [this.canvas.width, this.canvas.height] = size.map((each) => Math.ceil(each * this.ratio));
    [this.canvas.style.width, this.canvas.style.height] = size.map((each) => `${each}px`);
    this.image = new ImageData(this.canvas.width, this.canvas.height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.colours = "";
    this.readColours();
    mark(this.map, "aria-rowcount", String(this.grid.rows));
    mark(this.map, "aria-colcount", String(this.grid.columns));
    this.paintAll();
    this.move(Math.min(this.at, this.states.length - 1), false);
    write(this.caption, this.grid.describe());
    this.caption.style.paddingLeft = `${this.left}px`;
  }

  /** @param {[string, number][]} axes */
  measureLabels(axes) {
    const [name, size] = axes[0] ?? ["", 1];
    this.context.font = this.font();
    return Math.ceil(this.context.measureText(axes.length > 1 ? `${name} ${size}` : String(this.states.length)).width) + 8;
  }

  font() {
    return `11px ${getComputedStyle(this.node).fontFamily}`;
  }

  /** Reads the colours of the theme, and returns whether they have changed. */
  readColours() {
    const colours = [...this.palette, this.probe].map((each) => getComputedStyle(each).color);
    const paper = getComputedStyle(this.probe).backgroundColor;
    const key = [...colours, paper].join();
    if (key === this.colours) return false;
    this.colours = key;
    this.sprites = STATES.map((state, i) => sprite(state, this.grid.pitch, this.ratio, colours[i], paper));
    return true;
  }

  /** Returns the upper left corner of a rank's tile. @param {number} rank */
  place(rank) {
    const { columns } = this.grid;
    return [this.left + this.grid.x(rank % columns), LABELS_TOP + this.grid.y(Math.floor(rank / columns))];
  }

  paintAll() {
    this.context.setTransform(1, 0, 0, 1, 0, 0);
    this.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.pixels.fill(0);
    for (let rank = 0; rank < this.states.length; rank++) this.paint(rank);
    this.put();
    this.context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    this.paintLabels();
  }

  /** Copies the pixels of a tile: as many calls of `drawImage` would take twice as long. @param {number} rank */
  paint(rank) {
    const [x, y] = this.place(rank).map((each) => Math.round(each * this.ratio));
    const tile = this.sprites[this.states[rank]];
    const side = Math.round(this.grid.pitch * this.ratio);
    const { width } = this.image;
    for (let row = 0; row < side; row++) {
      const start = (y + row) * width + x;
      for (let column = 0; column < side && x + column < width; column++) this.pixels[start + column] = tile[row * side + column];
    }
  }

  /** Puts the tiles on the canvas, but not the labels next to them. */
  put() {
    const left = Math.round(this.left * this.ratio);
    this.context.putImageData(this.image, 0, 0, left, 0, this.image.width - left, this.image.height);
  }

  paintLabels() {
    this.context.fillStyle = getComputedStyle(this.probe).color;
    this.context.font = this.font();
    this.context.textAlign = "right";
    this.context.textBaseline = "middle";
    let below = 0;
    for (let row = 0; row < this.grid.rows; row++) {
      const text = this.grid.label(row);
      const y = this.grid.y(row);
      if (!text || y < below) continue;
      below = y + 14;
      this.context.fillText(text, this.left - 8, LABELS_TOP + y + this.grid.pitch / 2);
    }
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    const { columns } = this.grid;
    const last = this.states.length - 1;
    const row = this.at - (this.at % columns);
    /** @type {Record<string, number>} */
    const targets = {
      ArrowLeft: this.at - 1,
      ArrowRight: this.at + 1,
      ArrowUp: this.at - columns,
      ArrowDown: this.at + columns,
      Home: event.ctrlKey ? 0 : row,
      End: event.ctrlKey ? last : Math.min(row + columns - 1, last),
      PageUp: this.at % columns,
      PageDown: last - ((last - this.at) % columns),
      n: this.next(1),
      p: this.next(-1),
    };
    if (event.altKey || event.metaKey || !(event.key in targets)) return;
    event.preventDefault();
    event.stopPropagation();
    const to = targets[event.key];
    if (to >= 0 && to <= last) this.move(to, true);
  }

  /** Finds the next rank that is dead or failed. @param {1 | -1} step */
  next(step) {
    const count = this.states.length;
    for (let i = 1; i <= count; i++) {
      const rank = (this.at + step * i + count) % count;
      if (this.states[rank] === 3 || this.states[rank] === 4) return rank;
    }
    return this.at;
  }

  /** @param {number} rank @param {boolean} isSpoken */
  move(rank, isSpoken) {
    this.at = rank;
    const [x, y] = this.place(rank);
    this.cursor.style.transform = `translate(${x}px, ${y}px)`;
    this.cursor.style.width = this.cursor.style.height = `${this.grid.pitch}px`;
    mark(this.cursor, "aria-colindex", String((rank % this.grid.columns) + 1));
    mark(/** @type {Element} */ (this.cursor.parentElement), "aria-rowindex", String(Math.floor(rank / this.grid.columns) + 1));
    this.label();
    this.onInspect(rank);
    if (isSpoken) this.mesh.announce(this.name(rank));
  }

  label() {
    if (this.states.length) mark(this.cursor, "aria-label", this.name(this.at));
  }

  /** @param {number} rank */
  name(rank) {
    return `rank ${rank}, ${this.axes.length > 1 ? `${pointOf(rank, this.axes)}, ` : ""}${STATES[this.states[rank]]}`;
  }

  /** @param {MouseEvent} event */
  rankAt(event) {
    const box = this.canvas.getBoundingClientRect();
    return this.grid.rankAt(event.clientX - box.left - this.left, event.clientY - box.top - LABELS_TOP);
  }

  /** @param {PointerEvent} event */
  onPoint(event) {
    const rank = this.rankAt(event);
    if (rank < 0) return this.onLeave();
    const [x, y] = this.place(rank);
    this.hover.style.transform = `translate(${x}px, ${y}px)`;
    this.hover.style.width = this.hover.style.height = `${this.grid.pitch}px`;
    show(this.hover, true);
    this.onInspect(rank);
  }

  onLeave() {
    show(this.hover, false);
    this.onInspect(this.at);
  }

  dispose() {
    this.resized.disconnect();
  }
}

/**
 * Draws the tile of a state once, and returns its pixels.
 * @param {State} state @param {number} pitch @param {number} ratio @param {string} colour @param {string} paper
 */
function sprite(state, pitch, ratio, colour, paper) {
  const canvas = element("canvas");
  canvas.width = canvas.height = Math.round(pitch * ratio);
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d", { willReadFrequently: true }));
  // The background covers the previous tile.
  context.fillStyle = paper;
  context.fillRect(0, 0, canvas.width, canvas.height);
  const gap = pitch > 10 ? 2 : 1;
  const scale = ((pitch - gap) * ratio) / 16;
  context.setTransform(scale, 0, 0, scale, (gap * ratio) / 2, (gap * ratio) / 2);
  const tile = TILES[state];
  const outline = new Path2D(tile.outline);
  context.fillStyle = context.strokeStyle = colour;
  context.globalAlpha = tile.fill;
  context.fill(outline);
  context.globalAlpha = 1;
  context.lineWidth = ratio / scale;
  if (tile.dash) context.setLineDash([3, 3]);
  if (tile.fill < 1) context.stroke(outline);
  if (tile.mark && pitch > 8) {
    context.setLineDash([]);
    context.lineWidth = 2.2;
    context.lineCap = "round";
    context.strokeStyle = paper;
    context.stroke(new Path2D(tile.mark));
  }
  return new Uint32Array(context.getImageData(0, 0, canvas.width, canvas.height).data.buffer);
}

/** The ranks that need attention, one per row. */
class Attention {
  /** @param {Mesh} mesh */
  constructor(mesh) {
    this.mesh = mesh;
    /** @type {RankFrame[]} */
    this.ranks = [];
    // The roles are those of the elements, which lose them on narrow pages, where the style sheet arranges them in another way.
    this.body = element("tbody", "", { role: "rowgroup" });
    this.title = element("caption", "mk-title");
    this.node = element("table", "mk-table", { role: "table" },
      this.title,
      element("thead", "", { role: "rowgroup" }, element("tr", "", { role: "row" },
        ...["rank", "state", "what", "for"].map((title) => element("th", "", { scope: "col", role: "columnheader" }, title)))),
      this.body);
  }

  /** @param {MeshFrame} frame @param {number} at */
  draw(frame, at) {
    this.ranks = frame.ranks ?? [];
    show(this.node, this.ranks.length > 0);
    write(this.title, this.ranks.some((rank) => rank.state !== "running") ? "Needs attention" : "Longest running");
    while (this.body.rows.length > this.ranks.length) this.body.deleteRow(-1);
    while (this.body.rows.length < this.ranks.length) {
      const cell = (/** @type {(Node | string)[]} */ ...children) => element("td", "", { role: "cell" }, ...children);
      this.body.append(element("tr", "", { role: "row" }, element("th", "", { scope: "row", role: "rowheader" }),
        cell(new Tile().node, element("span")), cell(), cell()));
    }
    this.ranks.forEach((rank, i) => this.drawRow(this.body.rows[i], rank, frame));
    this.tick(at);
  }

  /** @param {HTMLTableRowElement} row @param {RankFrame} rank @param {MeshFrame} frame */
  drawRow(row, rank, frame) {
    const [name, state, what] = row.cells;
    write(name, String(rank.rank));
    const word = /** @type {Element} */ (state.lastElementChild);
    if (word.textContent !== rank.state) {
      const tile = new Tile();
      tile.draw(rank.state);
      state.replaceChildren(tile.node, element("span", "", {}, rank.state));
    }
    const waits = rank.waits ? `, waits in ${rank.waits}` : "";
    write(what, doing(rank) + waits || errorOf(rank.rank, frame) || "–");
  }

  /** @param {number} at */
  tick(at) {
    this.node.classList.toggle("mk-timeless", !this.ranks.some((rank) => rank.since));
    this.ranks.forEach((rank, i) => write(this.body.rows[i].cells[3], rank.since ? span(at - rank.since) : ""));
  }
}

/** Returns the headline of a rank's error, if the frame has it. @param {number} rank @param {MeshFrame} frame */
const errorOf = (rank, frame) => (frame.errors ?? []).find((each) => names(each.ranks, rank))?.text ?? "";

/** A large mesh: its map, the inspected rank, and the ranks that need attention. */
class Large {
  /** @param {Mesh} mesh */
  constructor(mesh) {
    this.mesh = mesh;
    this.at = 0;
    /** @type {MeshFrame | null} */
    this.frame = null;
    this.tile = new Tile();
    this.name = element("span", "mk-rank");
    this.word = element("span", "mk-state");
    this.where = element("div", "mk-place");
    this.more = element("div", "mk-more");
    this.replies = new Replies(mesh);
    const ask = (/** @type {Command} */ command) => () => mesh.ask(command, { ranks: [this.pinned] }, { replies: this.replies });
    this.pinned = 0;
    this.buttons = [button("Interrupt", ask("interrupt"), "mk-button mk-small"), button("Logs", ask("logs"), "mk-button mk-small"),
      button("Traceback", ask("traceback"), "mk-button mk-small")];
    this.inspector = element("div", "mk-inspector", { role: "group", "aria-label": "One rank" },
      element("div", "mk-card-head", {}, this.tile.node, this.name, this.word), this.where, this.more,
      element("div", "mk-tools", {}, ...this.buttons));
    this.map = new HeatMap(mesh, (rank) => this.inspect(rank));
    this.attention = new Attention(mesh);
    this.node = element("div", "mk-large", {}, this.map.node,
      element("div", "mk-side", {}, this.inspector, this.replies.node, this.attention.node,
        element("p", "mk-hint", {}, "Arrow keys move the cursor; n and p go to the next and previous rank that failed or died.")));
  }

  /** @param {MeshFrame} frame @param {number} at */
  draw(frame, at) {
    this.frame = frame;
    this.map.draw(frame);
    this.attention.draw(frame, at);
    this.replies.check(at);
    this.inspect(this.at);
  }

  /** @param {number} at */
  tick(at) {
    this.map.tick();
    this.attention.tick(at);
  }

  /** @param {number} rank */
  inspect(rank) {
    const frame = this.frame;
    if (!frame) return;
    this.at = rank;
    this.pinned = this.map.at;
    const state = STATES[this.map.states[rank]] ?? "starting";
    this.tile.draw(state);
    write(this.name, `rank ${rank}`);
    write(this.word, state);
    write(this.where, pointOf(rank, frame.axes));
    const told = frame.ranks?.find((each) => each.rank === rank);
    const hasError = state === "failed" || state === "dead";
    write(this.more, [told ? doing(told) : "", waitsOf(rank, frame), hasError ? errorOf(rank, frame) : ""].filter(Boolean).join(" · "));
    this.buttons.forEach((each) => mark(each, "aria-label", `${each.textContent} of rank ${this.pinned}`));
    const { isOpen } = this.mesh.page;
    const end = endOf(`rank ${this.pinned}`, STATES[this.map.states[this.pinned]]);
    withhold(this.buttons[0], isOpen, end);
    withhold(this.buttons[1], isOpen, end.endsWith("stopped") ? `${end}, and its output is no longer kept` : "");
    enable(this.buttons[2], hasError && isOpen);
  }

  enable() {
    this.inspect(this.at);
  }

  dispose() {
    this.map.dispose();
  }
}

// --- Errors and replies -----------------------------------------------------------------------------------------------

/** The errors of a mesh, each with its traceback once the user requested it. */
class Errors {
  /** @param {Mesh} mesh */
  constructor(mesh) {
    this.mesh = mesh;
    /** @type {Map<string, {node: HTMLElement, draw: (error: ErrorFrame, now: number) => void}>} */
    this.rows = new Map();
    this.list = element("ul", "mk-errors");
    this.more = element("p", "mk-hint");
    this.node = element("section", "mk-block", { "aria-label": `Errors of ${mesh.name}` }, element("h4", "mk-title", {}, "Errors"), this.list, this.more);
  }

  /** @param {MeshFrame} frame @param {number} now */
  draw(frame, now) {
    const errors = frame.errors ?? [];
    show(this.node, errors.length > 0);
    const keys = errors.map((error) => `${error.is_death ? "dead" : "failed"} ${error.text}`);
    // An error that becomes one of the past keeps its row, unless other ranks have it now.
    keys.forEach((key, i) => keys.indexOf(key) < i && (keys[i] = `past ${key}`));
    errors.forEach((error, i) => {
      const row = this.rows.get(keys[i]) ?? this.add(keys[i]);
      row.draw(error, now);
      // Move only rows at another position, because a move takes the focus away.
      if (this.list.children[i] !== row.node) this.list.insertBefore(row.node, this.list.children[i] ?? null);
    });
    for (const [key, row] of this.rows) {
      if (keys.includes(key)) continue;
      row.node.remove();
      this.rows.delete(key);
    }
    const more = frame.more_errors ?? 0;
    writeOrHide(this.more, more ? `and ${counted(more, "other error")}` : "");
  }

  /** @param {string} key */
  add(key) {
    const tile = new Tile();
    const text = element("span", "mk-error-text");
    const ranksText = element("span", "mk-who");
    const time = element("time", "mk-hint");
    const pre = element("pre", "mk-pre", { tabindex: "0", role: "region" });
    pre.hidden = true;
    let rank = 0;
    let origin = "";
    const toggle = (/** @type {boolean} */ isOpen) => {
      show(pre, isOpen);
      mark(opener, "aria-expanded", String(isOpen));
    };
    const opener = button("Traceback", () => {
      toggle(pre.hidden);
      if (pre.hidden) return;
      write(pre, pre.textContent || "Asking the rank …");
      this.mesh.ask("traceback", { ranks: [rank] }, { onReply: (reply) => write(pre, plain(reply.text)) });
    }, "mk-button mk-small");
    mark(opener, "aria-expanded", "false");
    const node = element("li", "mk-error-row", {},
      element("div", "mk-error-head", {}, tile.node, element("div", "mk-error-words", {}, text, " ", element("span", "mk-whose", {}, ranksText, " ", time)), opener), pre);
    const draw = (/** @type {ErrorFrame} */ error, /** @type {number} */ now) => {
      const { at = 0, is_past = false } = error;
      // The same error at another time, or of other ranks, has another traceback.
      if (origin && origin !== `${error.rank} ${at}`) {
        toggle(false);
        write(pre, "");
      }
      origin = `${error.rank} ${at}`;
      rank = error.rank;
      node.classList.toggle("mk-past", is_past);
      write(time, [is_past ? "earlier" : "", at ? moment(at, now) : ""].filter(Boolean).join(", "));
      tile.draw(error.is_death ? "dead" : "failed");
      write(text, error.text);
      const ranks = error.ranks.replace(/[[\]]/g, "").replace(/,/g, ", ");
      write(ranksText, error.count === 1 ? `rank ${ranks}` : `${error.count.toLocaleString("en")} ranks: ${ranks}`);
      for (const each of [opener, pre]) mark(each, "aria-label", `Traceback of ${error.text}`);
    };
    this.rows.set(key, { node, draw });
    return { node, draw };
  }
}

/** For how long after a reply the frames that arrive may still be about the time of the reply. */
const SAME_S = 0.5;
/** The same for the lines of ranks: the kernel asks for them once a second. */
const SAME_LINES_S = 2;

/**
 * What a reply depends on: it is out of date when this has changed. Replies to other commands say what has happened.
 * @param {Command} command @param {number[] | undefined} ranks @param {MeshFrame | null} frame
 */
function basisOf(command, ranks, frame) {
  if (!frame) return "";
  const those = (frame.ranks ?? []).filter((each) => !ranks || ranks.includes(each.rank));
  // Logs remain those of a process, tracebacks hold until a rank runs something else, and stacks until it is at another line.
  if (command === "logs") return those.map(({ rank, restarts = 0 }) => `${rank} ${restarts}`).join();
  if (command !== "stacks" && command !== "traceback") return "";
  if (frame.states && ranks) return ranks.map((rank) => STATES[unpackStates(frame.states ?? "", rankCount(frame))[rank]]).join();
  if (frame.states) return frame.states;
  return those.map(({ rank, state, activity, since, restarts }) => [rank, state, activity, since, restarts].join(" ")).join();
}

/**
 * The lines of ranks, on which stacks depend, too.
 * @param {Command} command @param {number[] | undefined} ranks @param {MeshFrame | null} frame
 */
function linesOf(command, ranks, frame) {
  if (command !== "stacks") return "";
  const those = (frame?.ranks ?? []).filter((each) => !ranks || ranks.includes(each.rank));
  return those.map(({ line, waits }) => `${line} ${waits}`).join();
}

/** Commands whose reply is text to read, so it takes the focus. @type {Command[]} */
const READ = ["stacks", "logs", "traceback"];

/** The replies to commands of one place on the page, which they open next to, until the user dismisses them. */
class Replies {
  /** @param {Mesh} mesh */
  constructor(mesh) {
    this.mesh = mesh;
    this.node = element("ul", "mk-replies", { "aria-label": "Answers" });
    this.node.hidden = true;
    /** The replies that can become out of date. @type {Map<HTMLElement, (now: number) => void>} */
    this.checks = new Map();
  }

  /** Greys replies that no longer hold. @param {number} now */
  check(now) {
    for (const [node, check] of this.checks) node.isConnected ? check(now) : this.checks.delete(node);
  }

  /**
   * Adds an empty reply, and returns a function that fills it.
   * @param {string} title @param {Command} command @param {number[] | undefined} ranks @param {(() => void) | null} abort
   */
  expect(title, command, ranks, abort) {
    const opener = /** @type {HTMLElement | null} */ (document.activeElement);
    const word = element("span", "mk-reply-word", {}, "waiting …");
    const text = element("pre", "mk-pre", { tabindex: "0", role: "region", "aria-label": title });
    text.hidden = true;
    const time = element("time", "mk-hint");
    const dismiss = button("Dismiss", () => this.remove(node, opener), "mk-button mk-small mk-dismiss");
    mark(dismiss, "aria-label", `Dismiss ${title}`);
    const head = element("div", "mk-reply-head", {}, element("span", "mk-reply-title", {}, title), word, time, dismiss);
    // In JupyterLab, keys that are pressed in the reply would otherwise trigger shortcuts of the notebook.
    const node = element("li", "mk-reply", { tabindex: "-1", "data-lm-suppress-shortcuts": "true" }, head, text);
    node.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || event.defaultPrevented) return;
      event.stopPropagation();
      this.remove(node, opener);
    });
    this.node.prepend(node);
    while (this.node.children.length > MAX_REPLIES) this.node.lastElementChild?.remove();
    show(this.node, true);
    const isRead = READ.includes(command);
    if (isRead) node.focus();
    return (/** @type {ReplyMessage} */ reply) => {
      const said = plain(reply.text).trim();
      const isLong = said.includes("\n");
      node.classList.toggle("mk-refused", !reply.ok);
      write(word, isLong ? (reply.ok ? "" : "failed") : said || (reply.ok ? "done" : "failed"));
      write(text, isLong ? said : "");
      show(text, isLong);
      const at = this.mesh.page.kernelTime();
      let basis = basisOf(command, ranks, this.mesh.frame);
      let lines = linesOf(command, ranks, this.mesh.frame);
      write(time, moment(at, at));
      this.checks.set(node, (now) => {
        const current = basisOf(command, ranks, this.mesh.frame);
        const currentLines = linesOf(command, ranks, this.mesh.frame);
        if (now <= at + SAME_S) basis = current;
        if (now <= at + SAME_LINES_S) lines = currentLines;
        const isPast = current !== basis || currentLines !== lines;
        if (isPast) this.checks.delete(node);
        node.classList.toggle("mk-past", isPast);
        write(time, moment(at, now) + (isPast ? ", out of date" : ""));
      });
      if (isLong && document.activeElement === node) text.focus();
      if (isRead) node.scrollIntoView({ block: "nearest" });
      if (!reply.ok && abort) {
        head.insertBefore(confirmed("Abort", "Abort its process groups?", this.mesh.announce, abort), dismiss);
      }
      this.mesh.announce(`${title}: ${said.split("\n")[0] || (reply.ok ? "done" : "failed")}`);
    };
  }

  /** Removes a reply; the focus returns to the button that asked for it. @param {HTMLElement} node @param {HTMLElement | null} opener */
  remove(node, opener) {
    const isFocused = node.contains(document.activeElement);
    const next = /** @type {HTMLElement | null} */ (node.nextElementSibling ?? node.previousElementSibling);
    node.remove();
    show(this.node, this.node.children.length > 0);
    if (!isFocused) return;
    const isThere = opener && opener.isConnected && this.mesh.node.contains(opener) && opener.offsetParent;
    const to = isThere ? opener : (next ?? this.mesh.actions).querySelector("button");
    /** @type {HTMLElement | null} */ (to)?.focus();
  }
}

// --- Loops ------------------------------------------------------------------------------------------------------------

/** Formats a number with a readable number of digits. @param {number | null} value */
function figure(value) {
  if (value === null) return "not a number";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 });
}

/** Formats floating-point operations per second: `413 TFLOP/s`. @param {number} rate */
function flops(rate) {
  const power = Math.max(0, Math.min(6, Math.floor(Math.log10(Math.max(rate, 1)) / 3)));
  return `${Number((rate / 1000 ** power).toPrecision(3))} ${["", "k", "M", "G", "T", "P", "E"][power]}FLOP/s`;
}

/** Formats the duration of one step: `12.3 ms`, `2.4 s`. @param {number} seconds */
const stepTime = (seconds) => (seconds < 1 ? `${(seconds * 1000).toPrecision(3)} ms` : `${seconds.toPrecision(3)} s`);

/** Formats a rate of steps: `0.45`, `81.2`, `1,035`. @param {number} rate */
const speed = (rate) => (rate < 99.95 ? String(Number(rate.toPrecision(3))) : Math.round(rate).toLocaleString("en"));

/** Finds runs of consecutive values that are not null; returns the indices of each run. @param {(number | null)[]} values */
function runs(values) {
  /** @type {number[][]} */
  const found = [];
  values.forEach((value, i) => {
    if (value === null) return;
    if (i === 0 || values[i - 1] === null) found.push([i]);
    else found[found.length - 1].push(i);
  });
  return found;
}

/**
 * How the curves of a loop are drawn: what the user chose.
 * @typedef {object} Look
 * @property {boolean} isLog whether the scale is logarithmic
 * @property {number} smoothing the weight of earlier values in a moving average; 0 for none
 * @property {boolean} hasEarlier whether the curves of earlier loops are drawn, too
 * @property {[number, number] | null} range the first and the last step that are drawn; null for all
 */

/**
 * What a chart draws of one loop. Values that can't be drawn are null.
 * @typedef {object} Trace
 * @property {string} where
 * @property {number[]} steps
 * @property {(number | null)[]} means
 * @property {(number | null)[]} leasts
 * @property {(number | null)[]} mosts
 * @property {(number | null)[]} smooth the means, or their moving average
 * @property {number[]} leastRanks
 * @property {number[]} mostRanks
 */

/** Computes a moving average that is not drawn towards zero at the start. @param {(number | null)[]} values @param {number} weight */
function smoothed(values, weight) {
  if (weight === 0) return values;
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/** @param {import("./view.js").Points} points @param {Look} look @param {string} where @returns {Trace} */
function traceOf([steps, means, leasts, mosts, , leastRanks = [], mostRanks = []], look, where) {
  const [first, last] = look.range ?? [-Infinity, Infinity];
  const isShown = (/** @type {unknown} */ _, /** @type {number} */ i) => steps[i] >= first && steps[i] <= last;
  const usable = (/** @type {number | null} */ value) => (value === null || (look.isLog && value <= 0) ? null : value);
  const usableMeans = means.map(usable);
  return {
    where,
    steps: steps.filter(isShown),
    means: usableMeans.filter(isShown),
    smooth: smoothed(usableMeans, look.smoothing).filter(isShown),
    leasts: leasts.map(usable).filter(isShown),
    mosts: mosts.map(usable).filter(isShown),
    leastRanks: leastRanks.filter(isShown),
    mostRanks: mostRanks.filter(isShown),
  };
}

/** Whether some value can be drawn on a logarithmic scale. @param {import("./view.js").Points} points */
const hasPositive = ([, means]) => means.some((mean) => mean !== null && mean > 0);

/** The chart of one metric: the mean of the ranks as a line, in a band from the minimum to the maximum. */
class Curve {
  /** @param {string} name @param {Loop} loop */
  constructor(name, loop) {
    this.name = name;
    this.loop = loop;
    /** @type {import("./view.js").Points | null} */
    this.points = null;
    /** @type {Trace[]} */
    this.traces = [];
    /** The first step and the number of steps of the chart. */
    this.first = 0;
    this.width = 1;
    /** The step at the cursor; null without one. @type {number | null} */
    this.at = null;
    this.told = "";
    /** Where the pointer was pressed, as a part of the width; null while it is not. @type {number | null} */
    this.pressed = null;
    this.band = drawing("path", { class: "mk-band" });
    this.raw = drawing("path", { class: "mk-raw" });
    this.others = drawing("g", {});
    this.line = drawing("path", { class: "mk-in" });
    this.chosen = drawing("rect", { class: "mk-chosen", y: "0", height: "100", width: "0" });
    this.cursor = drawing("path", { class: "mk-at" });
    this.chart = drawing("svg", { viewBox: "0 0 300 100", preserveAspectRatio: "none", class: "mk-curve-chart", role: "img" },
      this.band, this.others, this.raw, this.line, this.chosen, this.cursor);
    this.tip = element("div", "mk-tip", { "aria-hidden": "true" });
    this.tip.hidden = true;
    this.last = element("span", "mk-figure");
    this.most = element("span");
    this.least = element("span");
    this.from = element("span");
    this.to = element("span");
    this.scale = element("div", "mk-scale", { "aria-hidden": "true" }, this.most, this.least);
    this.ends = element("div", "mk-ends");
    // Otherwise the command-mode shortcuts of JupyterLab would take the arrow keys.
    this.area = element("div", "mk-curve-area", { tabindex: "0", role: "group", "data-lm-suppress-shortcuts": "true",
      "aria-label": `Curve ${name}: arrow keys read values, plus and minus zoom, Escape shows all steps` },
      /** @type {Node} */ (this.chart));
    this.plot = element("div", "", {},
      element("div", "mk-curve-plot", {}, this.area,
        this.scale, this.tip),
      element("div", "mk-span", { "aria-hidden": "true" }, this.from, this.to), this.ends);
    this.plot.hidden = true;
    this.node = element("li", "mk-curve", {},
      element("div", "mk-curve-head", {}, element("span", "mk-curve-name", {}, name), this.last), this.plot);
    this.area.addEventListener("pointerdown", (event) => this.onPress(event));
    this.area.addEventListener("pointermove", (event) => this.onMove(event));
    this.area.addEventListener("pointerup", (event) => this.onRelease(event));
    this.area.addEventListener("pointercancel", () => this.choose(null));
    this.area.addEventListener("pointerleave", () => this.pressed === null && this.point(null));
    this.area.addEventListener("dblclick", () => loop.zoom(null));
    this.area.addEventListener("keydown", (event) => this.onKey(event));
    this.area.addEventListener("blur", () => this.point(null));
  }

  /** @param {number | null} last */
  tell(last) {
    write(this.last, figure(last));
  }

  /** @param {import("./view.js").Points} points */
  draw(points) {
    this.points = points;
    this.render();
  }

  /** Draws the points as the user has chosen. */
  render() {
    if (!this.points) return;
    show(this.plot, this.points[1].some((mean) => mean !== null));
    if (this.plot.hidden) return;
    const { isLog, hasEarlier, smoothing, range } = this.loop.look;
    const look = { isLog: isLog && hasPositive(this.points), hasEarlier, smoothing, range };
    const earlier = hasEarlier ? this.loop.earlier : [];
    const main = traceOf(this.points, look, "");
    const others = earlier.filter(({ curves }) => this.name in curves).map(({ where, curves }) => traceOf(curves[this.name], look, where));
    this.traces = [main, ...others];
    const values = this.traces.flatMap(({ means, leasts, mosts }, i) => (i === 0 && !smoothing ? [...means, ...leasts, ...mosts] : means));
    const all = /** @type {number[]} */ (values.filter((value) => value !== null));
    const steps = this.traces.flatMap((trace) => trace.steps);
    if (all.length === 0) return;
    const least = Math.min(...all);
    const greatest = Math.max(...all);
    const most = greatest - least <= ROUNDING * Math.max(Math.abs(least), Math.abs(greatest)) ? least : greatest;
    this.first = Math.min(...steps);
    this.width = Math.max(1, Math.max(...steps) - this.first);
    const scaled = look.isLog ? Math.log10 : (/** @type {number} */ value) => value;
    const [low, high] = [scaled(least), scaled(most)];
    /** @param {number} step @param {number | null} value */
    const place = (step, value) => {
      const y = most === least ? 50 : 97 - (94 * (scaled(/** @type {number} */ (value)) - low)) / (high - low);
      return `${this.x(step).toFixed(1)} ${y.toFixed(1)}`;
    };
    /** @param {Trace} trace @param {(number | null)[]} of */
    const lineOf = (trace, of) => {
      const path = runs(of).map((run) => `M${run.map((i) => place(trace.steps[i], of[i])).join("L")}`).join("");
      return of.filter((value) => value !== null).length === 1 ? `${path}h300` : path;
    };
    let band = "";
    if (main.leasts.length > 0 && !smoothing) {
      const bounded = main.means.map((mean, i) => (main.mosts[i] === null ? null : mean));
      for (const run of runs(bounded)) {
        const bottom = [...run].reverse().map((i) => place(main.steps[i], main.leasts[i] ?? least));
        band += `M${run.map((i) => place(main.steps[i], main.mosts[i])).join("L")}L${bottom.join("L")}Z`;
      }
    }
    mark(this.line, "d", lineOf(main, main.smooth));
    mark(this.raw, "d", smoothing ? lineOf(main, main.means) : "");
    mark(this.band, "d", band);
    while (this.others.childNodes.length > others.length) this.others.lastChild?.remove();
    while (this.others.childNodes.length < others.length) this.others.append(drawing("path", {}));
    others.forEach((trace, i) => {
      const path = /** @type {Element} */ (this.others.childNodes[i]);
      mark(path, "class", `mk-earlier mk-earlier-${others.length - 1 - i}`);
      mark(path, "d", lineOf(trace, trace.smooth));
    });
    const ends = this.points[4];
    write(this.ends, ends.map(([rank, value]) => `${figure(value)} rank ${rank}`).join(" to "));
    show(this.ends, ends.length > 0);
    write(this.most, figure(most));
    write(this.least, most === least ? "" : figure(least));
    this.scale.classList.toggle("mk-constant", most === least);
    write(this.from, `step ${this.first.toLocaleString("en")}`);
    write(this.to, Math.max(...steps).toLocaleString("en"));
    const known = /** @type {number[]} */ (main.means.filter((mean) => mean !== null));
    mark(this.chart, "aria-label", `${this.name} from step ${this.first} to ${Math.max(...steps)}: first ${figure(known[0] ?? null)}, `
      + `last ${figure(known[known.length - 1] ?? null)}, minimum ${figure(least)}, maximum ${figure(most)}`);
    this.point(this.at);
  }

  /** The place of a step in the chart. @param {number} step */
  x(step) {
    return (300 * (step - this.first)) / this.width;
  }

  // --- Values at a step, and zoom

  /** Returns where the pointer is, as a part of the width. @param {PointerEvent} event */
  part(event) {
    const box = this.area.getBoundingClientRect();
    return Math.max(0, Math.min(1, (event.clientX - box.left) / Math.max(1, box.width)));
  }

  /** Finds the step with a value that is nearest to a place. @param {number} step */
  nearest(step) {
    const { steps = [], means = [] } = this.traces[0] ?? {};
    /** @type {number | null} */
    let found = null;
    steps.forEach((each, i) => {
      if (means[i] !== null && (found === null || Math.abs(each - step) < Math.abs(found - step))) found = each;
    });
    return found;
  }

  /** Describes the values of a step: of the loop, with the ranks of the minimum and maximum, and of earlier loops. @param {number} step */
  valuesAt(step) {
    const lines = this.traces.map((trace, which) => {
      const i = trace.steps.reduce((best, each, at) => (Math.abs(each - step) < Math.abs(trace.steps[best] - step) ? at : best), 0);
      const value = trace.smooth[i] ?? null;
      if (trace.steps.length === 0 || value === null) return "";
      if (which > 0) return step > trace.steps[trace.steps.length - 1] ? "" : `${trace.where || "earlier"}: ${figure(value)}`;
      const rank = (/** @type {number} */ each) => (each >= 0 ? ` rank ${each}` : "");
      const [least, most] = [trace.leasts[i] ?? null, trace.mosts[i] ?? null];
      const spread = least === null || most === null || figure(least) === figure(most) ? ""
        : ` (${figure(least)}${rank(trace.leastRanks[i])} to ${figure(most)}${rank(trace.mostRanks[i])})`;
      return `step ${trace.steps[i].toLocaleString("en")}: ${figure(value)}${spread}`;
    });
    return lines.filter(Boolean);
  }

  /** Shows the values of a step, or none. @param {number | null} step */
  point(step) {
    const at = step === null ? null : this.nearest(step);
    this.at = at;
    show(this.tip, at !== null);
    mark(this.cursor, "d", at === null ? "" : `M${this.x(at).toFixed(1)} 0V100`);
    if (at === null) return;
    const lines = this.valuesAt(at);
    if (this.told !== lines.join("\n")) this.tip.replaceChildren(...lines.map((line) => element("div", "", {}, line)));
    this.told = lines.join("\n");
    this.tip.style.insetInlineStart = this.x(at) < 150 ? "0" : "auto";
    this.tip.style.insetInlineEnd = this.x(at) < 150 ? "auto" : "0";
  }

  /** Shows the part of the chart that is being chosen, or none. @param {[number, number] | null} parts */
  choose(parts) {
    if (parts === null) this.pressed = null;
    const [start, end] = parts ?? [0, 0];
    mark(this.chosen, "x", (300 * Math.min(start, end)).toFixed(1));
    mark(this.chosen, "width", (300 * Math.abs(end - start)).toFixed(1));
  }

  /** @param {PointerEvent} event */
  onPress(event) {
    if (event.button !== 0) return;
    this.pressed = this.part(event);
    this.area.setPointerCapture(event.pointerId);
  }

  /** @param {PointerEvent} event */
  onMove(event) {
    const part = this.part(event);
    this.point(this.first + part * this.width);
    if (this.pressed !== null) this.choose([this.pressed, part]);
  }

  /** @param {PointerEvent} event */
  onRelease(event) {
    if (this.pressed === null) return;
    const parts = [this.pressed, this.part(event)].sort((a, b) => a - b);
    this.choose(null);
    if (parts[1] - parts[0] > 0.02) this.loop.zoom([this.first + parts[0] * this.width, this.first + parts[1] * this.width]);
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    const { steps = [], means = [] } = this.traces[0] ?? {};
    const known = steps.filter((_, i) => means[i] !== null);
    if (event.altKey || event.ctrlKey || event.metaKey || known.length === 0) return;
    const i = this.at === null ? -1 : known.indexOf(this.at);
    /** @type {Record<string, number>} */
    const targets = { ArrowLeft: i < 0 ? known.length - 1 : i - 1, ArrowRight: i + 1, Home: 0, End: known.length - 1 };
    if (event.key in targets) {
      const to = known[Math.max(0, Math.min(known.length - 1, targets[event.key]))];
      this.point(to);
      this.loop.mesh.announce(`${this.name}, ${this.valuesAt(to).join("; ")}`);
    } else if (event.key === "+" || event.key === "-") {
      const middle = this.at ?? this.first + this.width / 2;
      const half = this.width * (event.key === "+" ? 0.25 : 1);
      this.loop.zoom([middle - half, middle + half]);
    } else if (event.key === "Escape") {
      this.point(null);
      this.loop.zoom(null);
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  }
}

/** Writes a field of a CSV file. @param {string | number | null | undefined} value */
function csvField(value) {
  const text = String(value ?? "");
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** Marks a name as text, which a spreadsheet would take for a formula. @param {string} name */
function csvName(name) {
  return /^[=+\-@\t\r\n]/.test(name) ? `'${name}` : name;
}

/** Writes curves as a CSV file, a line for each point. @param {Iterable<[string, import("./view.js").Points]>} curves */
function csvOf(curves) {
  const lines = ["name,step,mean,min,min_rank,max,max_rank"];
  for (const [name, [steps, means, leasts, mosts, , leastRanks = [], mostRanks = []]] of curves) {
    steps.forEach((step, i) => {
      const spread = leasts.length > 0 ? [leasts[i], leastRanks[i], mosts[i], mostRanks[i]] : [means[i], "", means[i], ""];
      lines.push([csvName(name), step, means[i], ...spread].map(csvField).join(","));
    });
  }
  return `${lines.join("\r\n")}\r\n`;
}

/** A text as part of a sentence. @param {string} text */
function short(text) {
  const characters = [...text];
  return characters.length <= SHOWN_CHARACTERS ? text : `${characters.slice(0, SHOWN_CHARACTERS).join("")}…`;
}

/** The controls of a knob: a field of its type, and a slider if it has bounds. */
class Knob {
  /** @param {KnobFrame} knob @param {(value: import("./view.js").KnobValue) => void} onTurn */
  constructor(knob, onTurn) {
    this.onTurn = onTurn;
    this.kind = typeof knob.value;
    this.isHeld = this.isCancelled = false;
    this.note = element("span", "mk-knob-note", { role: "status" });
    /** The value that was refused last, and why, until another one is set. @type {{typed: string, why: string} | null} */
    this.refused = null;
    const label = `Knob ${knob.name}`;
    // Otherwise keys that are typed in the field would trigger notebook shortcuts.
    const keys = { "data-lm-suppress-shortcuts": "true", autocomplete: "off", spellcheck: "false" };
    const isNumber = this.kind === "number";
    const type = this.kind === "boolean" ? "checkbox" : isNumber ? "number" : "text";
    this.field = element("input", `mk-field mk-${type}`, { type, "aria-label": label, ...(isNumber ? { step: "any" } : {}), ...keys });
    /** The last value that was sent: Enter causes no `change` event on some pages, and two on others. @type {string | null} */
    this.left = null;
    this.field.addEventListener("input", () => (this.left = null));
    this.field.addEventListener("change", () => this.leave());
    this.field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.cancel();
      else if (event.key === "Enter" && this.kind !== "boolean") this.leave();
    });
    /** @type {HTMLInputElement | null} */
    this.slider = null;
    if (isNumber && knob.low !== undefined && knob.high !== undefined && knob.high > knob.low) {
      this.slider = element("input", "mk-slider", { type: "range", min: "0", max: "1000", step: "1", "aria-label": `${label}, slider`, ...keys });
      this.slider.addEventListener("input", () => {
        this.isHeld = true;
        this.left = null;
        this.field.value = String(this.slid());
      });
      this.slider.addEventListener("change", () => this.turn());
      this.slider.addEventListener("blur", () => (this.isHeld = false));
    }
    this.frame = knob;
    this.node = element("li", "mk-knob", {}, element("span", "mk-knob-name", {}, plain(knob.name)), ...(this.slider ? [this.slider] : []), this.field, this.note);
  }

  /** Whether the slider is logarithmic, as for a learning rate. */
  get isLogarithmic() {
    const { low = 0, high = 0 } = this.frame;
    return low > 0 && high / low >= 100;
  }

  /** Reads the value of the slider, rounded to the slider's resolution. */
  slid() {
    const { low = 0, high = 0 } = this.frame;
    const part = Number(this.slider?.value) / 1000;
    if (part === 0 || part === 1) return part ? high : low;
    const value = this.isLogarithmic ? low * (high / low) ** part : low + (high - low) * part;
    return Number.isInteger(this.frame.value) && Number.isInteger(low) && high - low > 1 ? Math.round(value) : Number(value.toPrecision(3));
  }

  /** Discards the typed text; leaving the field would otherwise set the knob. */
  cancel() {
    this.isCancelled = true;
    this.field.blur();
    this.isCancelled = false;
    this.draw(this.frame);
  }

  leave() {
    const isSame = this.kind !== "boolean" && [this.left, this.shown].includes(this.field.value);
    if (this.isCancelled || isSame) return;
    this.left = this.field.value;
    this.turn();
  }

  /** The value of the knob, as the field shows it. */
  get shown() {
    return this.frame.value === null ? "" : String(this.frame.value);
  }

  turn() {
    this.isHeld = false;
    const typed = this.field.value;
    if (this.kind === "boolean") this.onTurn(this.field.checked);
    else if (this.kind !== "number") this.onTurn(typed);
    else if (typed.trim() && Number.isFinite(Number(typed))) this.onTurn(Number(typed));
    else this.refuse(typed, `knob '${this.frame.name}' is a number`);
  }

  /** @param {string} text */
  say(text) {
    this.refused = null;
    this.drawNote(text);
  }

  /** Shows the value in force in place of one that was refused, and says why. @param {string} typed @param {string} why */
  refuse(typed, why) {
    this.refused = { typed, why };
    this.isHeld = false;
    if (this.field.value === typed || this.field.validity.badInput) this.field.value = this.shown;
    this.left = null;
    this.draw(this.frame);
  }

  /** @param {string} [text] */
  drawNote(text) {
    this.node.classList.toggle("mk-refused-knob", this.refused !== null);
    if (this.refused) {
      const { typed, why } = this.refused;
      text = `${typed ? `${short(typed)} was refused` : "refused"}: ${why}. In force: ${short(this.shown) || "none"}`;
    }
    if (text !== undefined) write(this.note, text);
  }

  /** Shows the value of the knob, except in a control that the user is changing. @param {KnobFrame} knob */
  draw(knob) {
    this.frame = knob;
    if (this.refused) this.drawNote();
    if (this.isHeld) return;
    const value = this.shown;
    if (this.kind === "boolean") this.field.checked = knob.value === true;
    else if (this.field !== this.field.ownerDocument.activeElement && this.field.value !== value) {
      this.field.value = value;
      this.left = null;
    }
    if (!this.slider || typeof knob.value !== "number") return;
    const { low = 0, high = 0 } = knob;
    const part = this.isLogarithmic ? Math.log(knob.value / low) / Math.log(high / low) : (knob.value - low) / (high - low);
    const at = String(Math.round(1000 * part));
    if (this.slider.value !== at) this.slider.value = at;
    mark(this.slider, "aria-valuetext", value);
  }

  /** @param {boolean} can */
  enable(can) {
    for (const input of [this.field, this.slider]) if (input && input.disabled === can) input.disabled = !can;
  }
}

/** The states of a loop in which no command but the last stop has an effect any more. */
const ENDS = ["stopping", "over"];

/** A live loop: its progress, metrics, knobs and buttons. */
class Loop {
  /** @param {Mesh} mesh @param {LoopFrame} frame */
  constructor(mesh, frame) {
    this.mesh = mesh;
    this.key = /** @type {[number, number]} */ ([frame.request, frame.number]);
    this.state = frame.state;
    this.frame = frame;
    /** The states of the loop in which the last answer no longer holds. @type {string[]} */
    this.ends = [];
    /** @type {Map<string, Curve>} */
    this.curves = new Map();
    /** The curves of the loops that ended before. @type {import("./view.js").EarlierLoop[]} */
    this.earlier = [];
    /** @type {Look} */
    this.look = { isLog: false, smoothing: 0, hasEarlier: false, range: null };
    /** @type {Map<string, Knob>} */
    this.knobs = new Map();
    const where = frame.where || "a call";
    this.word = element("span", "mk-loop-state");
    this.facts = element("span", "mk-facts");
    this.time = element("span", "mk-facts");
    this.speed = element("span", "mk-speed");
    this.answer = element("p", "mk-hint", { role: "status" });
    this.pause = button("Pause", () => this.ask(this.isHalted ? "resume" : "pause"));
    this.step = button("Step", () => this.ask("step"));
    this.step.title = "Run one step, then pause again";
    this.stop = confirmed("Stop", "End the loop?", mesh.announce, () => this.ask("stop"));
    this.tools = element("div", "mk-actions", { role: "group", "aria-label": `Controls of the loop in ${where}` }, this.pause, this.step, this.stop);
    this.bar = element("div", "mk-bar", { role: "progressbar", "aria-label": `Steps of the loop in ${where}` }, element("div"));
    this.curveList = element("ul", "mk-curves", { "aria-label": "Curves" });
    const toggle = (/** @type {string} */ label, /** @type {(isOn: boolean) => void} */ onTurn) => {
      const made = button(label, () => {
        const isOn = made.getAttribute("aria-pressed") !== "true";
        mark(made, "aria-pressed", String(isOn));
        onTurn(isOn);
        this.render();
      }, "mk-button mk-small mk-toggle");
      mark(made, "aria-pressed", "false");
      return made;
    };
    this.earlierRuns = toggle("Earlier loops", (isOn) => (this.look.hasEarlier = isOn));
    this.earlierRuns.title = "Draw the curves of the loops that ended before, too";
    this.smoothing = element("select", "mk-field mk-select", { "aria-label": "Smoothing of the curves", "data-lm-suppress-shortcuts": "true" },
      ...[["0", "not smoothed"], ["0.6", "smoothed 0.6"], ["0.9", "smoothed 0.9"], ["0.98", "smoothed 0.98"]].map(([value, text]) =>
        element("option", "", { value }, text)));
    this.smoothing.addEventListener("change", () => {
      this.look.smoothing = Number(this.smoothing.value);
      this.render();
    });
    this.allSteps = button("All steps", () => this.zoom(null), "mk-button mk-small");
    this.allSteps.hidden = true;
    this.curveTools = element("div", "mk-curve-tools", { role: "group", "aria-label": `Display of the curves of the loop in ${where}` },
      toggle("Log scale", (isOn) => (this.look.isLog = isOn)), this.smoothing, this.earlierRuns, this.allSteps,
      button("CSV", () => this.save(), "mk-button mk-small"));
    this.curveTools.hidden = true;
    this.knobList = element("ul", "mk-knobs", { "aria-label": "Knobs" });
    this.node = element("section", "mk-block mk-loop", { "aria-label": `Loop in ${where}` },
      element("div", "mk-head", {},
        element("div", "mk-heading", {},
          element("h4", "mk-title", {}, `Loop in ${where}`), element("p", "mk-about", {}, this.word, this.facts, this.time, this.speed)),
        this.tools),
      this.bar, this.curveTools, this.curveList, this.knobList, this.answer);
  }

  /** Whether the loop is paused, or will be before one of its next steps. */
  get isHalted() {
    return this.state === "paused" || this.state === "pausing";
  }

  /** @param {LoopFrame} frame */
  draw(frame) {
    if (frame.state !== this.state && this.ends.includes(frame.state)) write(this.answer, "");
    this.state = frame.state;
    const { step = 0, steps, step_s = 0, knobs = [], metrics = [], per_s = [], mfu, loader } = frame;
    write(this.word, frame.state);
    const of = steps === undefined ? "" : ` of ${steps.toLocaleString("en")}`;
    const rates = per_s.map(([name, rate]) => (name === "flops" ? flops(rate) : `${figure(rate)} ${name}/s`));
    if (mfu !== undefined) rates.push(`MFU ${(100 * mfu).toFixed(1)} %`);
    if (loader) rates.push(loader);
    if (step_s) rates.unshift(`${stepTime(step_s)} a step`, `${speed(1 / step_s)} steps/s`);
    write(this.facts, `${DOT}${whole(`step ${step.toLocaleString("en")}${of}`)}`);
    write(this.speed, rates.map((rate) => (rate === loader ? rate : whole(rate))).join(DOT));
    this.frame = frame;
    write(this.pause, this.isHalted ? "Resume" : "Pause");
    show(this.tools, frame.state !== "over");
    show(this.bar, steps !== undefined);
    if (steps !== undefined) {
      const percent = steps ? Math.floor((100 * step) / steps) : 100;
      /** @type {HTMLElement} */ (this.bar.firstElementChild).style.width = `${percent}%`;
      mark(this.bar, "aria-valuenow", String(percent));
    }
    for (const [name, last] of metrics) this.curve(name).tell(last);
    for (const knob of knobs) this.knob(knob).draw(knob);
    show(this.curveList, this.curves.size > 0);
    show(this.knobList, this.knobs.size > 0);
    this.enable();
  }

  /** @param {number} at */
  tick(at) {
    const { since, took, left_s } = this.frame;
    const left = left_s === undefined ? "" : `${DOT}${whole(`${span(left_s)} left`)}`;
    write(this.time, `${DOT}${whole(`${span(took || at - since)} elapsed`)}${left}`);
  }

  /** @param {Record<string, import("./view.js").Points>} curves @param {import("./view.js").EarlierLoop[]} earlier */
  drawCurves(curves, earlier) {
    this.earlier = earlier;
    for (const [name, points] of Object.entries(curves)) this.curve(name).draw(points);
    show(this.curveList, this.curves.size > 0);
    show(this.curveTools, Object.values(curves).some(([steps]) => steps.length > 1));
    show(this.earlierRuns, earlier.some((each) => Object.keys(each.curves).some((name) => name in curves)));
  }

  /** Draws all curves as the user has chosen. */
  render() {
    for (const curve of this.curves.values()) curve.render();
  }

  /** Shows a part of the steps in all curves, or all steps. @param {[number, number] | null} range */
  zoom(range) {
    const steps = [...this.curves.values()].flatMap((curve) => curve.points?.[0] ?? []);
    const isPart = range !== null && steps.some((step) => step < range[0] || step > range[1]);
    // A range without a point would show nothing.
    if (isPart && steps.filter((step) => step >= range[0] && step <= range[1]).length < 2) return;
    this.look.range = isPart ? range : null;
    show(this.allSteps, isPart);
    this.render();
  }

  /** Saves the curves as a CSV file. */
  save() {
    /** @type {[string, import("./view.js").Points][]} */
    const curves = [];
    for (const [name, { points }] of this.curves) if (points) curves.push([name, points]);
    const href = URL.createObjectURL(new Blob([csvOf(curves)], { type: "text/csv" }));
    element("a", "", { href, download: `${this.mesh.name}-loop-${this.key.join("-")}.csv` }).click();
    setTimeout(() => URL.revokeObjectURL(href), ARMED_MS);
  }

  /** @param {string} name */
  curve(name) {
    let curve = this.curves.get(name);
    if (!curve) {
      this.curves.set(name, (curve = new Curve(name, this)));
      this.curveList.append(curve.node);
    }
    return curve;
  }

  /** @param {KnobFrame} frame */
  knob(frame) {
    let knob = this.knobs.get(frame.name);
    if (!knob) {
      const made = new Knob(frame, (value) => this.ask("set", { knob: frame.name, value }, (reply) => {
        if (reply.ok) made.say(reply.text.replace(/^.* (from step [\d,]+) on$/, "$1"));
        else made.refuse(String(value), reply.text);
        this.mesh.announce(reply.text);
      }));
      this.knobs.set(frame.name, (knob = made));
      this.knobList.append(made.node);
    }
    return knob;
  }

  enable() {
    const can = this.mesh.page.isOpen && !ENDS.includes(this.state);
    for (const each of [this.pause, this.step, this.stop]) enable(each, can);
    for (const knob of this.knobs.values()) knob.enable(can);
  }

  /**
   * @param {import("./view.js").LoopCommand} command @param {{knob?: string, value?: import("./view.js").KnobValue}} [more]
   * @param {(reply: ReplyMessage) => void} [onReply]
   */
  ask(command, more = {}, onReply) {
    this.mesh.page.ask({ command, mesh: this.mesh.name, loop: this.key, ...more }, onReply ?? ((reply) => {
      const now = this.mesh.page.kernelTime();
      const said = `${command[0].toUpperCase()}${command.slice(1)}: ${reply.text}`;
      this.ends = { pause: ["running", ...ENDS], resume: ["pausing", "paused", ...ENDS], step: ENDS, stop: [], set: ENDS }[command];
      write(this.answer, `${said} (${moment(now, now)})`);
    }));
  }
}

// --- Trajectories -----------------------------------------------------------------------------------------------------

/** The last samples that the ranks of a mesh have shown, the newest first. */
class Trajectories {
  /** @param {string} mesh */
  constructor(mesh) {
    /** @type {import("./view.js").Sample[] | null} */
    this.pending = null;
    this.count = element("span", "mk-hint");
    this.held = element("p", "mk-hint", {}, "Newer samples are above. Scroll to the top to see them.");
    this.held.hidden = true;
    this.list = element("ul", "mk-samples", { tabindex: "0", "aria-label": `Trajectories of ${mesh}`, "data-lm-suppress-shortcuts": "true" });
    this.node = element("details", "mk-block mk-trajectories", { open: "" },
      element("summary", "", {}, element("span", "mk-title", {}, "Trajectories"), " ", this.count), this.held, this.list);
    this.node.hidden = true;
    this.list.addEventListener("scroll", () => this.render());
  }

  /** @param {import("./view.js").TrajectoriesMessage} message */
  draw({ count, samples }) {
    this.pending = samples;
    show(this.node, samples.length > 0);
    write(this.count, `the last ${samples.length} of ${counted(count, "sample")}`);
    this.render();
  }

  /** Draws what has arrived, unless the user has scrolled to read something. */
  render() {
    const isHeld = this.pending !== null && this.list.scrollTop > 0;
    show(this.held, isHeld);
    if (isHeld || this.pending === null) return;
    this.list.replaceChildren(...this.pending.map(([rank, version, reward, prompt, completion]) => {
      const facts = [`rank ${rank}`, ...(version === null ? [] : [`version ${version}`])];
      const earned = typeof reward === "number" ? reward.toPrecision(4).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "") : reward;
      return element("li", "mk-sample", {},
        element("p", "mk-sample-head", {}, element("span", "mk-hint", {}, facts.join(" · ")),
          ...(earned === null ? [] : [element("span", "mk-figure", {}, `reward ${earned}`)])),
        element("p", "mk-prompt", {}, prompt), element("p", "mk-completion", {}, completion));
    }));
    this.pending = null;
  }
}

// --- Distributed tensors ----------------------------------------------------------------------------------------------

/** How much memory the distributed tensors on a mesh have, and which lines of the program made them. */
class Tensors {
  constructor() {
    this.sum = element("span", "mk-hint");
    this.list = element("ul", "mk-tensors");
    this.more = element("p", "mk-hint");
    this.node = element("details", "mk-block mk-tensors-block", {},
      element("summary", "", {}, element("span", "mk-title", {}, "Distributed tensors"), " ", this.sum), this.list, this.more);
    this.drawn = "";
    show(this.node, false);
  }

  /** @param {import("./view.js").TensorsFrame | undefined} frame */
  draw(frame) {
    show(this.node, frame !== undefined);
    if (frame === undefined) return;
    const { count, nbytes, outstanding = 0, lines = [], more = 0 } = frame;
    write(this.sum, [`${count.toLocaleString("en")} with ${bytes(nbytes)} a rank`,
      ...(outstanding ? [`${counted(outstanding, "operation")} outstanding`] : [])].join(DOT));
    writeOrHide(this.more, more ? `and ${counted(more, "other line")}` : "");
    const drawn = JSON.stringify(lines);
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    this.list.replaceChildren(...lines.map(([line, tensors, size, ranks]) => element("li", "", {},
      element("span", "mk-figure", {}, bytes(size)),
      element("span", "mk-hint", {}, ` in ${counted(tensors, "tensor")}${ranks ? ` on ${ranks}` : ""}: `),
      element("code", "", {}, line || "an earlier line"))));
  }
}

// --- Meshes -----------------------------------------------------------------------------------------------------------

const TITLES = /** @type {Record<Command, string>} */ ({
  interrupt: "Interrupt", heal: "Heal", restart: "Restart", down: "Down", traceback: "Traceback", stacks: "Stacks", logs: "Logs",
});

/** One mesh, with all its parts. */
class Mesh {
  /** @param {string} name @param {Page} page */
  constructor(name, page) {
    this.name = name;
    this.page = page;
    this.announce = (/** @type {string} */ text) => page.announce(`${name}: ${text}`);
    /** @type {MeshFrame | null} */
    this.frame = null;
    /** @type {Cards | Large | null} */
    this.ranks = null;
    /** Number of commands that replace or end ranks and that the kernel has not answered yet. */
    this.underWay = 0;
    /** @type {Map<State, {node: HTMLElement, text: HTMLElement}>} */
    this.counts = new Map();
    this.history = page.history(name);
    this.traffic = new Traffic();
    /** @type {Map<string, Loop>} */
    this.loops = new Map();
    this.loopList = element("div", "mk-loops");
    this.trajectories = new Trajectories(name);
    this.tensors = new Tensors();
    this.waits = element("ul", "mk-stalls", { "aria-label": "Waits" });
    this.waits.hidden = true;
    this.errors = new Errors(this);
    this.replies = new Replies(this);
    this.facts = element("span", "mk-facts");
    this.age = element("span", "mk-age");
    this.countList = element("ul", "mk-counts", { "aria-label": "Ranks by state" });
    this.density = button("", () => this.ranks instanceof Cards && this.ranks.turn(), "mk-button mk-small");
    this.density.hidden = true;
    this.notes = element("ul", "mk-notes", { "aria-label": "Notes" });
    this.stacks = button("Stacks", () => this.ask("stacks"));
    this.interrupt = button("Interrupt", () => this.ask("interrupt"));
    this.heal = button("Heal", () => this.ask("heal"));
    this.restart = confirmed("Restart", "Restart all?", this.announce, () => this.ask("restart"));
    this.down = confirmed("Down", "Take it down?", this.announce, () => this.ask("down"));
    this.heal.title = "Start new processes for dead ranks; the other ranks keep their state";
    this.actions = element("div", "mk-actions", { role: "group", "aria-label": `Actions for ${name}` },
      this.interrupt, this.stacks, this.heal, this.restart, this.down);
    this.body = element("div", "mk-body");
    this.node = element("section", "mk-mesh", { "aria-label": `Mesh ${name}` },
      element("header", "mk-head", {},
        element("div", "mk-heading", {}, element("h3", "mk-name", {}, name), element("p", "mk-about", {}, this.facts, this.age)),
        this.actions),
      this.replies.node, element("div", "mk-summary", {}, element("div", "mk-counted", {}, this.countList, this.density), this.traffic.node),
      this.waits, this.loopList, this.trajectories.node, this.notes, this.errors.node, this.body, this.tensors.node);
    this.drawTrajectories();
  }

  /** @param {MeshFrame} frame @param {number} at */
  draw(frame, at) {
    this.announceChange(frame);
    this.frame = frame;
    const count = rankCount(frame);
    const axes = frame.axes.length > 1 ? frame.axes.map(([name, size]) => `${name} ${size}`).join(" × ") : `axis ${frame.axes[0][0]}`;
    const links = frame.links ? [`links: ${frame.links}`] : [];
    // The separator of the next part is here, so that no line begins with it.
    write(this.facts, [counted(count, "rank"), axes, frame.where, ...links, ...(frame.since || this.isStopped ? [""] : [])].join(" · "));
    this.drawCounts(frame);
    drawLines(this.notes, frame.notes ?? []);
    drawLines(this.waits, (frame.waits ?? []).map((wait) => wait.text));
    this.drawLoops(frame.loops ?? []);
    this.errors.draw(frame, at);
    this.replies.check(at);
    this.drawRanks(frame, at);
    this.tensors.draw(frame.tensors);
    this.history.tell([frame.in_rate ?? 0, frame.out_rate ?? 0], at);
    this.enable();
    this.tick(at);
  }

  /** Whether a program or `%mesh down` has ended all ranks. */
  get isStopped() {
    return this.frame !== null && this.frame.counts.stopped === rankCount(this.frame);
  }

  /** @param {MeshFrame} frame */
  drawCounts(frame) {
    for (const state of COUNTED) {
      const count = frame.counts[state] ?? 0;
      let item = this.counts.get(state);
      if (!item && !count) continue;
      if (!item) {
        const tile = new Tile();
        tile.draw(state);
        const text = element("span");
        item = { node: element("li", "mk-count", {}, tile.node, text), text };
        this.counts.set(state, item);
        const later = COUNTED.slice(COUNTED.indexOf(state) + 1).map((each) => this.counts.get(each)?.node).find(Boolean);
        this.countList.insertBefore(item.node, later ?? null);
      }
      show(item.node, count > 0);
      write(item.text, `${count.toLocaleString("en")} ${state}`);
    }
  }

  /** Offers the other density of the cards. @param {boolean} isCompact */
  sayDensity(isCompact) {
    write(this.density, isCompact ? "Full cards" : "Compact");
    this.density.title = isCompact ? "Show all figures of each rank" : "Show two lines for each rank";
  }

  /** @param {LoopFrame[]} frames */
  drawLoops(frames) {
    const keys = frames.map((frame) => `${frame.request} ${frame.number}`);
    for (const [key, loop] of this.loops) {
      if (keys.includes(key)) continue;
      loop.node.remove();
      this.loops.delete(key);
    }
    frames.forEach((frame, i) => {
      let loop = this.loops.get(keys[i]);
      if (!loop) {
        this.loops.set(keys[i], (loop = new Loop(this, frame)));
        this.loopList.insertBefore(loop.node, this.loopList.children[i] ?? null);
        this.drawCurves();
      }
      loop.draw(frame);
    });
    // Loops that are over are tall, and what needs attention comes before them.
    const isOver = frames.every((frame) => frame.state === "over");
    const after = isOver ? this.body : this.trajectories.node;
    if (this.loopList.nextSibling !== after) this.node.insertBefore(this.loopList, after);
  }

  /** Draws the last curves that arrived, possibly before the loop did. */
  drawCurves() {
    const { loops = [], earlier = [] } = this.page.curves.get(this.name) ?? {};
    for (const { request, number, curves } of loops) this.loops.get(`${request} ${number}`)?.drawCurves(curves, earlier);
  }

  /** Draws the last samples that arrived, possibly before the mesh did. */
  drawTrajectories() {
    const message = this.page.trajectories.get(this.name);
    if (message) this.trajectories.draw(message);
  }

  /** @param {MeshFrame} frame @param {number} at */
  drawRanks(frame, at) {
    const Kind = frame.states ? Large : Cards;
    if (!(this.ranks instanceof Kind)) {
      this.ranks?.dispose();
      this.ranks = new Kind(this);
      this.body.replaceChildren(this.ranks.node);
    }
    show(this.density, Kind === Cards && rankCount(frame) > 1);
    this.ranks.draw(frame, at);
  }

  /** Announces new waits, new dead or failed ranks, and the end of these, to screen readers. @param {MeshFrame} frame */
  announceChange(frame) {
    const before = this.frame?.counts;
    if (!before) return;
    /** @type {State[]} */
    const bad = ["dead", "failed"];
    const known = (this.frame?.waits ?? []).map(waiters);
    const began = (frame.waits ?? []).find((wait) => !known.includes(waiters(wait)));
    if (began) this.announce(began.text);
    else if (this.frame?.waits?.some(({ ranks }) => ranks) && !frame.waits?.length) this.announce("the waits have ended");
    const there = bad.filter((state) => frame.counts[state]);
    if (there.some((state) => (frame.counts[state] ?? 0) > (before[state] ?? 0))) {
      this.announce(there.map((state) => `${frame.counts[state]} ${state}`).join(", "));
    } else if (!there.length && !began && bad.some((state) => before[state])) {
      this.announce("no rank is dead or failed any more"); // what was announced stays on the page
    }
  }

  enable() {
    const isOpen = this.page.isOpen;
    const buttons = /** @type {NodeListOf<HTMLElement>} */ (this.node.querySelectorAll(".mk-actions button, .mk-body button, .mk-errors button"));
    if (this.node.classList.contains("mk-shut") === isOpen) {
      this.node.classList.toggle("mk-shut", !isOpen);
      buttons.forEach((each) => enable(each, isOpen));
    }
    const why = this.isStopped ? "All ranks were stopped" : "";
    for (const each of [this.interrupt, this.stacks]) withhold(each, isOpen, why);
    withhold(this.restart, isOpen, why && `${why}; %mesh up brings up another mesh`);
    this.ranks?.enable();
    for (const loop of this.loops.values()) loop.enable();
    enable(this.heal, isOpen && !this.underWay && (this.frame?.counts.dead ?? 0) > 0);
  }

  /** @param {number} at */
  tick(at) {
    if (!this.frame) return;
    write(this.age, this.isStopped ? "stopped" : this.frame.since ? `up for ${span(at - this.frame.since)}` : "");
    this.history.advance(at);
    this.traffic.draw(this.history, at);
    this.ranks?.tick(at);
    for (const loop of this.loops.values()) loop.tick(at);
  }

  /**
   * @param {Command} command @param {{ranks?: number[], abort?: boolean}} [more]
   * @param {{replies?: Replies, onReply?: (reply: ReplyMessage) => void}} [to]
   *   the list that shows the reply, by default that of the mesh, or what takes it
   */
  ask(command, more = {}, to = {}) {
    const { replies = this.replies, onReply } = to;
    const title = TITLES[command] + (more.ranks ? ` of rank ${more.ranks.join(", ")}` : "") + (more.abort ? ", aborting" : "");
    const abort = command === "interrupt" && !more.abort ? () => this.ask(command, { ...more, abort: true }, to) : null;
    const show = onReply ?? replies.expect(title, command, more.ranks, abort);
    const counts = ["heal", "restart", "down"].includes(command);
    this.underWay += Number(counts);
    this.page.ask({ command, mesh: this.name, ...more }, (reply) => {
      this.underWay -= Number(counts);
      this.enable();
      show(reply);
    });
    this.enable();
  }

  dispose() {
    this.ranks?.dispose();
    this.node.remove();
  }
}

const LATE = "The kernel has not answered yet. If this persists, run %mesh show or reload the page.";
const EMPTY = "No mesh. Run %mesh up NAME -n 4 in a cell.";

/** The contents of one root element. */
class Page {
  /** @param {HTMLElement} root @param {import("./view.js").Options} options */
  constructor(root, options) {
    this.root = root;
    this.options = options;
    this.now = options.now ?? (() => Date.now() / 1000);
    /** @type {"waiting" | "open" | "closed"} */
    this.link = "waiting";
    /** The clock of the kernel minus that of the browser; null while unknown. @type {number | null} */
    this.ahead = null;
    /** @type {Frame | null} */
    this.pending = null;
    this.drawnAt = 0;
    this.coming = "";
    this.isFit = true;
    this.isLate = false;
    this.asked = 0;
    this.prefix = Math.random().toString(36).slice(2, 10);
    /** @type {Map<string, (reply: ReplyMessage) => void>} */
    this.awaited = new Map();
    /** @type {Map<string, History>} */
    this.histories = new Map();
    /** @type {Map<string, import("./view.js").CurvesMessage>} */
    this.curves = new Map();
    /** @type {Map<string, import("./view.js").TrajectoriesMessage>} */
    this.trajectories = new Map();
    /** @type {Map<string, Mesh>} */
    this.meshes = new Map();
    this.banner = element("p", "mk-banner", { role: "status" });
    this.empty = element("p", "mk-empty");
    this.list = element("div", "mk-meshes");
    this.live = element("div", "mk-hidden", { "aria-live": "polite", "aria-atomic": "true" });
    root.classList.add("mk-view");
    root.append(this.banner, this.empty, this.list, this.live);
    this.onVisibility = () => this.sayPresence();
    this.onFocus = (/** @type {FocusEvent} */ event) => keepKeys(event);
    document.addEventListener("visibilitychange", this.onVisibility);
    root.addEventListener("focusin", this.onFocus);
    this.alive = window.setInterval(() => document.hidden || this.link === "closed" || this.options.send({ kind: "alive" }), ALIVE_MS);
    this.ticks = window.setInterval(() => document.hidden || this.tick(), 1000);
    this.request = 0;
    if (options.frame) this.draw(options.frame);
    this.say();
    this.sayPresence();
  }

  get isOpen() {
    return this.link === "open";
  }

  /** The time now, by the clock of the kernel. */
  kernelTime() {
    return this.now() + (this.ahead ?? 0);
  }

  sayPresence() {
    this.options.send({ kind: document.hidden ? "away" : "hello" });
  }

  /** @param {import("./view.js").FromKernel | import("./view.js").LinkMessage} message */
  receive(message) {
    if (message.kind === "frame") {
      this.pending = message;
      this.request ||= requestAnimationFrame(() => this.drawPending());
    } else if (message.kind === "history") {
      for (const [name, rates] of Object.entries(message.meshes)) this.history(name).seed(rates);
      this.tick();
    } else if (message.kind === "curves") {
      this.curves.set(message.mesh, { ...message, earlier: message.earlier ?? this.curves.get(message.mesh)?.earlier });
      this.meshes.get(message.mesh)?.drawCurves();
    } else if (message.kind === "trajectories") {
      this.trajectories.set(message.mesh, message);
      this.meshes.get(message.mesh)?.drawTrajectories();
    } else if (message.kind === "reply") {
      const onReply = this.awaited.get(message.id);
      this.awaited.delete(message.id);
      onReply?.(message);
    } else if (message.kind === "opened") {
      if (this.link === "closed") this.turn("waiting");
      this.sayPresence();
    } else if (message.kind === "late") {
      this.isLate = true;
      this.say();
    } else if (message.kind === "closed") {
      // Draw first: a frame that came before this message must not reopen the link.
      this.drawPending();
      this.turn("closed");
    }
  }

  drawPending() {
    this.request = 0;
    const frame = this.pending;
    this.pending = null;
    if (!frame) return;
    if (this.link !== "open") this.turn("open");
    this.draw(frame);
    this.say();
  }

  /** @param {"waiting" | "open" | "closed"} link */
  turn(link) {
    this.link = link;
    this.root.classList.toggle("mk-closed", link === "closed");
    if (link === "closed") {
      for (const [id, onReply] of this.awaited) onReply({ kind: "reply", id, ok: false, text: "the kernel did not answer" });
      this.awaited.clear();
    }
    for (const mesh of this.meshes.values()) mesh.enable();
    this.say();
  }

  /** @param {Frame} frame */
  draw(frame) {
    this.isFit = (frame.version ?? VERSION) <= VERSION;
    if (!this.isFit) return;
    this.setClock(frame.at);
    this.drawnAt = frame.at;
    this.coming = frame.coming ?? "";
    const frames = (frame.meshes ?? []).filter((each) => !this.options.mesh || each.name === this.options.mesh);
    for (const [name, mesh] of this.meshes) {
      if (frames.some((each) => each.name === name)) continue;
      mesh.dispose();
      this.meshes.delete(name);
      this.histories.delete(name);
      this.curves.delete(name);
      this.trajectories.delete(name);
    }
    frames.forEach((each, i) => {
      let mesh = this.meshes.get(each.name);
      if (!mesh) {
        mesh = new Mesh(each.name, this);
        this.meshes.set(each.name, mesh);
        this.list.insertBefore(mesh.node, this.list.children[i] ?? null);
      }
      mesh.draw(each, frame.at);
    });
  }

  /** Takes the offset of the least delayed frame, unless a clock was set. @param {number} at */
  setClock(at) {
    const ahead = at - this.now();
    this.ahead = this.ahead === null || Math.abs(ahead - this.ahead) > 1 ? ahead : Math.max(ahead, this.ahead);
  }

  tick() {
    if (this.ahead === null || this.link !== "open") return;
    for (const mesh of this.meshes.values()) mesh.tick(this.now() + this.ahead);
  }

  /** Writes the messages above the meshes, or in place of them. */
  say() {
    const when = this.drawnAt ? new Date(this.drawnAt * 1000).toLocaleTimeString() : "";
    const asOf = when ? ` Last update at ${when}.` : "";
    const lines = { waiting: asOf && `Waiting for the kernel.${asOf}`, open: "", closed: `Disconnected from the kernel.${asOf}` };
    writeOrHide(this.banner, this.isFit ? lines[this.link] : "This page is older than the kernel and can't show its meshes. Reload the page.");
    mark(this.banner, "data-kind", this.isFit ? this.link : "misfit");
    show(this.list, this.isFit);
    show(this.empty, this.isFit && this.meshes.size === 0 && this.link !== "closed");
    this.empty.classList.toggle("mk-soon", this.link === "waiting" && !when && !this.isLate);
    if (this.link === "waiting" && !when) write(this.empty, this.isLate ? LATE : "Waiting for the kernel …");
    else if (this.options.mesh) write(this.empty, `The mesh ${this.options.mesh} is not up.`);
    else write(this.empty, this.coming ? plain(this.coming) : EMPTY);
  }

  /** @param {string} text */
  announce(text) {
    // Screen readers announce a repeated text only if it differs.
    this.live.textContent = this.live.textContent === text ? `${text}\u00a0` : text;
  }

  /** @param {string} name */
  history(name) {
    let history = this.histories.get(name);
    if (!history) this.histories.set(name, (history = new History()));
    return history;
  }

  /** @param {Omit<import("./view.js").CommandMessage, "kind" | "id">} command @param {(reply: ReplyMessage) => void} onReply */
  ask(command, onReply) {
    const id = `${this.prefix}-${++this.asked}`;
    this.awaited.set(id, onReply);
    this.options.send({ kind: "command", id, ...command });
  }

  dispose() {
    cancelAnimationFrame(this.request);
    clearInterval(this.alive);
    clearInterval(this.ticks);
    document.removeEventListener("visibilitychange", this.onVisibility);
    this.root.removeEventListener("focusin", this.onFocus);
    for (const mesh of this.meshes.values()) mesh.dispose();
    this.root.replaceChildren();
    this.root.classList.remove("mk-view", "mk-closed");
  }
}

/** Lets Enter press a button that has keyboard focus, where JupyterLab would run a shortcut. @param {FocusEvent} event */
function keepKeys(event) {
  const target = /** @type {HTMLElement} */ (event.target);
  if (target.tagName === "BUTTON") target.toggleAttribute("data-lm-suppress-shortcuts", target.matches(":focus-visible"));
}

/** @type {typeof import("./view.js").mount} */
export function mount(root, options) {
  const page = new Page(root, options);
  return { receive: (message) => page.receive(message), dispose: () => page.dispose() };
}

/** @type {typeof import("./view.js").default} */
const widget = {
  render({ model, el }) {
    el.classList.add("mk-live"); // the style sheet then hides the table of the same mesh, which is for saved notebooks
    const send = (/** @type {import("./view.js").ToKernel} */ message) => {
      try {
        model.send(message);
      } catch {
        queueMicrotask(onComm); // the kernel has ended or restarts, and takes no messages of this widget any more
      }
    };
    // The event only says that the comm's state changed: the comm is closed, since a new comm has a new model.
    const onComm = () => view.receive({ kind: "closed" });
    const view = mount(el, { send, mesh: model.get("mesh") });
    // A page that was too slow for anywidget receives no more messages: show the table again.
    const late = setTimeout(() => {
      el.classList.remove("mk-live");
      view.receive({ kind: "late" });
    }, LATE_MS);
    const onMessage = (/** @type {import("./view.js").FromKernel} */ message) => {
      clearTimeout(late);
      el.classList.add("mk-live");
      view.receive(message);
    };
    model.on("msg:custom", onMessage);
    model.on("comm_live_update", onComm);
    return () => {
      clearTimeout(late);
      model.off("msg:custom", onMessage);
      model.off("comm_live_update", onComm);
      view.dispose();
    };
  },
};
export default widget;
