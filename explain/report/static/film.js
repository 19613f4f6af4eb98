// The methods in a row, each with its map as a small picture.

const THUMB = 112; // pixels along the shorter side of what is drawn

class Film {
  constructor(item, colors, onchange) {
    this.item = item;
    this.colors = colors;
    const name = newId('method');
    this.inputs = [];
    this.canvases = [];
    const families = new Map();
    const places = new Map();
    item.methods.forEach((method, number) => {
      const input = el('input', { type: 'radio', name, value: number, onchange: () => onchange(number) });
      const canvas = el('canvas', { 'aria-hidden': 'true' });
      sizeOf(canvas, item); // now, so that nothing moves when it is drawn
      this.inputs.push(input);
      this.canvases.push(canvas);
      const label = el('label', { class: 'frame', title: method.about }, input, canvas, el('span', {}, method.title),
        method.control ? el('small', {}, 'null map') : null, el('small', { class: 'checked' }));
      families.set(method.family, [...(families.get(method.family) || []), label]);
      places.set(method.family, [...(places.get(method.family) || []), number]);
    });
    this.order = [...places.values()].flat(); // from left to right
    const many = item.methods.length > 5 && families.size > 1;
    const groups = [...families].map(([family, labels]) =>
      el('div', { class: 'family' }, many ? el('p', {}, family) : null, el('div', { class: 'frames' }, labels)));
    this.element = el('fieldset', { class: 'film' }, el('legend', { class: 'hidden' }, 'Method'), groups);
  }

  take(number, target) {
    this.item.maps[target].forEach(({ check }, i) => {
      this.canvases[i].parentElement.querySelector('.checked').replaceChildren(...(check ? [mapCheck(check)] : []));
    });
    this.inputs.forEach((input, i) => { input.checked = i === number; });
  }

  // Small pictures of all maps of a target; those that are not seen yet wait for a quiet moment.
  async draw(image, mapOf) {
    this.drawn = mapOf;
    for (let number = 0; number < this.canvases.length; number++) {
      const map = await mapOf(number);
      if (this.drawn !== mapOf) return;
      smallPicture(this.canvases[number], image, this.item, map, this.colors);
      if (number % 4 === 3) await new Promise((resolve) => { setTimeout(resolve, 0); });
    }
  }
}

function sizeOf(canvas, item, side = THUMB) {
  const [left, top, right, bottom] = item.box;
  const [width, height] = [right - left, bottom - top];
  const scale = side / Math.min(width, height);
  canvas.width = Math.round(Math.min(width * scale, 2.2 * side));
  canvas.height = Math.round(Math.min(height * scale, 2.2 * side));
}

// The part of a photo that the model saw, with heat over it.
function smallPicture(canvas, image, item, map, colors, side = THUMB) {
  const [left, top, right, bottom] = item.box;
  const [width, height] = [right - left, bottom - top];
  sizeOf(canvas, item, side);
  const context = canvas.getContext('2d');
  const [across, down] = [canvas.width / width, canvas.height / height];
  context.drawImage(image, -left * across, -top * down, item.size[0] * across, item.size[1] * down);
  fade(context, colors.ground(map.kind, '', item.scan), canvas.width, canvas.height);
  const heat = el('canvas', {});
  colors.draw(heat, map, { view: 'heat', share: 1, colormap: '' });
  context.globalAlpha = colors.usualOpacity('heat', map.kind) / 100;
  context.drawImage(heat, 0, 0, canvas.width, canvas.height);
  context.globalAlpha = 1;
}
