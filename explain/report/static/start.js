// The page comes to life: what the address says is shown, and the address says what is shown.

const settings = { keys: true, theme: 'auto' };
const NUMBERS = new Set(['method', 'target', 'layer', 'opacity', 'share', 'wipe', 'cover', 'not', 'photo']);
const SHEET = { find: '', label: '', right: '', passed: '', sort: 'number', least: '', most: '', down: false };

function fromAddress() {
  const found = {};
  for (const [name, text] of new URLSearchParams(location.hash.slice(1))) {
    if (NUMBERS.has(name)) {
      if (/^\d+(\.\d+)?$/.test(text)) found[name] = Number(text);
    } else if (name === 'region') {
      const edges = text.split(',').map(Number);
      if (edges.length === 4 && edges.every((edge) => edge >= 0 && edge <= 1)) found.region = edges;
    } else if (name === 'down') found.down = text === '1';
    else if (name in USUAL || name in SHEET) found[name] = text;
  }
  for (const [name, least, most] of [['opacity', 0, 100], ['share', 5, 100], ['wipe', 0, 100], ['cover', 0, 100]]) {
    if (found[name] !== undefined) found[name] = clamp(found[name], least, most);
  }
  if (found.way !== 'insertion') delete found.way;
  return found;
}

// The address follows at most three times a second: browsers complain of more.
let addressWaits = null;

function toAddress(...what) {
  const free = addressWaits === null;
  addressWaits = what;
  if (!free) return;
  writeAddress(...what);
  addressWaits = [];
  setTimeout(() => {
    const last = addressWaits;
    addressWaits = null;
    if (last.length) toAddress(...last);
  }, 300);
}

function writeAddress(state, usual, more = {}) {
  const words = new URLSearchParams();
  const all = { ...more };
  for (const [name, value] of Object.entries(state)) if (name in usual && value !== usual[name]) all[name] = value;
  for (const [name, value] of Object.entries(all)) {
    if (value === null || value === undefined || value === false) continue;
    words.set(name, Array.isArray(value) ? value.map((edge) => edge.toFixed(3)).join(',') : value === true ? '1' : String(value));
  }
  const text = words.toString();
  if (location.hash.slice(1) === text) return;
  try {
    history.replaceState(history.state, '', `#${text}`);
  } catch {
    // A frame in a notebook has no address of its own.
  }
}

class Page {
  constructor(root, source) {
    this.root = root;
    this.source = source;
    this.colors = new Colors(source.index.drawing, source.index.cover);
    this.widget = source.index.widget;
    this.many = source.index.photos.length > 1;
    this.body = el('main', { tabindex: -1 });
    root.replaceChildren(...[this.widget ? null : this.header(), this.body, this.widget ? null : this.footer(), this.help()].filter(Boolean));
    this.begin();
    document.addEventListener('keydown', (event) => {
      if (event.key === '?' && settings.keys && !event.target.matches('input[type=search], input[type=number]')) this.dialog.showModal();
      else if (!this.dialog.open) this.viewerOf(event)?.key(event);
    });
  }

  // Whose the keys are.
  viewerOf() {
    return this.viewer;
  }

  begin() {
    this.sheetState = { ...SHEET, ...pick(fromAddress(), SHEET) };
    const { photo } = fromAddress();
    const last = this.source.index.photos.length - 1;
    if (this.many && (photo === undefined || photo > last)) this.showSheet();
    else this.showPhoto(clamp(photo ?? 0, 0, last), pick(fromAddress(), USUAL));
    window.addEventListener('hashchange', () => location.reload());
  }

  header() {
    this.back = el('button', { type: 'button', class: 'plain-button', hidden: true, onclick: () => this.showSheet() }, '← All photos');
    this.step = [-1, 1].map((by) => el('button', { type: 'button', class: 'plain-button', hidden: true, onclick: () => this.stepBy(by) }, by < 0 ? '← Previous' : 'Next →'));
    this.theme = el('button', { type: 'button', class: 'plain-button', onclick: () => this.nextTheme() }, 'Theme: auto');
    return el('header', { class: 'top' }, el('p', { class: 'brand' }, 'explain'), el('nav', { 'aria-label': 'Photos', hidden: !this.many }, this.back, this.step),
      el('div', { class: 'buttons' }, this.theme, el('button', { type: 'button', class: 'plain-button', onclick: () => this.dialog.showModal() }, 'Shortcuts')));
  }

  footer() {
    return el('footer', {}, el('p', {}, `Made with explain ${this.source.index.version}. This file is complete: it loads nothing from the network.`));
  }

  help() {
    const keys = [['M', 'next method'], ['T', 'next class'], ['L', 'next layer'], ['V', 'next view'], ['W', 'compare map and photo'],
      ['C', 'cover the evidence'], ['Shift', 'with a letter: the one before'], ['Arrows', 'on the photo: read values; with Shift: draw a region'], ['Esc', 'ends a region']];
    const box = el('input', { type: 'checkbox', id: 'keys', checked: true, onchange: () => { settings.keys = box.checked; } });
    this.dialog = el('dialog', { 'aria-label': 'Shortcuts' }, el('h2', {}, 'Shortcuts'),
      el('dl', {}, keys.map(([key, does]) => [el('dt', {}, el('kbd', {}, key)), el('dd', {}, does)])),
      el('p', {}, box, ' ', el('label', { for: 'keys' }, 'Letters are shortcuts')),
      el('form', { method: 'dialog' }, el('button', { class: 'plain-button' }, 'Close')));
    return this.dialog;
  }

  nextTheme() {
    settings.theme = { auto: 'light', light: 'dark', dark: 'auto' }[settings.theme];
    document.documentElement.dataset.theme = settings.theme;
    this.theme.textContent = `Theme: ${settings.theme}`;
  }

  async showPhoto(number, state = {}) {
    this.number = number;
    const item = await this.source.item(number);
    const viewer = new Viewer(item, this.colors, {
      state, widget: this.widget, photo: this.source.index.photos[number],
      keep: (kept) => { if (this.number === number) toAddress(kept, USUAL, this.many ? { photo: number, ...different(this.sheetState) } : {}); },
    });
    await viewer.ready; // what is shown is whole, and does not move
    if (this.number !== number) return; // something else was asked for meanwhile
    this.viewer = viewer;
    this.body.replaceChildren(viewer.element);
    document.title = `${this.source.index.photos[number].label} – ${item.name}`;
    this.navigation(true);
    document.documentElement.dataset.ready = String(Math.round(performance.now()));
    if (this.many) window.scrollTo(0, 0);
  }

  showSheet() {
    this.viewer = null;
    this.number = null;
    this.sheet ??= new Sheet(this.source, this.colors, {
      state: this.sheetState,
      keep: (kept) => toAddress(kept, SHEET),
      open: (number) => this.showPhoto(number),
    });
    this.body.replaceChildren(this.sheet.element);
    this.sheet.draw();
    document.title = this.source.index.title ?? 'Photos';
    this.navigation(false);
    document.documentElement.dataset.ready = String(Math.round(performance.now()));
  }

  navigation(open) {
    if (!this.back) return;
    this.back.hidden = !open || !this.many;
    this.step.forEach((button) => { button.hidden = !open || !this.many; });
  }

  // The next of the photos that the filters have kept.
  stepBy(by) {
    const numbers = (this.sheet ? this.sheet.chosen() : this.source.index.photos.map((_, number) => ({ number }))).map((photo) => photo.number);
    const place = numbers.indexOf(this.number);
    const { method, target, view } = this.viewer.state;
    this.showPhoto(numbers[(place + by + numbers.length) % numbers.length], { method, target, view });
  }
}

const pick = (values, names) => Object.fromEntries(Object.entries(values).filter(([name]) => name in names));
const different = (state) => Object.fromEntries(Object.entries(state).filter(([name, value]) => value !== SHEET[name]));
