// A map's colours: each view turns values into pixels with an opacity of their own, over the photo.

const SHARES = [0.5, 0.75, 0.9];
const VIEWS = [
  ['heat', 'Heat', 'Colour over the photo in grey'],
  ['contour', 'Contour', 'Lines around the places that hold 50, 75 and 90 % of the evidence'],
  ['mask', 'Mask', 'Those places, and nothing else'],
  ['spotlight', 'Spotlight', 'The photo lit by the map'],
];
const MAGNITUDES = ['plasma', 'viridis', 'inferno', 'cividis'];
const CONTRIBUTIONS = ['RdBu_r', 'PuOr_r'];

class Colors {
  // `cover` is what a mask covers the photo with.
  constructor(packed, cover) {
    this.cover = cover;
    this.tables = new Map(Object.entries(packed).map(([name, text]) => [name, bytesOf(text)]));
  }

  // Opacity and colour in 256 steps; of contributions, from the most against to the most for.
  steps(kind, name) {
    const table = this.tables.get(name);
    const found = new Uint8ClampedArray(256 * 4);
    for (let i = 0; i < 256; i++) {
      found.set(table.subarray(3 * i, 3 * i + 3), 4 * i);
      const share = i / 255;
      const rising = kind === 'heat' ? 1 - (1 - share) ** 3 : kind === 'signed' ? Math.sqrt(Math.abs(2 * share - 1)) : 1;
      found[4 * i + 3] = Math.round(255 * rising);
    }
    return found;
  }

  // Which of the named colour maps suits a map.
  suited(kind, name) {
    const known = kind === 'signed' ? CONTRIBUTIONS : MAGNITUDES;
    return known.includes(name) ? name : kind === 'signed' ? 'RdBu_r' : kind === 'intensity' ? 'inferno' : 'plasma';
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
    const steps = this.steps(map.kind, this.suited(map.kind, colormap));
    const least = threshold(map.falling, share);
    const { values, evidence, kind } = map;
    const stretch = kind === 'heat' ? 1 : map.inPixels ? 1 / map.bright : 1;
    for (let i = 0; i < values.length; i++) {
      if (evidence[i] < least || (kind !== 'intensity' && evidence[i] === 0)) continue;
      const value = clamp((kind === 'signed' ? values[i] : evidence[i]) * stretch, -1, 1);
      const step = 4 * Math.round(255 * (kind === 'signed' ? value / 2 + 0.5 : value));
      pixels[4 * i] = steps[step];
      pixels[4 * i + 1] = steps[step + 1];
      pixels[4 * i + 2] = steps[step + 2];
      pixels[4 * i + 3] = steps[step + 3];
    }
  }

  mask(pixels, map, share) {
    const shares = share < 1 ? [share] : SHARES;
    const leasts = shares.map((each) => threshold(map.fallingAreas, each));
    const covers = shares.map((_, i) => Math.round((255 * i) / (shares.length + 0.5)));
    const { areas } = map;
    for (let i = 0; i < areas.length; i++) {
      const step = leasts.findIndex((least) => areas[i] >= least);
      pixels[4 * i] = this.cover[0];
      pixels[4 * i + 1] = this.cover[1];
      pixels[4 * i + 2] = this.cover[2];
      pixels[4 * i + 3] = step < 0 ? 255 : covers[step];
    }
  }

  spotlight(pixels, map, share) {
    const { areas } = map;
    const least = threshold(map.fallingAreas, share);
    for (let i = 0; i < areas.length; i++) {
      const value = areas[i] < least ? 0 : areas[i];
      pixels[4 * i + 3] = Math.round(255 * 0.86 * (1 - value) ** 2);
    }
  }

  // The colours of contour lines, the brightest around the first share.
  lines(count, colormap) {
    const table = this.tables.get(this.suited('heat', colormap));
    return Array.from({ length: count }, (_, i) => {
      const place = Math.floor(255 * (count === 1 ? 0.9 : 0.97 - (0.52 * i) / (count - 1)));
      return `rgb(${table.subarray(3 * place, 3 * place + 3).join(' ')})`;
    });
  }

  // The colours of lines around what is for the target and what is against it, the strongest around the first share.
  sides(count, colormap) {
    const table = this.tables.get(this.suited('signed', colormap));
    return Array.from({ length: count }, (_, i) => (count === 1 ? 0.4 : 0.4 - (0.15 * i) / (count - 1)))
      .flatMap((place) => [0.5 + place, 0.5 - place])
      .map((place) => `rgb(${table.subarray(3 * Math.floor(255 * place), 3 * Math.floor(255 * place) + 3).join(' ')})`);
  }

  // A bar of colours for the legend.
  bar(canvas, kind, colormap) {
    canvas.width = 256;
    canvas.height = 1;
    const picture = canvas.getContext('2d').createImageData(256, 1);
    const table = this.tables.get(this.suited(kind, colormap));
    for (let i = 0; i < 256; i++) {
      picture.data.set(table.subarray(3 * i, 3 * i + 3), 4 * i);
      picture.data[4 * i + 3] = 255;
    }
    canvas.getContext('2d').putImageData(picture, 0, 0);
  }
}
