// A map's colours: each view turns values into pixels with an opacity of their own, over the photo.

const SHARES = [0.5, 0.75, 0.9];
const VIEWS = [
  ['heat', 'Heat', 'Colour over the photo in grey'],
  ['contour', 'Contour', 'Lines around the places that hold 50, 75 and 90 % of the evidence'],
  ['mask', 'Mask', 'Those places, and nothing else'],
  ['spotlight', 'Spotlight', 'The photo lit by the map'],
];
class Colors {
  // `drawing` says how maps of each kind become colours; `cover` is what a mask covers the photo with.
  constructor(drawing, cover) {
    this.drawing = drawing;
    this.cover = cover;
    this.tables = new Map();
  }

  // The names of the colour maps for a kind.
  names(kind) {
    return Object.keys(this.drawing[kind].colors);
  }

  // Which of the named colour maps suits a map.
  suited(kind, name) {
    return this.names(kind).includes(name) ? name : this.drawing[kind].colormap;
  }

  table(kind, name) {
    const key = `${kind} ${this.suited(kind, name)}`;
    if (!this.tables.has(key)) this.tables.set(key, bytesOf(this.drawing[kind].colors[this.suited(kind, name)]));
    return this.tables.get(key);
  }

  // In percent, unless one is chosen.
  usualOpacity(view, kind) {
    return view === 'heat' ? this.drawing[kind].opacity : 100;
  }

  // What lies below the colours: a grey, and how much is seen of the photo, which is faded to it; of a scan, all.
  ground(kind, name, scan) {
    return this.drawing[kind].grounds[this.suited(kind, name)][Number(scan)];
  }

  // Opacity and colour in 256 steps; of contributions, from the most against to the most for.
  steps(kind, name) {
    const table = this.table(kind, name);
    const opacity = bytesOf(this.drawing[kind].levels);
    const found = new Uint8ClampedArray(256 * 4);
    for (let i = 0; i < 256; i++) {
      found.set(table.subarray(3 * i, 3 * i + 3), 4 * i);
      found[4 * i + 3] = opacity[i];
    }
    return found;
  }

  draw(canvas, map, { view, share, colormap }) {
    canvas.width = map.width;
    canvas.height = map.height;
    const context = canvas.getContext('2d');
    const picture = context.createImageData(map.width, map.height);
    if (view === 'heat') this.heat(picture.data, map, share, colormap);
    else if (view === 'mask') this.mask(picture.data, map, share);
    else if (view === 'spotlight') this.spotlight(picture.data, map, share);
    context.putImageData(picture, 0, 0);
  }

  heat(pixels, map, share, colormap) {
    const { kind } = map;
    const steps = this.steps(kind, colormap);
    const { power, spread } = this.drawing[kind];
    const { values, falling, bright } = map.summed(spread);
    const least = threshold(falling, share);
    const stretch = kind === 'heat' ? 1 : 1 / bright;
    for (let i = 0; i < values.length; i++) {
      const size = Math.abs(values[i]);
      if (size < least || (kind !== 'intensity' && size === 0)) continue;
      const level = Math.sign(values[i]) * (map.certainty * clamp(size * stretch, 0, 1)) ** power;
      const step = 4 * Math.round(255 * (kind === 'signed' ? level / 2 + 0.5 : level));
      pixels[4 * i] = steps[step];
      pixels[4 * i + 1] = steps[step + 1];
      pixels[4 * i + 2] = steps[step + 2];
      pixels[4 * i + 3] = steps[step + 3];
    }
  }

  mask(pixels, map, share) {
    const shares = share < 1 ? [share] : SHARES;
    const { values: areas, falling } = map.summed(this.drawing.areas, map.evidence);
    const leasts = shares.map((each) => threshold(falling, each));
    const covers = shares.map((_, i) => Math.round((255 * i) / (shares.length + 0.5)));
    for (let i = 0; i < areas.length; i++) {
      const step = leasts.findIndex((least) => areas[i] >= least);
      pixels[4 * i] = this.cover[0];
      pixels[4 * i + 1] = this.cover[1];
      pixels[4 * i + 2] = this.cover[2];
      pixels[4 * i + 3] = step < 0 ? 255 : covers[step];
    }
  }

  spotlight(pixels, map, share) {
    const { values: areas, falling } = map.summed(this.drawing.areas, map.evidence);
    const least = threshold(falling, share);
    for (let i = 0; i < areas.length; i++) {
      const value = areas[i] < least ? 0 : areas[i];
      pixels[4 * i + 3] = Math.round(255 * (1 - this.drawing.dark) * (1 - value) ** 2);
    }
  }

  // What was done to a map of single pixels before it was drawn, in words.
  summedOver(view, map) {
    const spread = view === 'heat' ? this.drawing[map.kind].spread : view === 'contour' && map.kind === 'signed' ? this.drawing.net : this.drawing.areas;
    return map.inPixels && spread > 0 ? `summed over ${Number((100 * spread).toPrecision(2))} % of the side` : '';
  }

  // The shares of the evidence that contour lines of a map hold, unless one is chosen.
  shares(kind) {
    return kind === 'signed' ? this.drawing.sides : SHARES;
  }

  // The colours of contour lines, the brightest around the first share.
  lines(count, colormap) {
    const table = this.table('heat', colormap);
    return Array.from({ length: count }, (_, i) => 0.97 - (0.52 * i) / (Math.max(2, count) - 1)).map((place) => at(table, place));
  }

  // The colours of lines around what is for the target and what is against it, the strongest around the first share.
  sides(count, colormap) {
    const table = this.table('signed', colormap);
    return Array.from({ length: count }, (_, i) => 0.4 - (0.15 * i) / (Math.max(2, count) - 1))
      .flatMap((place) => [0.5 + place, 0.5 - place])
      .map((place) => at(table, place));
  }

  // A bar of colours for the legend, as they are on a photo of this brightness.
  bar(canvas, kind, { colormap, opacity, grey, scan }) {
    const steps = this.steps(kind, colormap);
    const { power } = this.drawing[kind];
    const [ground, visible] = this.ground(kind, colormap, scan);
    const below = ground + (grey - ground) * visible;
    canvas.width = 256;
    canvas.height = 1;
    const picture = canvas.getContext('2d').createImageData(256, 1);
    for (let i = 0; i < 256; i++) {
      const value = kind === 'signed' ? (2 * i) / 255 - 1 : i / 255;
      const level = Math.sign(value) * Math.abs(value) ** power;
      const step = 4 * Math.round(255 * (kind === 'signed' ? level / 2 + 0.5 : level));
      const share = (steps[step + 3] / 255) * opacity;
      const color = [...steps.subarray(step, step + 3)].map((channel) => below + (channel - below) * share);
      picture.data.set([...color, 255], 4 * i);
    }
    canvas.getContext('2d').putImageData(picture, 0, 0);
  }
}

function at(table, place) {
  const first = 3 * Math.floor(255 * place);
  return `rgb(${table.subarray(first, first + 3).join(' ')})`;
}

// The colour around a line: light colours have a dark rim, and dark ones a light one.
function rimOf(color) {
  const [red, green, blue] = color.match(/\d+/g).map(Number);
  return red + green + blue > 3 * 128 ? '#18181c' : '#fff';
}

// The photo that was drawn, in grey and faded to its ground, as CSS does it for a pane.
function fade(context, [grey, visible], width, height) {
  context.globalCompositeOperation = 'saturation';
  context.fillStyle = '#808080';
  context.fillRect(0, 0, width, height);
  context.globalCompositeOperation = 'source-over';
  context.fillStyle = `rgb(${grey} ${grey} ${grey} / ${100 * (1 - visible)}%)`;
  context.fillRect(0, 0, width, height);
}
