// Questions about the photo in words: the answer's words show their maps, and their smallest evidence.

class Asking {
  // `on` has what happens: photo(), say(text), progress(done, total) or progress(null), fail(text).
  constructor(source, on) {
    this.source = source;
    this.on = on;
    this.input = el('input', { type: 'text', maxlength: 1000, placeholder: 'What is in the photo?' });
    const form = el('form', { class: 'question', onsubmit: (event) => { event.preventDefault(); this.ask(); } },
      el('label', {}, el('span', {}, `Ask ${source.index.asker}`), this.input), el('button', { class: 'main-button' }, 'Ask'));
    this.words = el('div', { class: 'in-words', role: 'region', 'aria-label': 'The answer', hidden: true });
    this.words.dataset.ready = '';
    this.element = el('section', { class: 'asking card', 'aria-label': 'Question', hidden: true }, form, this.words);
  }

  // There is another photo, or none.
  reset(hasPhoto) {
    this.end?.abort();
    this.element.hidden = !hasPhoto || !this.source.index.asker;
    this.words.hidden = true;
    this.words.replaceChildren();
  }

  ask() {
    return this.steps('ask', { photo: this.on.photo(), ask: this.input.value }, 'The answer', (step) => this.show(step));
  }

  // One question at a time: another one ends it.
  async steps(path, values, words, found) {
    this.end?.abort();
    const end = new AbortController();
    this.end = end;
    this.name = null;
    this.on.say(`${words} …`);
    try {
      await this.source.steps(path, values, (step) => (end.signal.aborted ? null : this.heard(step, words, found)), end.signal);
    } catch (error) {
      if (error.name !== 'AbortError') this.on.fail(error.message);
    } finally {
      if (this.end === end) this.on.progress(null);
    }
  }

  heard(step, words, found) {
    if (step.work) this.name = step.work;
    if (step.before) this.on.say(`${words}: ${step.before} before it`);
    if (step.progress) {
      this.on.say(`${words}: ${step.progress[0]} of ${step.progress[1]} altered inputs`);
      this.on.progress(...step.progress);
    }
    if (step.error) this.on.fail(step.error);
    else if (step.stopped) this.on.say(`${words} was stopped.`);
    else if (step.end) found(step);
  }

  show({ words, said, answered, notes }) {
    const part = new DOMParser().parseFromString(words, 'text/html');
    this.words.replaceChildren(...part.body.childNodes);
    this.words.hidden = false;
    for (const figure of this.words.querySelectorAll('figure.map[id]')) {
      const button = el('button', { type: 'button', class: 'plain-button', onclick: () => this.evidence(figure, answered) }, 'Smallest evidence');
      figure.querySelector('figcaption').append(el('div', { class: 'buttons' }, button), el('p', { class: 'hint', role: 'status' }));
    }
    showWords(this.words);
    this.on.say([`“${said}”`, ...notes].join('. '));
  }

  // The part of the photo that is enough for a word takes the place of its map.
  evidence(figure, answered) {
    const word = Number(figure.id.replace('word-', ''));
    return this.steps('evidence', { answered, word }, 'The smallest evidence', ({ evidence, text }) => {
      const picture = figure.querySelector('img');
      picture.src = evidence;
      picture.alt = `the photo with ${text}`;
      figure.querySelector('[role=status]').textContent = text;
      this.on.say('The smallest evidence: done');
    });
  }

  stop() {
    if (this.name) this.source.ask('stop', { work: this.name }).catch(() => {});
  }
}
