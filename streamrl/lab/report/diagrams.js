// The diagrams, drawn by uPlot: curves, and columns that are counts side by side, shares of one, or strips of time.
"use strict";

const DASHES = { solid: null, dashed: [5, 4], dotted: [1.5, 3.5] }; // by their names in CSS
const STROKES = Object.keys(DASHES);
const NO_POINTS = { show: false };

// A canvas knows no variables of the page's style: `var(--run-0)` -> "#3a5bd0".
const paint = (colour) => getComputedStyle(document.documentElement).getPropertyValue(colour.slice(4, -1)).trim();

// A diagram that is drawn again when its width, the page's settings or its colours change: `describe()` is uPlot's
// options with the data.
const diagrams = [];

function diagram(describe, height = 190, padding = [8, 10, 0, 0]) {
  const holder = make("div", { class: "diagram" });
  holder.redraw = () => {
    holder.plot?.destroy();
    const { data, ...options } = describe();
    const width = Math.max(220, holder.clientWidth);
    holder.plot = new uPlot({ width, height, padding, legend: { show: false }, ...options }, data, holder);
  };
  diagrams.push(holder);
  return holder;
}

function redraw() {
  for (const holder of diagrams) holder.redraw();
}

function axes(x, y) {
  const style = { stroke: paint("var(--soft)"), font: "11px system-ui, sans-serif", ticks: { show: false } };
  const rules = { stroke: paint("var(--line)"), width: 1 };
  const named = { label: x.name, labelFont: style.font, labelSize: 16, labelGap: 0 };
  return [
    { ...style, ...named, size: 24, space: 60, grid: { show: false }, values: (_, at) => at.map(x.write), ...x.more },
    { ...style, size: 48, space: 34, grid: rules, values: (_, at) => at.map(y.write), ...y.more },
  ];
}

// Mean of each value and of those up to `half` places beside it; null stays null.
function smooth(values, half) {
  if (half < 1) return values;
  return values.map((value, index) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, index - half), index + half + 1).filter((each) => each !== null);
    return near.reduce((sum, each) => sum + each, 0) / near.length;
  });
}

// Curves. lines: [{name, colour, dash, xs, ys, low?, high?}]; view(): {axis, half}; marks(axis): [{x, colour}].
function curves(lines, unit, view, marks) {
  return diagram(() => {
    const { axis, half } = view();
    const series = [{}], bands = [], tables = [];
    const add = (table, ys, options) => {
      table.push(ys);
      series.push({ points: NO_POINTS, ...options });
    };
    for (const { name, colour, dash, xs, ys, low, high } of lines) {
      const stroke = paint(colour), table = [xs(axis)];
      if (low) {
        bands.push({ series: [series.length, series.length + 1], fill: `${stroke}24` });
        add(table, high);
        add(table, low);
      }
      add(table, ys, { stroke, alpha: half < 1 ? 0 : 0.28 });
      add(table, smooth(ys, half), { name, colour, stroke, width: 1.6, dash: DASHES[dash], points: { size: 4 } });
      tables.push(table);
    }
    return {
      data: uPlot.join(tables),
      series,
      bands,
      scales: { x: { time: false }, y: { range: (_, low, high) => range(low, high) } },
      axes: axes(axis, { write: (value) => inUnit(value, unit) }),
      cursor: { y: false, points: { size: (plot, index) => (plot.series[index].name ? 7 : 0) } },
      hooks: {
        drawAxes: [(plot) => drawMarks(plot, marks(axis))],
        setCursor: [(plot) => showValues(plot, axis, unit)],
      },
    };
  });
}

// Range of an axis over values from low to high: from zero where that is not far away.
const range = (low, high) =>
  low === null ? [0, 1] : uPlot.rangeNum(low > 0 && low < 0.6 * high ? 0 : low, high, 0.05, true);

function drawMarks({ ctx, bbox, scales, valToPos }, marks) {
  ctx.save();
  ctx.lineWidth = uPlot.pxRatio;
  ctx.setLineDash([2 * uPlot.pxRatio, 3 * uPlot.pxRatio]);
  for (const { x, colour } of marks.filter((each) => each.x >= scales.x.min && each.x <= scales.x.max)) {
    const at = valToPos(x, "x", true);
    ctx.strokeStyle = paint(colour);
    ctx.beginPath();
    ctx.moveTo(at, bbox.top);
    ctx.lineTo(at, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

// The label with the value of each curve under the pointer: as recorded, which is the series before the smoothed one.
function showValues({ cursor: { idx, idxs, event }, data, series }, axis, unit) {
  if (idx === null || !event) return hideLabel();
  const rows = series.map(({ name, colour }, index) =>
    name && entry(colour, name, inUnit(data[index - 1][idxs[index]] ?? null, unit)));
  return showLabel(event, make("div", { class: "head" }, `${axis.write(data[0][idx])} ${axis.name}`), rows);
}

// Columns, each from one of the ascending edges to the next. parts: [{ys: [of each column], stroke?, fill?, dash?}];
// scales: of y; read(column): the lines of the label; x, y: their axes.
function columns({ edges, parts, y, x, range, read }) {
  const series = parts.map(({ stroke, fill, dash }) =>
    ({ stroke, fill, dash, width: stroke ? 1.6 : 0, paths: uPlot.paths.stepped({ align: 1 }), points: NO_POINTS }));
  const last = edges.length - 2;
  return {
    data: [edges, ...parts.map(({ ys }) => [...ys, ys.at(-1)])],
    series: [{}, ...series],
    scales: { x: { time: false }, y: { range } },
    axes: axes(x, y),
    cursor: { y: false, points: NO_POINTS, drag: { x: false } },
    hooks: {
      setCursor: [({ cursor: { left, event }, posToVal }) => {
        if (left < 0 || !event) return hideLabel();
        const at = posToVal(left, "x");
        return showLabel(event, read(Math.max(0, Math.min(last, edges.findLastIndex((edge) => edge <= at))), at));
      }],
    },
  };
}

// Parts upon each other: the whole pile first, over which those below are drawn.
function piled(parts) {
  const tops = [];
  for (const { ys, colour } of parts) {
    const below = tops[0]?.ys;
    tops.unshift({ ys: below ? ys.map((value, index) => value + below[index]) : ys, fill: paint(colour) });
  }
  return tops;
}

// Shares that add up to one, over the axis: parts: [{name, colour, ys}].
function shares(xs, parts, view) {
  return diagram(() => {
    const { axis, half } = view(), at = xs(axis);
    const smoothed = parts.map((part) => ({ ...part, ys: smooth(part.ys, half) }));
    return columns({
      // a column for each point, from half way to the one before to half way to the next
      edges: [at[0], ...at.slice(1).map((value, index) => (value + at[index]) / 2), at.at(-1)],
      parts: piled(smoothed), range: [0, 1], x: axis, y: { write: percent },
      read: (column) => [
        make("div", { class: "head" }, `${axis.write(at[column])} ${axis.name}`),
        parts.filter((part) => part.ys[column] > 0).map((part) =>
          entry(part.colour, part.name, percent(part.ys[column]))),
      ],
    });
  });
}

// Counts as shares of their sum, in bins that all sets have in common.
// sets: [{name, colour, dash, values: [share of each bin]}]; bins: [text of each bin]; ticks: [text below each bin].
function histogram(sets, bins, name, ticks) {
  return diagram(() => columns({
    edges: [...bins.keys(), bins.length].map((edge) => edge - 0.5),
    parts: sets.map(({ values, colour, dash }) =>
      ({ ys: values, stroke: paint(colour), dash: DASHES[dash], fill: dash ? null : `${paint(colour)}29` })),
    range: (_, low, high) => range(0, high),
    x: { name, write: (bin) => ticks[bin] ?? "", more: { incrs: [1, 2, 5, 10, 20], space: 46 } },
    y: { write: percent },
    read: (bin) => [
      make("div", { class: "head" }, `${bins[bin]} ${name}`),
      sets.map((set) => entry(set.colour, set.name, percent(set.values[bin]))),
    ],
  }));
}

// One strip of time for each role, the axis under the last. lines: [{name, slices: {phase: [share of each slice]}}];
// colours: phase: colour.
function strips(lines, seconds, colours) {
  const unit = clock(seconds), whole = seconds / unit.size;
  return lines.map(({ name, slices }, index) => {
    const names = Object.keys(slices).sort((some, other) => order(some) - order(other));
    const count = slices[names[0]]?.length ?? 1, isLast = index === lines.length - 1;
    const edges = Array.from({ length: count + 1 }, (_, edge) => (edge / count) * whole);
    return diagram(() => columns({
      edges, parts: piled(names.map((phase) => ({ ys: slices[phase], colour: colours(phase) }))), range: [0, 1],
      x: { name: isLast ? unit.name : null, write: isLast ? number : () => null, more: isLast ? {} : { size: 0 } },
      y: { write: () => name, more: { size: 104, splits: [0.5], stroke: paint("var(--ink)"), grid: { show: false } } },
      read: (slice, at) => [
        make("div", { class: "head" }, `${name}, ${duration(at * unit.size)} after the start`),
        names.filter((phase) => slices[phase][slice] > 0.004).map((phase) =>
          entry(colours(phase), phase, percent(slices[phase][slice]))),
      ],
    }), isLast ? 63 : 26, [3, 10, isLast ? 0 : 3, 0]);
  });
}
