// Where most of a map's evidence lies.

// The values from the largest on, and what they add up to on the way.
function sums(values) {
  const sorted = Float32Array.from(values).sort().reverse();
  const added = new Float64Array(sorted.length);
  let total = 0;
  for (let i = 0; i < sorted.length; i++) {
    total += sorted[i];
    added[i] = total;
  }
  return { sorted, added, total };
}

// The largest threshold such that the values from it on add up to a share of all.
function threshold({ sorted, added, total }, share) {
  if (!(total > 0)) return Infinity;
  if (share >= 1) return 0;
  const wanted = share * total * (1 - 1e-12);
  let [low, high] = [0, sorted.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (added[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return sorted[low];
}

function blurred(values, width, height, sigma) {
  const reach = Math.max(1, Math.ceil(3 * sigma));
  const weights = Float32Array.from({ length: 2 * reach + 1 }, (_, i) => Math.exp(-((i - reach) ** 2) / (2 * sigma * sigma)));
  const total = weights.reduce((sum, weight) => sum + weight, 0);
  const across = new Float32Array(values.length);
  const found = new Float32Array(values.length);
  const inside = (place, length) => {
    const folded = place < 0 ? -place - 1 : place >= length ? 2 * length - place - 1 : place;
    return clamp(folded, 0, length - 1);
  };
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      let sum = 0;
      for (let k = -reach; k <= reach; k++) sum += weights[k + reach] * values[y * width + inside(x + k, width)];
      across[y * width + x] = sum / total;
    }
  }
  for (let y = 0; y < height; y++) {
    for (let k = -reach; k <= reach; k++) {
      const from = inside(y + k, height) * width;
      const weight = weights[k + reach] / total;
      for (let x = 0; x < width; x++) found[y * width + x] += weight * across[from + x];
    }
  }
  return found;
}

const DASH = 5; // cells

// The outline of where values are at least a threshold, as the path of an SVG over a square of 1.
function outline(values, width, height, least, dashed = false) {
  const value = (x, y) => (x < 0 || y < 0 || x >= width || y >= height ? -1 : values[y * width + x]);
  const parts = [];
  for (let y = -1; y < height; y++) {
    for (let x = -1; x < width; x++) {
      if (dashed && (Math.floor(x / DASH) + Math.floor(y / DASH)) % 2) continue;
      const corners = [value(x, y), value(x + 1, y), value(x + 1, y + 1), value(x, y + 1)];
      const inside = corners.map((corner) => corner >= least);
      const places = [[x, y], [x + 1, y], [x + 1, y + 1], [x, y + 1]];
      const cuts = [];
      for (let i = 0; i < 4; i++) {
        const j = (i + 1) % 4;
        if (inside[i] === inside[j]) continue;
        const share = corners[i] < 0 || corners[j] < 0 ? 0.5 : (least - corners[i]) / (corners[j] - corners[i]);
        cuts.push([
          places[i][0] + (places[j][0] - places[i][0]) * share + 0.5,
          places[i][1] + (places[j][1] - places[i][1]) * share + 0.5,
        ]);
      }
      for (let i = 0; i + 1 < cuts.length; i += 2) {
        const [[ax, ay], [bx, by]] = [cuts[i], cuts[i + 1]];
        parts.push(`M${(ax / width).toFixed(4)} ${(ay / height).toFixed(4)}L${(bx / width).toFixed(4)} ${(by / height).toFixed(4)}`);
      }
    }
  }
  return parts.join('');
}
