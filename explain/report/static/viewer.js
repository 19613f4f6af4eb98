// One photo: everything about it, kept in one state that the address shows.

const USUAL = {
  method: 0, target: 0, layer: 0, view: 'heat', opacity: null, share: 100, colormap: '', compare: 'none', wipe: 50,
  cover: null, way: 'deletion', region: null, not: null, whole: false,
};

class Viewer {
  constructor(item, colors, { state = {}, keep = () => {}, widget = false, photo = null }) {
    this.item = item;
    this.colors = colors;
    this.keep = keep;
    this.state = this.valid({ ...USUAL, ...state });
    this.maps = new Map();
    this.redraw = once(() => this.draw());
    const change = (patch) => this.change(patch);
    this.stage = new Stage(item, colors, {
      point: (u, v) => { this.point = u === null ? null : [u, v]; this.read(); },
      region: (region) => change({ region }),
      wipe: (share) => change({ wipe: Math.round(100 * share) }),
      pick: (place) => {
        const target = item.targets.findIndex(({ label }) => label === item.predictions[place][0]);
        if (target >= 0) change({ target, not: null, cover: null });
        else item.live?.explain?.(place);
      },
    });
    this.film = new Film(item, colors, (method) => change({ method, layer: 0, cover: null }));
    this.answers = new Answers(item, (target) => change({ target, not: this.state.not === target ? null : this.state.not, cover: null }));
    this.look = new Look(item, colors, change);
    this.why = new Why(item, change);
    this.evidence = new Evidence(item, change);
    this.sets = new Sets(item, change);
    this.again = new Again(item);
    this.title = el('h1', {});
    this.reading = el('p', { class: 'reading' });
    this.caution = el('p', { class: 'caution' });
    this.regionWords = el('p', { class: 'region-words', role: 'status' });
    this.pencil = el('button', { type: 'button', class: 'plain-button', 'aria-pressed': 'false', onclick: () => this.pencilPressed() }, 'Draw a region');
    this.save = el('button', { type: 'button', class: 'plain-button', onclick: () => this.picture() }, 'Save the picture');
    this.below = el('div', { class: 'below' });
    const about = `${item.model}, ${item.input[1]} × ${item.input[0]} pixels`;
    this.element = el('div', { class: 'viewer' },
      el('div', { class: 'main' },
        el('div', { class: 'heading' }, this.title, el('p', { class: 'sub' }, `${item.name} · ${about} `, rightOrWrong(photo), photo?.page ? el('a', { href: photo.page }, photo.page) : null)),
        el('div', { class: 'easel' }, this.stage.element),
        el('div', { class: 'under' }, this.look.legend, el('div', { class: 'buttons' }, this.pencil, this.save)),
        this.caution, this.regionWords, this.reading, this.film.element),
      el('div', { class: 'side' }, this.answers.element, this.sets.element, this.look.element, this.evidence.element, this.why.element),
      widget ? null : this.below,
      widget ? null : el('div', { class: 'foot' }, this.again.element));
    this.ready = this.draw();
  }

  valid(state) {
    const { methods, targets } = this.item;
    const within = (value, count) => (Number.isInteger(value) && value >= 0 && value < count ? value : 0);
    state.method = within(state.method, methods.length);
    state.target = within(state.target, targets.length);
    state.layer = within(state.layer, this.item.maps[state.target][state.method].layers.length + 1);
    if (!VIEWS.some(([view]) => view === state.view)) state.view = 'heat';
    if (state.not !== null && (state.not === state.target || !targets[state.not])) state.not = null;
    const [kind, t, m] = String(state.compare).split(':');
    if (kind === 'map' ? !(this.item.maps[t] && this.item.maps[t][m]) : !['none', 'photo', 'without'].includes(kind)) state.compare = 'none';
    const { sets } = this.item.maps[state.target][state.method];
    if (kind === 'without' && !(sets && sets.length)) state.compare = 'none';
    state.whole = Boolean(state.whole && sets);
    return state;
  }

  change(patch) {
    if ('cover' in patch && patch.cover === null) this.evidence.halt();
    Object.assign(this.state, patch);
    this.valid(this.state);
    this.redraw();
  }

  // A map by target, method and layer; unpacked once.
  map(target, method, layer = 0) {
    const key = `${target}/${method}/${layer}`;
    if (!this.maps.has(key)) {
      const found = this.item.maps[target][method];
      const packed = layer ? found.layers[layer - 1].plane : found.plane;
      this.maps.set(key, unpackedPlane(packed).then((plane) => new FineMap(plane, found.kind, this.item, found.certainty)));
    }
    return this.maps.get(key);
  }

  async shown() {
    const { target, method, layer, not } = this.state;
    const map = await this.map(target, method, layer);
    if (not === null) return map;
    const key = `${target}-${not}/${method}/${layer}`;
    if (!this.maps.has(key)) {
      const other = await this.map(not, method, layer);
      this.maps.set(key, Promise.resolve(new FineMap(difference(map, other), map.inPixels ? 'signed' : 'heat', this.item)));
    }
    return this.maps.get(key);
  }

  async draw() {
    const { state, stage } = this;
    this.turn = (this.turn ?? 0) + 1;
    const { turn } = this;
    await stage.front.photo.decode().catch(() => {});
    const [map, own, other] = await Promise.all([this.shown(), this.map(state.target, state.method, state.layer), this.other()]);
    if (turn !== this.turn) return; // another map was asked for meanwhile
    this.now = map;
    const opacity = state.opacity ?? this.colors.usualOpacity(state.view, map.kind);
    const look = { view: state.view, share: state.share / 100, opacity: opacity / 100, colormap: state.colormap };
    const label = this.item.targets[state.target].label;
    if (state.cover === null) this.put(stage.front, map, this.item.maps[state.target][state.method], look);
    else stage.front.showCovered(own, state.cover / 100, state.way);
    this.drawOther(look, other);
    this.title.replaceChildren(...(state.not === null ? ['Why ', el('em', {}, label), '?']
      : ['Why ', el('em', {}, label), ', and not ', el('em', {}, this.item.targets[state.not].label), '?']));
    const { remark } = this.item.maps[state.target][state.method];
    this.caution.textContent = remark && `${remark[0].toUpperCase()}${remark.slice(1)}.`;
    this.film.take(state.method, state.target);
    this.answers.take(state.target);
    this.look.take(state, map, opacity);
    this.why.take(state);
    this.evidence.take(state);
    this.sets.take(state);
    this.again.take(state);
    this.tables();
    this.describe(label);
    await this.mark();
    if (turn !== this.turn) return;
    this.read();
    this.small();
    this.keep(state);
  }

  // Sets of regions are drawn as such, unless another view was chosen.
  put(pane, map, { sets, reasons }, look) {
    const { state } = this;
    if (!sets || look.view !== 'heat' || state.not !== null) pane.showMap(map, look);
    else if (state.whole) pane.showPhoto();
    else pane.showSets(map, reasons);
  }

  // The map that this one is compared with, if it is one.
  other() {
    const [kind, target, method] = this.state.compare.split(':');
    return kind === 'map' ? this.map(Number(target), Number(method)) : null;
  }

  drawOther(look, other) {
    const { state, stage } = this;
    const names = [this.item.methods[state.method].title];
    if (state.compare === 'none' || state.cover !== null) {
      stage.compare(null);
      return;
    }
    if (state.compare === 'photo') {
      stage.back.showPhoto();
      names.push('the photo');
    } else if (state.compare === 'without') {
      stage.back.showSets(this.now, this.item.maps[state.target][state.method].reasons, true);
      names.push('without it');
    } else {
      const [, t, m] = state.compare.split(':').map(Number);
      this.put(stage.back, other, this.item.maps[t][m], { ...look, opacity: (state.opacity ?? this.colors.usualOpacity(state.view, other.kind)) / 100 });
      names.push(t === state.target ? this.item.methods[m].title : `${this.item.methods[m].title}, ${this.item.targets[t].label}`);
    }
    stage.compare(state.wipe / 100, ...names);
  }

  tables() {
    const { item, state } = this;
    const key = `${state.target}/${state.method}`;
    if (this.tabled === key) return;
    this.tabled = key;
    this.below.replaceChildren(...[aboutMap(item, state), checks(item, state), allMethods(item, state)].filter(Boolean));
  }

  async mark() {
    let { place } = this.item.targets[this.state.target];
    if (place && place.mask) {
      this.place ??= new Map();
      if (!this.place.has(place)) {
        const mask = await unpackedPlane(place.mask);
        this.place.set(place, { outline: outline(mask.values, mask.width, mask.height, 0.5) });
      }
      place = this.place.get(place);
    }
    this.stage.drawMarks(place);
  }

  describe(label) {
    const { state, now } = this;
    const method = this.item.methods[state.method].title;
    const thirds = ['left', 'middle', 'right'];
    const rows = ['top', 'middle', 'bottom'];
    let [best, where] = [-1, ''];
    for (let v = 0; v < 3; v++) {
      for (let u = 0; u < 3; u++) {
        const share = now.within([u / 3, v / 3, (u + 1) / 3, (v + 1) / 3]).for;
        if (share > best) [best, where] = [share, u === 1 && v === 1 ? 'in the middle' : `at the ${rows[v]} ${thirds[u]}`];
      }
    }
    this.stage.element.setAttribute('aria-label',
      `${this.item.name} with the map of ${method} for ${label}: most of the evidence, ${percent(best)}, lies ${where} of what the model saw. Arrow keys read values, with Shift they draw a region, Escape ends it.`);
  }

  read() {
    const { point, now, state } = this;
    this.stage.drawRegion(state.region);
    this.readRegion();
    if (!now) return;
    if (!point) {
      this.reading.textContent = 'Point at the photo to read values; drag to measure a region.';
      return;
    }
    const [u, v] = point;
    if (u < 0 || v < 0 || u > 1 || v > 1) {
      this.reading.textContent = 'The model did not see this part of the photo.';
      return;
    }
    const [left, top, right, bottom] = this.item.box;
    const [x, y] = [Math.round(left + u * (right - left)), Math.round(top + v * (bottom - top))];
    const { share, value } = now.at(u, v);
    this.reading.textContent = `At ${x}, ${y}: ${percent(Math.abs(share))} of the largest value (${figure(value)})${share < 0 ? ', against' : ''}`;
  }

  readRegion() {
    const { region } = this.state;
    if (!region || !this.now) {
      this.regionWords.textContent = '';
      return;
    }
    const label = this.item.targets[this.state.target].label;
    const found = this.now.within(region);
    const [u0, v0, u1, v1] = region;
    const words = `${percent(found.for)} of the evidence for ${label} is in here, on ${percent((u1 - u0) * (v1 - v0))} of what the model saw`;
    const text = found.against === null ? `${words}.` : `${words}; and ${percent(found.against)} of what opposes it.`;
    if (this.regionWords.textContent !== text) this.regionWords.textContent = text;
  }

  // What is said of a map has changed.
  refresh() {
    this.tabled = undefined;
    this.redraw();
  }

  small() {
    const { target } = this.state;
    if (this.smallOf === target) return;
    this.smallOf = target;
    const begin = window.requestIdleCallback ?? ((work) => setTimeout(work, 30));
    begin(() => this.film.draw(this.stage.front.photo, (method) => this.map(target, method)));
  }

  pencilPressed() {
    const pressed = this.pencil.getAttribute('aria-pressed') !== 'true';
    this.pencil.setAttribute('aria-pressed', String(pressed));
    this.stage.drawing = pressed;
    this.stage.element.classList.toggle('drawing', pressed);
  }

  // What is on the stage, with its boxes and a caption, as a file.
  picture() {
    const { stage, state, now, item } = this;
    const image = stage.front.photo;
    const times = Math.max(1, Math.ceil(320 / Math.max(image.naturalWidth, image.naturalHeight)));
    const [width, height] = [image.naturalWidth * times, image.naturalHeight * times];
    const caption = this.caption(Math.max(width, 260));
    const canvas = el('canvas', {});
    canvas.width = Math.max(width, 260);
    canvas.height = height + caption.height;
    const context = canvas.getContext('2d');
    context.fillStyle = '#fff';
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(caption, 0, height);
    context.translate(Math.floor((canvas.width - width) / 2), 0);
    context.drawImage(image, 0, 0, width, height);
    if (stage.front.ground) fade(context, stage.front.ground, width, height);
    const scale = width / item.size[0];
    const [left, top, right, bottom] = item.box.map((edge) => edge * scale);
    const layer = state.cover === null ? stage.front.canvas : stage.front.cover;
    context.globalAlpha = state.cover === null ? Number(stage.front.canvas.style.opacity || 1) : 1;
    if (!layer.hidden) context.drawImage(layer, left, top, right - left, bottom - top);
    context.globalAlpha = 1;
    if (state.cover === null) drawLines(context, stage.front.lines, [left, top, right, bottom], now);
    const target = item.targets[state.target].place?.box;
    const boxes = [...(item.boxes ?? []).map((box) => [box, '#fff']), ...(target ? [[target, '#7dffb2']] : []), ...(state.region ? [[state.region, '#fff']] : [])];
    for (const [[u0, v0, u1, v1], color] of boxes) {
      const edges = [left + u0 * (right - left), top + v0 * (bottom - top), (u1 - u0) * (right - left), (v1 - v0) * (bottom - top)];
      for (const [wide, stroke] of [[width / 120, '#18181c'], [width / 300, color]]) {
        context.lineWidth = Math.max(1, wide);
        context.strokeStyle = stroke;
        context.strokeRect(...edges);
      }
    }
    canvas.toBlob((blob) => {
      const link = el('a', { href: URL.createObjectURL(blob), download: `${item.name.replace(/\.\w+(?=$|, )/, '').replace(', ', '-')}-${item.methods[state.method].name}.png` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
  }

  // The strip below a picture: the class, what was drawn and how, and what its colours mean.
  caption(width) {
    const { state, stage, item, now } = this;
    const { label } = item.targets[state.target];
    const amount = amountOf(item.targets[state.target]);
    const { title, layer } = item.methods[state.method];
    const large = Math.max(13, Math.round(width / 34));
    const [small, gap] = [Math.max(11, Math.round(0.78 * large)), Math.round(0.7 * large)];
    const not = state.not === null ? '' : `, and not ${item.targets[state.not].label}`;
    const about = [title, layer && `layer ${layer}`, this.colors.summedOver(state.view, now), item.model.split(' ')[0]];
    const ramp = state.view === 'heat' && state.cover === null;
    const words = state.cover === null ? [...this.look.legend.children].map((each) => each.textContent).join(' ')
      : `${state.cover} % of the pixels ${state.way === 'deletion' ? 'covered' : 'shown'}, most evidence first`;
    const lines = [about.filter(Boolean).join(' · '), ...(ramp ? [] : [words])];
    const canvas = el('canvas', {});
    canvas.width = width;
    canvas.height = 2 * gap + Math.round(1.35 * large) + lines.length * Math.round(1.4 * small);
    const context = canvas.getContext('2d');
    context.fillStyle = '#fff';
    context.fillRect(0, 0, canvas.width, canvas.height);
    const write = (text, x, y, size, color, weight = '') => {
      context.font = `${weight} ${size}px system-ui, "DejaVu Sans", sans-serif`;
      context.fillStyle = color;
      context.fillText(text, x, y, width - 2 * gap - (ramp ? Math.min(width / 4, 13 * small) + gap : 0));
    };
    write(`${label}${not || (amount && `, ${amount}`)}`, gap, gap + large, large, '#18181c', 'bold');
    lines.forEach((line, i) => write(line, gap, gap + Math.round(1.35 * large) + Math.round(1.4 * small) * (i + 0.75), small, '#6e6e76'));
    if (ramp) {
      const bar = el('canvas', {});
      this.colors.bar(bar, now.kind, { colormap: state.colormap, opacity: Number(stage.front.canvas.style.opacity || 1), grey: item.grey, scan: item.scan });
      const long = Math.min(width / 4, 13 * small);
      context.drawImage(bar, width - gap - long, gap, long, 0.8 * small);
      const ends = now.kind === 'signed' ? ['against', 'for'] : ['0', 'max'];
      context.font = `${small}px system-ui, "DejaVu Sans", sans-serif`;
      context.fillStyle = '#6e6e76';
      context.fillText(ends[0], width - gap - long, gap + 2 * small);
      context.fillText(ends[1], width - gap - context.measureText(ends[1]).width, gap + 2 * small);
    }
    return canvas;
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || !settings.keys) return;
    if (event.target.matches('input[type=text], input[type=search], input[type=number], select, textarea')) return;
    const { item, state } = this;
    const next = (value, count, back) => (value + (back ? count - 1 : 1)) % count;
    const back = event.shiftKey;
    const { order } = this.film;
    const layers = item.maps[state.target][state.method].layers.length + 1;
    const does = {
      m: () => ({ method: order[next(order.indexOf(state.method), order.length, back)], layer: 0, cover: null }),
      t: () => ({ target: next(state.target, item.targets.length, back), not: null, cover: null }),
      l: () => ({ layer: next(state.layer, layers, back), cover: null }),
      v: () => ({ view: VIEWS[next(VIEWS.findIndex(([view]) => view === state.view), VIEWS.length, back)][0], opacity: null, cover: null }),
      w: () => ({ compare: state.compare === 'none' ? 'photo' : 'none', cover: null }),
      c: () => ({ cover: state.cover === null ? 20 : null }),
    }[event.key.toLowerCase()];
    if (!does) return;
    event.preventDefault();
    this.change(does());
  }
}

function drawLines(context, lines, [left, top, right, bottom]) {
  context.save();
  context.translate(left, top);
  context.scale(right - left, bottom - top);
  for (const path of lines.children) {
    context.lineWidth = (path.classList.contains('wide') ? 5 : 2.5) / (right - left);
    context.strokeStyle = path.getAttribute('stroke');
    context.stroke(new Path2D(path.getAttribute('d')));
  }
  context.restore();
}
