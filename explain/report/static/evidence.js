// The photo loses its evidence: the curves of deletion and insertion, to drag along.

const PLOT = { width: 340, height: 150, left: 38, right: 10, top: 10, bottom: 24 };

class Evidence {
  constructor(item, change) {
    this.item = item;
    this.change = change;
    this.way = choices('', [
      ['deletion', 'Cover', 'Cover the places with the most evidence first'],
      ['insertion', 'Uncover', 'Show the places with the most evidence first, on a blurred photo'],
    ], (way) => change({ way, cover: this.state.cover ?? 0 }));
    this.share = slider('Share of the pixels', { step: 0.5 }, (share) => change({ cover: share }));
    this.play = el('button', { type: 'button', class: 'plain-button', onclick: () => this.toggle() }, '▶ Play');
    this.stop = el('button', { type: 'button', class: 'plain-button', onclick: () => { this.halt(); change({ cover: null }); } }, 'Back to the map');
    this.plot = svg('svg', { class: 'plot', viewBox: `0 0 ${PLOT.width} ${PLOT.height}`, role: 'img', onpointerdown: (event) => this.press(event) });
    this.words = el('p', { class: 'hint' });
    this.element = el('section', { class: 'card' }, el('h2', {}, 'Does the evidence matter?'), this.way, this.plot, this.share,
      el('div', { class: 'buttons' }, this.play, this.stop), this.words);
  }

  take(state) {
    this.state = state;
    this.way.take(state.way);
    this.share.take(state.cover ?? 0);
    this.stop.disabled = state.cover === null;
    const { curve } = this.item.maps[state.target][state.method];
    this.plot.toggleAttribute('hidden', !curve);
    this.plot.style.display = curve ? '' : 'none';
    if (curve) this.draw(curve, state);
    else if (state.cover !== null) this.item.live?.curve(state.target, state.method);
    this.words.textContent = this.told(curve, state);
  }

  told(curve, state) {
    const method = this.item.methods[state.method].title;
    const { label, probability } = this.item.targets[state.target];
    if (!curve) {
      return `Covers what ${method} takes for evidence, the most first. ${this.item.live ? 'The model runs on such photos as soon as you play or move it.'
        : 'The predictions for such photos are not part of this page.'}`;
    }
    const what = curve.reading === 'probability' ? 'probability' : 'score';
    const now = state.cover === null ? null : valueAt(curve, state.way, state.cover / 100);
    const done = state.way === 'deletion' ? 'covered' : 'shown';
    const told = now === null
      ? `If ${method} is right, the ${what} of ${label} falls fast while its brightest places are covered, and rises fast while they are shown.`
      : `With ${state.cover} % ${done}: ${what} ${what === 'score' ? figure(now) : percent(now)}.`;
    const own = probability !== null && what === 'probability' && Math.abs(curve.deletion[0] - probability) > 0.005
      ? ' The curves use the uncalibrated softmax, the list of predictions the calibrated one.' : '';
    return `${told} Areas: deletion ${figure(curve.areas.deletion)} (less is better), insertion ${figure(curve.areas.insertion)} (more is better).${own}`;
  }

  draw(curve, state) {
    const all = [...curve.deletion, ...curve.insertion];
    const probability = curve.reading === 'probability';
    const least = probability ? 0 : Math.min(0, ...all);
    const most = probability ? Math.min(1, rounded(Math.max(...all))) : Math.max(...all, least + 1e-9);
    const x = (share) => PLOT.left + share * (PLOT.width - PLOT.left - PLOT.right);
    const y = (value) => PLOT.top + (1 - (value - least) / (most - least)) * (PLOT.height - PLOT.top - PLOT.bottom);
    const path = (values) => values.map((value, i) => `${i ? 'L' : 'M'}${x(curve.at[i]).toFixed(1)} ${y(value).toFixed(1)}`).join('');
    const text = (words, attributes) => svg('text', attributes, words);
    const grid = [0, 0.5, 1].map((share) => {
      const value = least + share * (most - least);
      return [svg('line', { x1: PLOT.left, x2: PLOT.width - PLOT.right, y1: y(value), y2: y(value), class: 'grid' }),
        text(probability ? `${Number((100 * value).toPrecision(2))}\u00a0%` : figure(value), { x: PLOT.left - 6, y: y(value) + 3.5, class: 'end' })];
    });
    const ends = [0, 50, 100].map((share) => text(`${share} %`, { x: x(share / 100), y: PLOT.height - 6, class: share ? (share === 100 ? 'end' : 'middle') : '' }));
    const lines = ['deletion', 'insertion'].map((name) => svg('path', { d: path(curve[name]), class: `curve ${name}${name === state.way ? ' active' : ''}` }));
    const taken = [];
    const names = ['deletion', 'insertion'].map((name) => this.name(curve, name, x, y, taken));
    const share = (state.cover ?? 0) / 100;
    const dot = state.cover === null ? null : [
      svg('line', { x1: x(share), x2: x(share), y1: PLOT.top, y2: PLOT.height - PLOT.bottom, class: 'now' }),
      svg('circle', { cx: x(share), cy: y(valueAt(curve, state.way, share)), r: 4.5, class: 'dot' })];
    this.plot.replaceChildren(...[grid, ends, lines, names, dot].flat(2).filter(Boolean));
    this.plot.setAttribute('aria-label', `Curves of ${this.item.methods[state.method].title}: ${['deletion', 'insertion'].map((name) =>
      `${name} from ${percent(curve[name][0])} to ${percent(curve[name].at(-1))}, area ${figure(curve.areas[name])}`).join('; ')}`);
  }

  // The name of a curve, above or below it, where it covers neither a curve nor the other name; nearest to its own.
  name(curve, name, x, y, taken) {
    const [wide, high] = [26, 12];
    const [start, end] = [x(0) + wide, x(1) - wide];
    const over = (each, at) => Array.from({ length: 14 }, (_, i) => {
      const place = clamp(at - wide + 4 * i, x(0), x(1));
      return y(valueAt(curve, each, (place - x(0)) / (x(1) - x(0))));
    });
    let best = null;
    for (let at = start; at <= end; at += 6) {
      const own = over(name, at);
      const other = over(name === 'deletion' ? 'insertion' : 'deletion', at);
      for (const base of [Math.min(...own) - 5, Math.max(...own) + high]) {
        const [top, bottom] = [base - high + 2, base + 3];
        if (top < 0 || bottom > PLOT.height - PLOT.bottom || other.some((value) => value > top - 3 && value < bottom + 3)) continue;
        if (taken.some((each) => Math.abs(each.at - at) < 2 * wide && Math.abs(each.base - base) < high + 3)) continue;
        const middle = (top + bottom) / 2;
        const near = Math.abs(own[6] - middle) - 0.5 * Math.min(30, Math.abs(other[6] - middle));
        if (!best || near < best.near) best = { at, base, near };
      }
    }
    best ??= { at: name === 'deletion' ? start : end, base: -2 };
    taken.push(best);
    return svg('text', { x: best.at, y: best.base, class: `name middle ${name}` }, name === 'deletion' ? 'covered' : 'shown');
  }

  press(event) {
    event.preventDefault();
    this.halt();
    const take = (moved) => {
      const bounds = this.plot.getBoundingClientRect();
      const place = ((moved.clientX - bounds.left) / bounds.width) * PLOT.width;
      const share = clamp((place - PLOT.left) / (PLOT.width - PLOT.left - PLOT.right), 0, 1);
      this.change({ cover: Math.round(200 * share) / 2 });
    };
    this.plot.setPointerCapture(event.pointerId);
    this.plot.addEventListener('pointermove', take);
    this.plot.addEventListener('lostpointercapture', () => this.plot.removeEventListener('pointermove', take), { once: true });
    take(event);
  }

  toggle() {
    if (this.playing) {
      this.halt();
      return;
    }
    const begin = this.state.cover === null || this.state.cover >= 100 ? 0 : this.state.cover;
    const started = performance.now();
    this.play.textContent = '❚❚ Pause';
    const step = (now) => {
      const share = Math.min(100, begin + (now - started) / 60);
      this.change({ cover: Math.round(2 * share) / 2 });
      if (share >= 100) this.halt();
      else this.playing = requestAnimationFrame(step);
    };
    this.playing = requestAnimationFrame(step);
  }

  halt() {
    if (this.playing) cancelAnimationFrame(this.playing);
    this.playing = null;
    this.play.textContent = '▶ Play';
  }
}

// The next larger 1, 2 or 5 with zeros: where an axis ends.
function rounded(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-6)));
  return power * [1, 2, 5, 10].find((step) => step * power >= value * 0.999);
}

function valueAt(curve, way, share) {
  const { at } = curve;
  const values = curve[way];
  let i = 1;
  while (i < at.length - 1 && at[i] < share) i++;
  const part = (share - at[i - 1]) / (at[i] - at[i - 1]);
  return values[i - 1] + (values[i] - values[i - 1]) * clamp(part, 0, 1);
}
