// The sections of the page, from the data in it.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs, isOne = runs.length === 1;
const main = document.querySelector("main");

const AXES = {
  steps: { key: "step", name: "learner steps", write: number },
  tokens: { key: "tokens", name: "trained tokens", write: number },
  time: { key: "seconds", name: "", write: null },
};
const longest = Math.max(1, ...runs.map((run) => run.curves.seconds.at(-1) ?? 0));
AXES.time.name = `${clock(longest).name} since the start`;
AXES.time.write = (value) => number(value / clock(longest).size);
const view = { axis: AXES.steps, half: 0 };
const most = Math.max(0, ...runs.map((run) => run.curves.step.length));
if (most >= 60) view.half = Math.round(most / 60);

const AGES = { s0: "0", s1: "1", s2: "2", s3_4: "3 to 4", s5_8: "5 to 8", "s9+": "9 and more" };
const ageColour = (age) => `var(--age-${age < 3 ? Math.max(0, age) : age < 5 ? 3 : age < 9 ? 4 : 5})`;

const PHASES = {
  generate: "work", forward: "forward", backward: "backward", train: "backward", scores: "forward", critic: "forward", optimizer: "update",
  evaluate: "update", publish: "send", send: "send", save: "begin", keep: "begin", pause: "hold", other: "other",
  start: "begin",
  wait: "none", idle: "none",
  nobody: "work", generators: "forward", learner: "backward", "hand-over": "other",
};
const phaseColour = (name) => `var(--${PHASES[name] ?? "other"})`;
const order = (name) => (Object.keys(PHASES).indexOf(name) + 1) || 99;

// Buttons of which one is pressed. choices: {text: value}.
function choice(name, choices, chosen, choose) {
  const buttons = Object.entries(choices).map(([text, value]) => make("button", {
    "aria-pressed": String(value === chosen), onclick: (event) => {
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === event.currentTarget));
      choose(value);
    },
  }, text));
  return make("div", { class: "choice" }, make("span", {}, name), buttons);
}

const heading = (title, unit) => make("div", { class: "title" }, make("span", {}, title), make("small", {}, unit));
const card = (title, unit, ...content) => make("div", { class: "card" }, heading(title, unit), content);
const code = (text) => make("code", {}, text);
const small = (text) => make("p", { class: "soft small" }, text);
const folded = (title, content) => make("details", {}, make("summary", {}, title), content);

// What a colour, or a dash, means. entries: [{name, colour, dash?, meaning?}]
const legend = (entries) => make("div", { class: "legend" }, entries.map(({ name, colour, dash, meaning }) =>
  make("span", { title: meaning }, make("i", { class: dash && `line ${dash}`, colour }), name)));

function table(head, rows, kind = "") {
  return make("div", { class: "card table" }, make("table", { class: kind },
    make("tr", {}, head.map((cell) => (cell instanceof Node ? cell : make("th", {}, cell)))),
    rows.map((row) => make("tr", {}, row.map((cell) => (cell instanceof Node ? cell : make("td", {}, cell)))))));
}

const runHead = (run, index) => make("th", {}, make("i", { colour: runColour(index) }), run.name);
const section = (title, ...content) => main.append(make("section", {}, make("h2", {}, title), content));
const perRun = (describe) => runs.map((run, index) => describe(run, index)).filter(Boolean);

function header() {
  main.replaceChildren(make("h1", {}, isOne ? runs[0].name : `${runs.length} runs`));
  main.append(make("div", { class: "runs" }, runs.map((run, index) => make("span", {},
    isOne ? null : make("i", { colour: runColour(index) }), isOne ? null : run.name,
    make("span", { class: `state ${run.is_well ? "" : "bad"}` }, run.status)))));
  const with_ = runs.find((run) => run.figures.length);
  if (!with_) return main.append(make("p", { class: "soft" }, "No learner step yet."));
  if (isOne) {
    return main.append(make("div", { class: "tiles" }, with_.figures.map((figure) => make("div", { class: "card tile" },
      make("span", {}, figure.name), make("b", {}, figure.value), make("small", {}, figure.hint)))));
  }
  const shown = table(["", ...runs.map(runHead)], with_.figures.map((figure, row) =>
    [make("td", { title: figure.hint }, figure.name), ...runs.map((run) => run.figures[row]?.value ?? "–")]));
  shown.style.marginTop = "1.3rem";
  return main.append(shown);
}

function differences() {
  if (isOne || !data.differences.length) return;
  section("What differs", table(["key", ...runs.map(runHead)], data.differences.map((row) =>
    [make("td", { title: row.meaning }, code(row.key)), ...row.values.map((value) => make("td", {}, code(value)))])));
}

function hints() {
  const blocks = perRun((run) => run.hints.length ? [
    isOne ? null : make("h3", {}, run.name),
    table(["when", "hint", "try", "read"], run.hints.map((hint) => [
      hint.steps, make("td", { class: "wrap warning" }, hint.text), make("td", { class: "wrap" }, code(hint.keys.join(", "))),
      code(hint.link)]), "left"),
  ] : null);
  if (blocks.length) section("Hints", blocks);
}

// The curves of one panel: with one run a colour for each metric, with several a colour for each run.
function panelLines(panel) {
  return panel.metrics.flatMap((metric, place) => runs.map((run, index) => {
    const curve = run.curves.metrics[metric.name];
    return curve && {
      name: isOne ? metric.name : `${run.name} ${panel.metrics.length > 1 ? metric.name : ""}`,
      colour: runColour(isOne ? place : index), dash: isOne ? null : STROKES[place],
      xs: (axis) => run.curves[axis.key], ys: curve.y, low: curve.low, high: curve.high,
    };
  })).filter(Boolean);
}

function panelLegend(panel) {
  const marked = (place) => (isOne ? { colour: runColour(place) } : { colour: "var(--soft)", dash: STROKES[place] });
  return legend(panel.metrics.map((metric, place) => ({ ...metric, ...marked(place) })));
}

// Index of the value that is nearest to `wanted`.
const nearest = (values, wanted) => values.reduce((found, value, index) =>
  (Math.abs(value - wanted) < Math.abs(values[found] - wanted) ? index : found), 0);

// Where processes started again, on the axis that is shown.
function marks(axis) {
  return runs.flatMap((run, index) => run.notes.filter((note) => note.mark && run.curves.step.length).map((note) => ({
    x: run.curves[axis.key][nearest(run.curves.seconds, note.at)], colour: isOne ? "var(--bad)" : runColour(index),
  })));
}

function allCurves() {
  if (!data.panels.length) return;
  const steps = Math.max(...runs.map((run) => run.curves.steps_a_point));
  const halves = { off: 0, some: Math.max(1, Math.round(most / 60)), more: Math.max(2, Math.round(most / 15)) };
  const controls = make("div", { class: "bar" },
    choice("over", AXES, view.axis, (axis) => { view.axis = axis; redraw(); }),
    choice("smoothed", halves, view.half, (half) => { view.half = half; redraw(); }));
  section("Curves", controls,
    small("Drag over a stretch of a diagram to enlarge it; a double click shows the whole."),
    steps > 1 ? small(`A point is the mean of up to ${steps} steps, the band from the least to the largest.`) : null,
    runs.some((run) => run.notes.some((note) => note.mark)) ? small("Dotted lines: a process started again.") : null);
  for (const name of new Set(data.panels.map((panel) => panel.section))) {
    if (name !== SELECTION) main.lastChild.append(make("h3", {}, name), make("div", { class: "grid" }, cardsOf(name)));
  }
}

const SELECTION = "Selection"; // whose curves are shown with the rest about it

const cardsOf = (name) => data.panels.filter((panel) => panel.section === name).map((panel) =>
  card(panel.title, panel.unit, panelLegend(panel), curves(panelLines(panel), panel.unit, () => view, marks)));

// Bins that all sets have in common. counted: [{counts: [[value, count]], width}]
function bins(counted) {
  const width = Math.max(...counted.map((each) => each.width));
  const values = counted.flatMap((each) => each.counts.map(([value]) => value));
  const low = Math.floor(Math.min(...values) / width), high = Math.floor(Math.max(...values) / width);
  const step = Math.max(1, Math.ceil((high - low + 1) / 64));
  const count = Math.floor((high - low) / step) + 1, size = step * width;
  const first = low * width;
  const texts = Array.from({ length: count }, (_, index) => {
    const begin = first + index * size;
    return size === 1 ? number(begin) : `${number(begin)} to ${number(begin + size - 1)}`;
  });
  const edges = Array.from({ length: count }, (_, index) => number(first + index * size));
  const share = (each) => {
    const sums = new Array(count).fill(0);
    let total = 0;
    for (const [value, times] of each.counts) {
      sums[Math.floor((value - first) / size)] += times;
      total += times;
    }
    return sums.map((sum) => sum / (total || 1));
  };
  return { texts, edges, share };
}

function staleness() {
  const cards = perRun((run) => {
    const all = Object.entries(AGES).map(([bucket, text], age) =>
      ({ name: `age ${text}`, colour: `var(--age-${age})`, ys: run.curves.staleness[bucket] }));
    const parts = all.filter((part) => part.ys.some((value) => value > 0));
    if (!parts.length) return null;
    const drawing = shares((axis) => run.curves[axis.key], parts, () => view);
    return card(`Ages of trained tokens${isOne ? "" : `, ${run.name}`}`, "share", legend(parts), drawing);
  });
  const withAges = runs.map((run, index) => ({ run, index })).filter(({ run }) => run.groups?.ages.length);
  if (withAges.length) {
    const counted = withAges.map(({ run }) => ({ counts: run.groups.ages, width: 1 }));
    const common = bins(counted);
    const sets = withAges.map(({ run, index }, place) =>
      ({ name: isOne ? "trained tokens" : run.name, colour: runColour(index), values: common.share(counted[place]) }));
    const drawing = histogram(sets, common.texts, "learner steps", common.edges);
    cards.unshift(card("Staleness of all trained tokens", "share of tokens", legend(sets), drawing));
  }
  if (cards.length) section("Staleness", make("div", { class: cards.length === 2 ? "wide" : "grid" }, cards));
}

function selection() {
  const present = runs.map((run, index) => ({ run, index })).filter(({ run }) => run.groups);
  if (!present.length) {
    return section("Lengths and selection", make("div", { class: "grid" }, cardsOf(SELECTION)),
      make("p", { class: "soft" }, "No journal (journal.keep=none, or nothing was generated yet)."));
  }
  const fates = ["trained", "dropped"];
  const sets = present.flatMap(({ run, index }) => fates.filter((fate) => run.groups.lengths[fate]).map((fate) => ({
    name: isOne ? fate : `${run.name}, ${fate}`, colour: isOne ? runColour(fates.indexOf(fate)) : runColour(index),
    dash: fate === "dropped" ? "dashed" : null, counted: run.groups.lengths[fate], rates: run.groups.pass_rates[fate],
  })));
  const cards = [];
  if (sets.some((set) => set.counted.counts.length)) {
    const common = bins(sets.map((set) => set.counted));
    const lengths = sets.map((set) => ({ ...set, values: common.share(set.counted) }));
    const drawing = histogram(lengths, common.texts, "tokens", common.edges);
    cards.push(card("Output lengths", "share of answers", legend(lengths), drawing));
  }
  if (sets.some((set) => set.rates)) {
    const texts = ["none", ...Array.from({ length: 10 }, (_, index) => `${10 * index} to ${10 * index + 10}%`), "all"];
    const edges = ["none", ...Array.from({ length: 10 }, (_, index) => `${10 * index + 5}%`), "all"];
    const rates = sets.filter((set) => set.rates).map((set) => {
      const total = set.rates.reduce((sum, each) => sum + each, 0);
      return { ...set, values: set.rates.map((each) => each / total) };
    });
    const drawing = histogram(rates, texts, "right", edges);
    cards.push(card("Right answers of a group", "share of groups", legend(rates), drawing));
  }
  const tables = present.map(({ run }) => [
    isOne ? null : make("h3", {}, run.name),
    table(["groups", "number", "tokens", "mean length", "pass rate"], run.groups.fates.map((row) =>
      [make("td", { class: row.part ? "part" : "" }, row.name), number(row.groups), number(row.tokens),
        number(row.length), percent(row.pass_rate)])),
    small(aboutGroups(run)),
  ]);
  section("Lengths and selection", make("div", { class: "grid" }, cards, cardsOf(SELECTION)), tables);
}

function aboutGroups(run) {
  const { read, groups, unreadable, first_step: first } = run.groups;
  const isPart = read + unreadable < groups;
  const all = `All ${number(groups)} groups of the journal.`;
  const parts = [isPart ? `Lengths and ages are of ${number(read)} of ${number(groups)} groups, evenly spread.` : all];
  if (unreadable) parts.push(`${number(unreadable)} groups could not be read.`);
  if (first) parts.push(`The journal begins with step ${first}: what was before is compacted away (journal.keep).`);
  return parts.join(" ");
}

function timeUse() {
  const blocks = perRun((run) => {
    if (!run.time) return null;
    const { roles, held, seconds, roofline, holders } = run.time;
    const lines = [...roles, held];
    const names = [...new Set(roles.flatMap((line) => Object.keys(line.seconds)))];
    names.sort((some, other) => order(some) - order(other));
    const holds = Object.keys(held.seconds);
    const total = (line) => Object.values(line.seconds).reduce((sum, each) => sum + each, 0);
    return [
      isOne ? null : make("h3", {}, run.name),
      card("What each role did", duration(seconds), legend(names.map((name) => ({ name, colour: phaseColour(name) }))),
        strips(roles, seconds, phaseColour),
        make("div", { class: "title" }, make("span", {}, "Who held the run up")),
        legend(holds.map((name) => ({ name: `${name}: ${holders[name]}`, colour: phaseColour(name) }))),
        strips([held], seconds, phaseColour)),
      roofline ? make("p", { class: "small" }, roofline) : null,
      folded("seconds of each phase", table(["role", "phase", "seconds", "share"], lines.flatMap((line) =>
        Object.entries(line.seconds).map(([phase, spent], place) =>
          [place ? "" : line.name, phase, number(spent), percent(spent / total(line))])))),
    ];
  });
  if (blocks.length) section("Where the time went", blocks);
}

function events() {
  const blocks = perRun((run) => run.notes.length ? [
    isOne ? null : make("h3", {}, run.name),
    table(["after", "role", "event", "times"], run.notes.map((note) => [
      note.count > 1 ? `${duration(note.at)} to ${duration(note.until)}` : duration(note.at), make("td", {}, note.role),
      make("td", { class: `wrap ${note.grade}` }, note.text), note.count > 1 ? String(note.count) : ""]), "left"),
  ] : null);
  if (blocks.length) section("Events of note", blocks);
}

function settings() {
  section("Configuration", perRun((run) => [
    isOne ? null : make("h3", {}, run.name),
    table(["key", "value", "default"], run.settings.changed.map((row) => [
      make("td", { title: row.meaning }, code(row.key)), make("td", { class: "wrap" }, code(row.value)),
      make("td", { class: "soft" }, code(row.default))]), "left"),
    folded("all keys", make("pre", {}, run.settings.file)),
    folded("machine and packages", make("pre", {}, JSON.stringify(run.settings.environment, null, 1))),
  ]));
}

function footer() {
  const made = new Date(1000 * data.made).toISOString().slice(0, 16).replace("T", " ");
  const from = runs.map((run) => run.folder).join(", ");
  main.append(make("footer", {},
    `Made on ${made} UTC by streamrl report, from ${from}. Nothing is loaded from elsewhere.`));
}
