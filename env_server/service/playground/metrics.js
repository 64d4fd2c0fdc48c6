// Reading /metrics: Prometheus' text, and what a few seconds of it say. Pure.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;

// Return the samples: [{name, labels, value}].
export function parseMetrics(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : SAMPLE.exec(line);
    if (match === null) continue;
    const labels = {};
    for (const [, key, value] of (match[2] ?? "").matchAll(LABEL)) labels[key] = unescaped(value);
    samples.push({ name: match[1], labels, value: number(match[3]) });
  }
  return samples;
}

// Return the sum of a metric over its labels; null where it is not there.
export function sum(samples, name) {
  const found = samples.filter((sample) => sample.name === name);
  return found.length === 0 ? null : found.reduce((total, sample) => total + sample.value, 0);
}

// Return a metric's values summed by one label, as a Map; those of no value are left out.
export function by(samples, name, label) {
  const sums = new Map();
  for (const sample of samples) {
    if (sample.name !== name || sample.value === 0) continue;
    const key = sample.labels[label] ?? "";
    sums.set(key, (sums.get(key) ?? 0) + sample.value);
  }
  return sums;
}

// Return a histogram's cumulative buckets, summed over its labels: [[bound, count]], in order.
export function buckets(samples, name) {
  const counts = new Map();
  for (const sample of samples) {
    if (sample.name !== `${name}_bucket`) continue;
    const bound = number(sample.labels.le);
    counts.set(bound, (counts.get(bound) ?? 0) + sample.value);
  }
  return [...counts].sort(([a], [b]) => a - b);
}

// Return the quantile of what came between two readings of a histogram, as Prometheus estimates it: linear within a
// bucket. Null where nothing came.
export function quantile(share, before, after) {
  const earlier = new Map(before);
  const grown = after.map(([bound, count]) => [bound, count - (earlier.get(bound) ?? 0)]);
  const total = grown.at(-1)?.[1] ?? 0;
  if (!(total > 0)) return null;
  const rank = share * total;
  let [low, below] = [0, 0];
  for (const [bound, count] of grown) {
    if (count >= rank && count > below) {
      return bound === Infinity ? low : low + ((bound - low) * (rank - below)) / (count - below);
    }
    [low, below] = [bound, count];
  }
  return null;
}

function number(text) {
  if (text === "+Inf") return Infinity;
  return text === "-Inf" ? -Infinity : Number(text);
}

function unescaped(value) {
  return value.replace(/\\(.)/g, (_, char) => (char === "n" ? "\n" : char));
}
