// Maps: unpacked, enlarged, and what is asked of their values.

const FINE = 384; // cells along the longer side of what is drawn

function bytesOf(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

async function unpacked(text) {
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream('deflate'));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Shares of the largest magnitude, as explain/report/item.py has quantised them.
async function unpackedPlane(plane) {
  const bytes = await unpacked(plane.data);
  const { width, height, bits, signed } = plane;
  const kinds = { 8: [Uint8Array, Int8Array], 16: [Uint16Array, Int16Array] };
  const unsigned = new kinds[bits][0](bytes.buffer, 0, width * height);
  if (plane.filter === 'differences') {
    for (let i = width; i < unsigned.length; i++) unsigned[i] += unsigned[i - width];
    for (let i = 0; i < unsigned.length; i++) if (i % width > 0) unsigned[i] += unsigned[i - 1];
  }
  const steps = signed ? new kinds[bits][1](unsigned.buffer) : unsigned;
  const most = 2 ** (signed ? bits - 1 : bits) - 1;
  const values = new Float32Array(steps.length);
  for (let i = 0; i < steps.length; i++) {
    const share = steps[i] / most;
    values[i] = bits === 8 ? Math.sign(share) * share * share : share;
  }
  return { width, height, values, scale: plane.scale, signed };
}

// Linearly between the middles of the cells, as the pictures of the package are.
function enlarged(plane, width, height) {
  const { values } = plane;
  const found = new Float32Array(width * height);
  const [x0, x1, fx] = between(plane.width, width);
  const [y0, y1, fy] = between(plane.height, height);
  for (let y = 0; y < height; y++) {
    const above = y0[y] * plane.width;
    const below = y1[y] * plane.width;
    for (let x = 0; x < width; x++) {
      const top = values[above + x0[x]] + (values[above + x1[x]] - values[above + x0[x]]) * fx[x];
      const bottom = values[below + x0[x]] + (values[below + x1[x]] - values[below + x0[x]]) * fx[x];
      found[y * width + x] = top + (bottom - top) * fy[y];
    }
  }
  return found;
}

function between(from, to) {
  const first = new Uint16Array(to);
  const second = new Uint16Array(to);
  const share = new Float32Array(to);
  for (let i = 0; i < to; i++) {
    const place = clamp(((i + 0.5) * from) / to - 0.5, 0, from - 1);
    first[i] = Math.floor(place);
    second[i] = Math.min(first[i] + 1, from - 1);
    share[i] = place - first[i];
  }
  return [first, second, share];
}

// One map, ready to be drawn: on a grid as fine as it is shown, empty where there is no photo below it.
class FineMap {
  // `certainty` is how much of its colours it is drawn with: less of a map that is mostly noise.
  constructor(plane, kind, item, certainty = 1) {
    this.plane = plane;
    this.certainty = certainty;
    this.signed = plane.signed || kind === 'signed';
    this.kind = this.signed ? 'signed' : kind;
    const [left, top, right, bottom] = item.box;
    const longest = Math.max(right - left, bottom - top);
    const pixels = kind !== 'heat' && Math.max(plane.width, plane.height) >= 96;
    this.width = pixels ? plane.width : Math.max(1, Math.round((FINE * (right - left)) / longest));
    this.height = pixels ? plane.height : Math.max(1, Math.round((FINE * (bottom - top)) / longest));
    this.values = enlarged(plane, this.width, this.height);
    this.inPixels = kind !== 'heat';
    this.empty(item);
    this.cache = new Map();
  }

  empty(item) {
    const [left, top, right, bottom] = item.box;
    const [width, height] = item.size;
    for (let y = 0; y < this.height; y++) {
      const onY = top + ((y + 0.5) / this.height) * (bottom - top);
      for (let x = 0; x < this.width; x++) {
        const onX = left + ((x + 0.5) / this.width) * (right - left);
        if (onX < 0 || onY < 0 || onX > width || onY > height) this.values[y * this.width + x] = 0;
      }
    }
  }

  of(name, make) {
    if (!this.cache.has(name)) this.cache.set(name, make());
    return this.cache.get(name);
  }

  // What is for the target, in [0, 1]; of contributions and magnitudes of pixels, whatever their sign.
  get evidence() {
    return this.of('evidence', () => this.values.map((value) => (this.signed ? Math.abs(value) : Math.max(value, 0))));
  }

  // Maps of single pixels summed over a share of their longer side: of contributions with their signs, of others what is for
  // the target. `bright` is the 99.5th percentile, which is as bright as such maps get.
  summed(spread, values = this.signed ? this.values : this.evidence) {
    return this.of(`summed ${spread} ${values === this.evidence}`, () => {
      const over = this.inPixels && spread > 0 ? normalised(blurred(values, this.width, this.height, spread * Math.max(this.width, this.height))) : values;
      const falling = sums(over.map(Math.abs));
      const { sorted } = falling;
      return { values: over, falling, bright: sorted[Math.floor(0.005 * (sorted.length - 1))] || sorted[0] || 1 };
    });
  }

  // In which order the pixels are covered: those with the most evidence first, equal ones shuffled.
  get order() {
    return this.of('order', () => {
      const own = this.inPixels && this.kind !== 'signed' ? this.evidence : this.values;
      const shuffled = own.map((value, i) => value + 1e-5 * hashed(i));
      return { values: shuffled, sorted: Float32Array.from(shuffled).sort() };
    });
  }

  at(u, v) {
    const { plane } = this;
    const x = clamp(Math.floor(u * this.width), 0, this.width - 1);
    const y = clamp(Math.floor(v * this.height), 0, this.height - 1);
    const share = this.values[y * this.width + x];
    return { share, value: share * plane.scale };
  }

  // The shares of what is for and against that lie within a rectangle (as shares of the map).
  within([u0, v0, u1, v1]) {
    let [inside, whole, insideAgainst, against] = [0, 0, 0, 0];
    for (let y = 0; y < this.height; y++) {
      const inY = (y + 0.5) / this.height >= v0 && (y + 0.5) / this.height < v1;
      for (let x = 0; x < this.width; x++) {
        const value = this.values[y * this.width + x];
        const u = (x + 0.5) / this.width;
        const here = inY && u >= u0 && u < u1;
        if (value > 0) {
          whole += value;
          if (here) inside += value;
        } else {
          against -= value;
          if (here) insideAgainst -= value;
        }
      }
    }
    return { for: whole > 0 ? inside / whole : 0, against: against > 0 ? insideAgainst / against : null };
  }
}

// The difference of two maps in their own units, as a map of its own.
function difference(one, other) {
  const width = Math.max(one.plane.width, other.plane.width);
  const height = Math.max(one.plane.height, other.plane.height);
  const first = enlarged(one.plane, width, height);
  const second = enlarged(other.plane, width, height);
  const values = first.map((value, i) => value * one.plane.scale - second[i] * other.plane.scale);
  const scale = largest(values.map(Math.abs));
  return { width, height, scale, signed: true, values: scale > 0 ? values.map((value) => value / scale) : values };
}

const hashed = (i) => (((Math.imul(i + 1, 2654435761) >>> 0) % 100003) / 100003) - 0.5;

function normalised(values) {
  const peak = largest(values.map(Math.abs));
  return peak > 0 ? values.map((value) => value / peak) : values;
}

function largest(values) {
  let found = 0;
  for (const value of values) if (value > found) found = value;
  return found;
}
