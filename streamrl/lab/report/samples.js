// Samples over training: one group of a step, its answers token by token, coloured by what is chosen.
"use strict";

const withSamples = runs.map((run, index) => ({ run, index })).filter(({ run }) => run.samples.steps.length);
const shownSteps = [...new Set(withSamples.flatMap(({ run }) => run.samples.steps.map((each) => each.step)))].sort(
  (some, other) => some - other,
);
const shown = { place: shownSteps.length - 1, mode: "version" };

// The size of the numbers that a mode shows, above which a colour is at its full strength: 95 in 100 are below it.
function strong(numbers, least) {
  const sizes = numbers
    .filter((each) => each !== null)
    .map(Math.abs)
    .sort((some, other) => some - other);
  return Math.max(least, sizes[Math.floor(0.95 * (sizes.length - 1))] ?? 0);
}

const allAnswers = withSamples.flatMap(({ run }) => run.samples.steps.flatMap((each) => each.answers));
const MODES = {
  version: {
    text: "version",
    has: true,
    note: "by the age, in learner steps, of the version that generated a token; a bar marks where another one goes on",
  },
  ratio: {
    text: "log-prob ratio",
    has: allAnswers.some((answer) => answer.ratios),
    full: strong(
      allAnswers.flatMap((answer) => answer.ratios ?? []),
      0.01,
    ),
    of: (answer, place) => answer.ratios?.[place] ?? null,
    note: "log-prob of the policy that trained it minus behaviour log-prob, in nats",
  },
  advantage: {
    text: "advantage",
    has: allAnswers.some((answer) => answer.advantage !== null),
    full: strong(
      allAnswers.map((answer) => answer.advantage),
      0.01,
    ),
    of: (answer) => answer.advantage,
    note: "of its answer in its group",
  },
  logprob: {
    text: "log-prob",
    has: true,
    full: strong(
      allAnswers.flatMap((answer) => answer.logprobs),
      0.1,
    ),
    of: (answer, place) => answer.logprobs[place] ?? null,
    note: "behaviour log-prob, in nats: the stronger, the less likely",
  },
};

const spanAt = (answer, place) => answer.versions.find(([, , begin, end]) => begin <= place && place < end);

// Colour and strength of a token, 0 to 100.
function tint(answer, place, step) {
  const mode = MODES[shown.mode];
  if (answer.untrained.includes(place)) return [null, 0];
  if (shown.mode === "version") {
    const span = spanAt(answer, place);
    return span ? [ageColour(step - span[1]), 100] : [null, 0];
  }
  const value = mode.of(answer, place);
  if (value === null) return [null, 0];
  const strength = Math.round(78 * Math.min(1, Math.abs(value) / mode.full));
  if (shown.mode === "advantage") return [value < 0 ? "var(--bad)" : "var(--good)", strength];
  return [value < 0 ? "var(--bad)" : "var(--accent)", strength];
}

function tokenLabel(event, answer, place, step) {
  const span = spanAt(answer, place);
  const fact = (name, value) => make("div", { class: "entry" }, make("span", {}, name), make("b", {}, value));
  showLabel(
    event,
    make("div", { class: "head" }, `token ${place}: ${JSON.stringify(answer.tokens[place])}, id ${answer.ids[place]}`),
    [
      span ? fact("version", `${span[0]}, age ${step - span[1]}`) : null,
      fact("behaviour log-prob", number(answer.logprobs[place])),
      answer.ratios ? fact("log-prob ratio", number(answer.ratios[place])) : null,
      answer.untrained.includes(place)
        ? fact("not trained", "no token of the policy")
        : answer.advantage === null
          ? null
          : fact("advantage", number(answer.advantage)),
    ].filter(Boolean),
  );
}

function tokens(answer, step) {
  const node = make("div", { class: "tokens" });
  answer.tokens.forEach((text, place) => {
    const [colour, strength] = tint(answer, place, step);
    const begins = place > 0 && spanAt(answer, place)?.[2] === place;
    const isUntrained = answer.untrained.includes(place);
    const token = make(
      "span",
      {
        class: [begins ? "first" : "", isUntrained ? "untrained" : ""].join(" ").trim() || null,
        colour,
        onpointermove: (event) => tokenLabel(event, answer, place, step),
        onpointerleave: hideLabel,
      },
      text.replaceAll("\n", "↵\n") || "·",
    );
    if (colour) token.style.setProperty("--strength", `${strength}%`);
    node.append(token);
  });
  if (answer.length > answer.tokens.length) node.append(` … (${number(answer.length)} tokens)`);
  return node;
}

function answerBlock(answer, step) {
  const parts = Object.entries(answer.parts)
    .map(([name, value]) => ` · ${name} ${number(value)}`)
    .join("");
  const versions = answer.versions.map(([name]) => name).join(", ");
  return make(
    "div",
    { class: "answer" },
    make(
      "div",
      { class: "facts" },
      make("b", {}, `reward ${number(answer.reward)}`),
      parts,
      answer.advantage === null ? " · " : ` · advantage ${number(answer.advantage)} · `,
      `${number(answer.length)} tokens · ${answer.finish}${versions ? ` · version ${versions}` : ""}`,
    ),
    answer.prompt === null ? [] : make("pre", {}, answer.prompt),
    tokens(answer, step),
  );
}

function groupCard({ run, index }, wanted) {
  const steps = run.samples.steps;
  const found =
    steps[
      nearest(
        steps.map((each) => each.step),
        wanted,
      )
    ];
  const title = `${isOne ? "" : `${run.name}, `}step ${found.step}`;
  const node = card(
    title,
    `group ${found.group} of ${found.task}`,
    found.images.map(({ name, url }) => (url ? make("img", { src: url, alt: name, title: name }) : make("p", {}, name))),
    make("pre", {}, found.prompt),
    found.answers.map((answer) => answerBlock(answer, found.step)),
  );
  if (!isOne) node.style.borderTop = `3px solid ${runColour(index)}`;
  return node;
}

function modeLegend() {
  const mode = MODES[shown.mode];
  if (shown.mode === "version") {
    const ages = Object.values(AGES).map((text, age) => ({ name: `age ${text}`, colour: `var(--age-${age})` }));
    return make("div", {}, legend(ages), make("p", { class: "soft small" }, `Colours: ${mode.note}.`));
  }
  const [low, high] = shown.mode === "advantage" ? ["var(--bad)", "var(--good)"] : ["var(--bad)", "var(--accent)"];
  const ramp = make("span", { class: "ramp" });
  const ends =
    shown.mode === "logprob" ? [`−${number(mode.full)}`, "0"] : [`−${number(mode.full)}`, `+${number(mode.full)}`];
  const strongest = (colour) => `color-mix(in srgb, ${colour} 78%, transparent)`;
  const stops = [strongest(low), "transparent", ...(shown.mode === "logprob" ? [] : [strongest(high)])];
  ramp.style.background = `linear-gradient(90deg, ${stops.join(", ")})`;
  return make(
    "div",
    {},
    make("div", { class: "legend" }, make("span", {}, ends[0], ramp, ends[1])),
    make("p", { class: "soft small" }, `Colours: ${mode.note}.`),
  );
}

function samples() {
  if (!withSamples.length) return;
  const where = make("b", {}),
    legendBox = make("div"),
    cards = make("div", { class: isOne ? "" : "wide" });
  const update = () => {
    where.textContent = `step ${shownSteps[shown.place]}`;
    legendBox.replaceChildren(modeLegend());
    cards.replaceChildren(...withSamples.map((each) => groupCard(each, shownSteps[shown.place])));
  };
  const slider = make("input", {
    type: "range",
    min: 0,
    max: shownSteps.length - 1,
    value: shown.place,
    "aria-label": "learner step",
    oninput: (event) => {
      shown.place = Number(event.target.value);
      update();
    },
  });
  const modes = Object.fromEntries(
    Object.entries(MODES)
      .filter(([, mode]) => mode.has)
      .map(([name, mode]) => [mode.text, name]),
  );
  const told = withSamples
    .map(({ run }) => `${isOne ? "" : `${run.name}: `}log-prob ratios ${run.samples.ratios}.`)
    .join(" ");
  section(
    "Samples over training",
    make(
      "div",
      { class: "bar" },
      make("div", { class: "choice" }, slider, where),
      choice("coloured by", modes, shown.mode, (mode) => {
        shown.mode = mode;
        update();
      }),
    ),
    legendBox,
    cards,
    make(
      "p",
      { class: "soft small" },
      `${shownSteps.length} steps, of each one group and up to four of its answers, from best to worst; ${told}`,
      withSamples.some(({ run }) => !run.samples.has_text)
        ? " No tokenizer was found: token ids are shown instead of the texts."
        : "",
    ),
  );
  update();
}
