// The photo, large: two panes with a handle to wipe between them, what is marked on it, and what is read off it.

class Stage {
  // `on` has what happens here: point(u, v) or point(null), region([u0, v0, u1, v1]) or region(null), wipe(share),
  // pick(number) of a detected box.
  constructor(item, colors, on) {
    this.item = item;
    this.on = on;
    this.front = new Pane(item, colors);
    this.back = new Pane(item, colors);
    this.marks = svg('svg', { class: 'marks', viewBox: `0 0 ${item.size[0]} ${item.size[1]}`, 'aria-hidden': 'true' });
    this.handle = el('div', {
      class: 'wipe', role: 'slider', tabindex: 0, hidden: true, 'aria-label': 'Compare the two pictures',
      'aria-valuemin': 0, 'aria-valuemax': 100, onkeydown: (event) => this.wipeKey(event),
      onpointerdown: (event) => this.startWipe(event),
    }, el('span', {}, '⟷'));
    this.tags = [el('span', { class: 'tag left' }), el('span', { class: 'tag right' })];
    this.element = el('div', {
      class: 'stage', tabindex: 0, role: 'application', 'aria-roledescription': 'photo with a map',
      onpointerdown: (event) => this.press(event), onpointermove: (event) => this.move(event),
      onpointerup: () => this.release(true), onpointercancel: () => this.release(),
      onpointerleave: () => { if (!this.drag) on.point(null); },
      onkeydown: (event) => this.key(event),
    }, this.back.element, this.front.element, this.marks, ...this.tags, this.handle);
    const [width, height] = item.size;
    this.element.style.aspectRatio = `${width} / ${height}`;
    this.element.style.setProperty('--shape', String(width / height));
    this.cursor = [0.5, 0.5];
    this.marked = undefined;
    this.drag = null;
    this.drawing = false;
    this.moving = svg('g', {});
    this.drawMarks(null);
  }

  // --- what is marked ---

  drawMarks(place) {
    if (this.marked === place) return;
    this.marked = place;
    const [width, height] = this.item.size;
    const crops = this.item.crops.length ? this.item.crops : [this.item.box];
    const whole = `M0 0H${width}V${height}H0Z`;
    const holes = crops.map(([left, top, right, bottom]) => `M${left} ${top}V${bottom}H${right}V${top}Z`).join('');
    const covers = crops.some(([left, top, right, bottom]) => left <= 0.5 && top <= 0.5 && right >= width - 0.5 && bottom >= height - 0.5);
    const id = newId('hatch');
    const step = Math.max(width, height) / 70;
    const parts = [];
    if (!covers) {
      const pattern = svg('pattern', { id, width: step, height: step, patternUnits: 'userSpaceOnUse', patternTransform: 'rotate(45)' },
        svg('line', { x1: 0, y1: 0, x2: 0, y2: step, class: 'hatch', 'stroke-width': step / 5 }));
      parts.push(svg('defs', {}, pattern));
      if (crops.length === 1) {
        parts.push(svg('path', { d: whole + holes, 'fill-rule': 'evenodd', class: 'veil' }));
        parts.push(svg('path', { d: whole + holes, 'fill-rule': 'evenodd', fill: `url(#${id})` }));
      }
      parts.push(...crops.map(([left, top, right, bottom]) =>
        svg('rect', { x: left, y: top, width: right - left, height: bottom - top, class: 'frame' })));
    }
    parts.push(...(this.item.boxes ?? []).flatMap((box) => [this.rectangle(box, 'found'), this.rectangle(box, 'found inner')]));
    if (place && place.box) parts.push(this.rectangle(place.box, 'asked'), this.rectangle(place.box, 'asked inner'));
    if (place && place.outline) {
      const [left, top, right, bottom] = this.item.box;
      parts.push(svg('path', { d: place.outline, class: 'asked', transform: `translate(${left} ${top}) scale(${right - left} ${bottom - top})` }));
    }
    this.marks.replaceChildren(...parts, this.moving);
  }

  // What moves with the pointer or the keys.
  drawRegion(region) {
    const parts = region ? [this.rectangle(region, 'region'), this.rectangle(region, 'region inner')] : [];
    if (this.cross) parts.push(this.crosshair(this.cross));
    this.moving.replaceChildren(...parts);
  }

  rectangle([u0, v0, u1, v1], name) {
    const [left, top, right, bottom] = this.item.box;
    const [width, height] = [right - left, bottom - top];
    return svg('rect', { x: left + u0 * width, y: top + v0 * height, width: (u1 - u0) * width, height: (v1 - v0) * height, class: name });
  }

  crosshair([u, v]) {
    const [left, top, right, bottom] = this.item.box;
    const [x, y] = [left + u * (right - left), top + v * (bottom - top)];
    const arm = Math.max(...this.item.size) / 50;
    return svg('path', { d: `M${x - arm} ${y}H${x + arm}M${x} ${y - arm}V${y + arm}`, class: 'cross' });
  }

  // --- the handle ---

  compare(share, left, right) {
    const active = share !== null;
    this.handle.hidden = !active;
    this.tags.forEach((tag, i) => { tag.hidden = !active; tag.textContent = [left, right][i] || ''; });
    this.front.clip(active ? 'left' : '', share);
    this.back.element.hidden = !active;
    if (!active) return;
    this.handle.style.left = `${100 * share}%`;
    this.handle.setAttribute('aria-valuenow', Math.round(100 * share));
    this.handle.setAttribute('aria-valuetext', `${Math.round(100 * share)} % ${left}`);
  }

  startWipe(event) {
    event.preventDefault();
    event.stopPropagation();
    this.handle.focus();
    this.handle.setPointerCapture(event.pointerId);
    const move = (moved) => this.on.wipe(clamp(this.share(moved)[0], 0, 1));
    this.handle.addEventListener('pointermove', move);
    this.handle.addEventListener('lostpointercapture', () => this.handle.removeEventListener('pointermove', move), { once: true });
  }

  wipeKey(event) {
    const now = Number(this.handle.getAttribute('aria-valuenow'));
    const steps = { ArrowLeft: -2, ArrowRight: 2, ArrowDown: -2, ArrowUp: 2, PageDown: -10, PageUp: 10, Home: -100, End: 100 };
    if (!(event.key in steps)) return;
    event.preventDefault();
    event.stopPropagation();
    this.on.wipe(clamp((now + steps[event.key]) / 100, 0, 1));
  }

  // --- pointer and keys ---

  share(event) {
    const bounds = this.element.getBoundingClientRect();
    return [(event.clientX - bounds.left) / bounds.width, (event.clientY - bounds.top) / bounds.height];
  }

  // A place on the photo as shares of what the model saw.
  place(event) {
    const [x, y] = this.share(event);
    const [left, top, right, bottom] = this.item.box;
    const [width, height] = this.item.size;
    return [(x * width - left) / (right - left), (y * height - top) / (bottom - top)];
  }

  press(event) {
    if (event.button !== 0) return;
    const touch = event.pointerType === 'touch';
    this.pressed = this.place(event);
    this.on.point(...this.pressed);
    if (touch && !this.drawing) return;
    this.drag = this.place(event);
    this.element.setPointerCapture(event.pointerId);
  }

  move(event) {
    const now = this.place(event);
    this.on.point(...now);
    if (this.drag) this.take(this.drag, now);
  }

  take(one, other) {
    const inside = (value) => clamp(value, 0, 1);
    const [u0, u1] = [one[0], other[0]].map(inside).sort((a, b) => a - b);
    const [v0, v1] = [one[1], other[1]].map(inside).sort((a, b) => a - b);
    if (u1 - u0 > 0.01 && v1 - v0 > 0.01) {
      this.moved = true;
      this.on.region([u0, v0, u1, v1]);
    }
  }

  release(lifted = false) {
    const box = lifted && this.pressed && !this.moved ? this.boxAt(...this.pressed) : -1;
    if (box >= 0) this.on.pick(box);
    else if (this.drag && !this.moved) this.on.region(null);
    this.drag = null;
    this.pressed = null;
    this.moved = false;
  }

  // The number of the smallest detected box around a place, or -1.
  boxAt(u, v) {
    const area = ([u0, v0, u1, v1]) => (u1 - u0) * (v1 - v0);
    const around = (this.item.boxes ?? []).map((box, number) => [box, number]).filter(([[u0, v0, u1, v1]]) => u0 <= u && u <= u1 && v0 <= v && v <= v1);
    return around.sort(([one], [other]) => area(one) - area(other))[0]?.[1] ?? -1;
  }

  key(event) {
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key === 'Escape') {
      this.anchor = null;
      this.cross = null;
      this.on.region(null);
      this.on.point(null);
    }
    if (!(event.key in steps) || event.target !== this.element) return;
    event.preventDefault();
    if (event.shiftKey && !this.anchor) this.anchor = [...this.cursor];
    if (!event.shiftKey) this.anchor = null;
    this.cursor = this.cursor.map((value, i) => clamp(value + 0.025 * steps[event.key][i], 0, 1));
    this.cross = [...this.cursor];
    this.on.point(...this.cursor);
    if (this.anchor) this.take(this.anchor, this.cursor);
  }
}
