// One picture: the photo, and what is drawn on the part of it that the model saw.

class Pane {
  constructor(item, colors) {
    this.item = item;
    this.colors = colors;
    const [left, top, right, bottom] = item.box;
    const [width, height] = item.size;
    this.photo = el('img', { class: 'photo', src: item.photo, alt: '', draggable: 'false' });
    this.blurred = el('img', { class: 'blurred', src: item.photo, alt: '', hidden: true, draggable: 'false' });
    this.canvas = el('canvas', { class: 'map' });
    this.cover = el('canvas', { class: 'cover', hidden: true });
    this.lines = svg('svg', { class: 'lines', viewBox: '0 0 1 1', preserveAspectRatio: 'none' });
    this.seen = el('div', { class: 'seen' }, this.blurred, this.canvas, this.cover, this.lines);
    this.element = el('div', { class: 'pane', 'aria-hidden': 'true' }, this.photo, this.seen);
    const style = this.seen.style;
    style.left = `${(100 * left) / width}%`;
    style.top = `${(100 * top) / height}%`;
    style.width = `${(100 * (right - left)) / width}%`;
    style.height = `${(100 * (bottom - top)) / height}%`;
    const inside = this.blurred.style;
    inside.left = `${(-100 * left) / (right - left)}%`;
    inside.top = `${(-100 * top) / (bottom - top)}%`;
    inside.width = `${(100 * width) / (right - left)}%`;
    inside.height = `${(100 * height) / (bottom - top)}%`;
  }

  // The photo as it is.
  showPhoto() {
    this.clear();
  }

  showMap(map, look) {
    this.clear(look.view === 'heat' ? this.colors.ground(map.kind, look.colormap, this.item.scan) : null);
    if (look.view === 'contour') {
      this.contour(map, look);
      return;
    }
    this.canvas.hidden = false;
    this.canvas.style.opacity = look.opacity;
    this.colors.draw(this.canvas, map, look);
  }

  // The photo where its sets of regions lie, and the rest pale; or without the first one.
  showSets(map, most, without = false) {
    this.clear();
    const { width, height } = map.plane;
    const numbers = map.of('set numbers', () => setNumbers(map, most));
    [this.canvas.width, this.canvas.height, this.canvas.hidden, this.canvas.style.opacity] = [width, height, false, 1];
    const context = this.canvas.getContext('2d');
    const picture = context.createImageData(width, height);
    numbers.forEach((number, i) => {
      const alpha = without ? (number === 1 ? 255 : 0) : number ? 0 : PALE;
      picture.data.set([...this.colors.cover, alpha], 4 * i);
    });
    context.putImageData(picture, 0, 0);
    if (without) return;
    const paths = Array.from({ length: Math.max(0, ...numbers) }, (_, i) =>
      map.of(`set ${i}`, () => outline(numbers.map((number) => Number(number === i + 1)), width, height, 0.5)));
    this.lines.replaceChildren(...paths.map((d) => svg('path', { d, class: 'wide', stroke: '#18181c' })),
      ...paths.map((d, i) => svg('path', { d, class: 'thin', stroke: SET_COLORS[i % SET_COLORS.length] })));
    this.lines.style.opacity = 1;
  }

  contour(map, { share, colormap, opacity }) {
    const signed = map.kind === 'signed';
    const shares = share < 1 ? [share] : this.colors.shares(map.kind);
    const { areas, net } = this.colors.drawing;
    const { values, falling } = signed ? map.summed(net) : map.summed(areas, map.evidence);
    const colors = signed ? this.colors.sides(shares.length, colormap) : this.colors.lines(shares.length, colormap);
    const around = (each, side) => outline(values.map((value) => side * value), map.width, map.height, Math.max(threshold(falling, each), 1e-6), side < 0);
    const paths = signed
      ? shares.flatMap((each) => [1, -1].map((side) => map.of(`outline ${each} ${side}`, () => around(each, side))))
      : shares.map((each) => map.of(`outline ${each}`, () => around(each, 1)));
    const wide = paths.map((d, i) => svg('path', { d, class: 'wide', stroke: signed ? rimOf(colors[i]) : '#18181c' }));
    const thin = paths.map((d, i) => svg('path', { d, class: `thin thin-${i}`, stroke: colors[i] }));
    this.lines.replaceChildren(...wide, ...thin.reverse());
    this.lines.style.opacity = opacity;
  }

  // The photo with a share of its pixels covered, or shown on a blurred one, those with the most evidence first.
  showCovered(map, share, way) {
    this.clear();
    this.cover.hidden = false;
    const { values, sorted } = map.order;
    const count = Math.round(share * values.length);
    const least = count <= 0 ? Infinity : sorted[values.length - count];
    if (way === 'insertion') this.reveal(map, values, least);
    else this.hide(map, values, least);
  }

  hide(map, values, least) {
    this.cover.width = map.width;
    this.cover.height = map.height;
    const context = this.cover.getContext('2d');
    const picture = context.createImageData(map.width, map.height);
    const [red, green, blue] = this.item.zero;
    for (let i = 0; i < values.length; i++) {
      if (values[i] >= least) picture.data.set([red, green, blue, 255], 4 * i);
    }
    context.putImageData(picture, 0, 0);
  }

  reveal(map, values, least) {
    this.blurred.hidden = false;
    const bounds = this.seen.getBoundingClientRect();
    this.blurred.style.filter = `blur(${(2.9 * bounds.width) / this.item.input[1]}px)`;
    const mask = el('canvas', {});
    mask.width = map.width;
    mask.height = map.height;
    const picture = mask.getContext('2d').createImageData(map.width, map.height);
    for (let i = 0; i < values.length; i++) if (values[i] >= least) picture.data[4 * i + 3] = 255;
    mask.getContext('2d').putImageData(picture, 0, 0);
    const scale = Math.min(window.devicePixelRatio || 1, 1024 / Math.max(bounds.width, bounds.height, 1));
    const [width, height] = [Math.max(1, Math.round(bounds.width * scale)), Math.max(1, Math.round(bounds.height * scale))];
    this.cover.width = width;
    this.cover.height = height;
    const context = this.cover.getContext('2d');
    const [left, top, right, bottom] = this.item.box;
    const [fullWidth, fullHeight] = this.item.size;
    const across = width / (right - left);
    const down = height / (bottom - top);
    context.drawImage(this.photo, -left * across, -top * down, fullWidth * across, fullHeight * down);
    context.globalCompositeOperation = 'destination-in';
    context.drawImage(mask, 0, 0, width, height);
    context.globalCompositeOperation = 'source-over';
  }

  // With a ground, the photo is grey, and faded to that.
  clear(ground = null) {
    this.ground = ground;
    this.element.dataset.base = ground ? 'grey' : 'color';
    this.element.style.background = ground ? `rgb(${ground[0]} ${ground[0]} ${ground[0]})` : '';
    this.photo.style.opacity = ground ? ground[1] : '';
    this.canvas.hidden = true;
    this.cover.hidden = true;
    this.blurred.hidden = true;
    this.lines.replaceChildren();
  }

  // The left or the right part of it, where two are compared.
  clip(side, share) {
    const hidden = `${100 * share}%`;
    this.element.style.clipPath = side === 'left' ? `inset(0 calc(100% - ${hidden}) 0 0)` : side === 'right' ? `inset(0 0 0 ${hidden})` : '';
  }
}
