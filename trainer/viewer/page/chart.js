// Curves, drawn by uPlot: lines over training steps, with bands and error bars. All charts of a page share one cursor.

import { html, useEffect, useRef } from "./vendor/htm-preact.module.js";
import { short } from "./core.js";

const { uPlot } = window;
const HEIGHT = 190;
const SHARED = "steps";

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function resolved(name) {
  // A variable may be a light-dark() pair, which only an element's colour resolves.
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const color = getComputedStyle(probe).color;
  probe.remove();
  return color;
}

// Put the lines' points on one axis: [steps, values, values, ...], null where a line has none.
export function aligned(lines) {
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const columns = lines.map((line) => {
    const column = new Array(steps.length).fill(null);
    line.steps.forEach((step, index) => { column[place.get(step)] = line.values[index] ?? null; });
    return column;
  });
  return [steps, ...columns];
}

// `lines`: {label, steps, values, color, width, faint, points, band: [low, high], bars: [[step, low, high]], hidden}.
// `format`: how a value is written; `range`: the least that the scale shows.
export function Chart({ title, note, lines, format = short, range = null, fill = false }) {
  const holder = useRef(null);
  const readout = useRef(null);
  const plot = useRef(null);
  const shape = JSON.stringify([lines.map(({ label, color, faint, points, band }) => [label, color, faint, points, !!band]), range, fill]);
  const all = lines.flatMap((line) => [line, ...(line.band
    ? line.band.map((values) => ({ ...line, values, band: null, bars: null, edge: true })) : [])]);
  const data = aligned(all);
  const latest = useRef(null);
  latest.current = { all, format };

  useEffect(() => {
    const readValues = (chart) => {
      const index = chart.cursor.idx;
      const parts = [];
      if (index !== null && index !== undefined) {
        latest.current.all.forEach((line, i) => {
          const value = chart.data[i + 1][index];
          if (!line.edge && !line.faint && value !== null && value !== undefined) {
            const one = document.createElement("span");
            one.style.color = line.color;
            one.textContent = latest.current.format(line.shown?.get(chart.data[0][index]) ?? value);
            parts.push(one, " ");
          }
        });
        if (parts.length > 0) parts.unshift(`step ${chart.data[0][index]}: `);
      }
      readout.current?.replaceChildren(...parts);
    };
    const drawBars = (chart) => {
      const { ctx } = chart;
      ctx.save();
      for (const { bars, color } of latest.current.all) {
        for (const [step, low, high] of bars ?? []) {
          const x = chart.valToPos(step, "x", true);
          ctx.strokeStyle = color;
          ctx.lineWidth = 1.5 * devicePixelRatio;
          ctx.beginPath();
          ctx.moveTo(x, chart.valToPos(low, "y", true));
          ctx.lineTo(x, chart.valToPos(high, "y", true));
          ctx.stroke();
        }
      }
      ctx.restore();
    };
    const axis = {
      stroke: resolved("--muted"), grid: { stroke: resolved("--line"), width: 1 }, ticks: { show: false },
      font: `11px ${style("--sans")}`,
    };
    const edges = (index) => {
      const low = all.findIndex((line, i) => i > index && line.edge) + 1;
      return [low + 1, low];
    };
    const bands = [];
    all.forEach((line, index) => {
      if (line.band) bands.push({ series: edges(index), fill: `${line.color}2e` });
      if (fill && index > 0) bands.push({ series: [index + 1, index], fill: `${line.color}b3` });
    });
    plot.current = new uPlot({
      width: Math.max(200, holder.current.clientWidth),
      height: HEIGHT,
      legend: { show: false },
      cursor: { sync: { key: SHARED, setSeries: false }, points: { size: 5 }, y: false, drag: { x: true, y: false } },
      scales: {
        x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
        y: { range: (_, low, high) => spread(low, high, range) },
      },
      axes: [
        { ...axis, size: 26, gap: 2, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5] },
        { ...axis, size: 48, gap: 2, values: (_, ticks) => written(ticks, format) },
      ],
      series: [{}, ...all.map((line) => ({
        label: line.label,
        stroke: line.edge ? "transparent" : line.faint ? `${line.color}55` : line.color,
        fill: fill && line === all[0] ? `${line.color}b3` : undefined,
        width: line.edge ? 0 : line.points === "only" ? 0 : line.faint ? 1 : 2,
        spanGaps: true,
        points: { show: line.edge ? false : line.points === "only" || line.steps.length === 1, size: 6, fill: line.color },
      }))],
      bands,
      hooks: { setCursor: [readValues], draw: [drawBars] },
    }, data, holder.current);
    const watch = new ResizeObserver(([entry]) => {
      const width = Math.floor(entry.contentRect.width);
      if (width > 0 && width !== plot.current.width) plot.current.setSize({ width, height: HEIGHT });
    });
    watch.observe(holder.current);
    const themed = new MutationObserver(() => {
      for (const one of plot.current.axes) {
        one.stroke = () => resolved("--muted");
        one.grid.stroke = () => resolved("--line");
      }
      plot.current.redraw();
    });
    themed.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    return () => { watch.disconnect(); themed.disconnect(); plot.current.destroy(); plot.current = null; };
  }, [shape]);

  const content = JSON.stringify(data);
  useEffect(() => plot.current?.setData(data), [content]);

  return html`<figure class="chart">
    <figcaption><b>${title}</b><span class="readout" ref=${readout}></span></figcaption>
    <div class="plot" ref=${holder} role="img" aria-label=${`${title}: ${summary(lines, format)}`}></div>
    ${note && html`<p class="note">${note}</p>`}
  </figure>`;
}

// The range of the vertical scale: what the data spans, and a little more; at least `least`.
export function spread(low, high, least) {
  if (low === null || low === undefined) return least ?? [0, 1];
  if (least !== null) return [Math.min(low, least[0]), Math.max(high, least[1])];
  if (low === 0 && high === 0) return [0, 1];
  // A mean of equal numbers differs from them in its last digits, which is no curve.
  const size = Math.max(Math.abs(low), Math.abs(high));
  const room = high - low <= size * 1e-9 ? Math.max(size * 0.1, 1e-6) : (high - low) * 0.06;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

// Ticks with as many digits as tell them apart.
function written(ticks, format) {
  const texts = ticks.map((tick) => format(tick));
  if (new Set(texts).size === texts.length) return texts;
  const step = Math.min(...ticks.slice(1).map((tick, i) => tick - ticks[i]));
  return ticks.map((tick) => tick.toFixed(Math.min(9, Math.max(0, Math.ceil(-Math.log10(step))))));
}

function summary(lines, format) {
  const last = lines.filter((line) => !line.faint && line.values.length > 0);
  return last.map((line) => `${line.label} ${format(line.values.at(-1))}`).join(", ") || "nothing yet";
}
