// The app's source: the same questions as a report's, answered by a live model.

const MARKED = { 'x-explain': '1' };

class LiveSource {
  constructor(root) {
    this.index = JSON.parse(root.getElementById('index').textContent);
    this.items = [];
  }

  async item(number) {
    return this.items[number];
  }

  // One question with one answer; what went wrong comes as an error with one line.
  async ask(path, values) {
    const reply = await replied(fetch(`/api/${path}`, { method: 'POST', headers: { ...MARKED, 'content-type': 'application/json' }, body: JSON.stringify(values) }));
    return reply.json();
  }

  async send(file) {
    if (file.size > this.index.limits.upload) {
      throw new Error(`A photo may have ${Math.round(this.index.limits.upload / 2 ** 20)} MiB, and this one has ${Math.round(file.size / 2 ** 20)}.`);
    }
    const name = encodeURIComponent(file.name || 'pasted.png');
    const reply = await replied(fetch('/api/photos', { method: 'POST', headers: { ...MARKED, 'x-name': name }, body: file }));
    return reply.json();
  }

  // A question that is answered step by step; `signal` ends it.
  async steps(path, values, step, signal) {
    const reply = await replied(fetch(`/api/${path}`, { method: 'POST', headers: { ...MARKED, 'content-type': 'application/json' }, body: JSON.stringify(values), signal }));
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = '';
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split('\n');
      rest = lines.pop();
      for (const line of lines) await step(JSON.parse(line));
    }
  }

  // A file that the app makes, saved by the browser.
  async save(path, values) {
    const reply = await replied(fetch(`/api/${path}`, { method: 'POST', headers: { ...MARKED, 'content-type': 'application/json' }, body: JSON.stringify(values) }));
    const named = /filename\*=UTF-8''([^;]+)/.exec(reply.headers.get('content-disposition') ?? '');
    const link = el('a', { href: URL.createObjectURL(await reply.blob()), download: named ? decodeURIComponent(named[1]) : 'explained' });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }
}

async function replied(promise) {
  let reply;
  try {
    reply = await promise;
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Error('The app does not answer; is explain serve still running?');
  }
  if (!reply.ok) throw new Error(await reply.text());
  return reply;
}
