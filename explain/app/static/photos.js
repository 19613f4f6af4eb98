// Where photos come from: dropped, pasted, chosen, taken, or one of the examples.

class PhotoInput {
  // `take` gets a file, `example` the name of an example, `refuse` says what is wrong with what is no photo.
  constructor(examples, { take, example, refuse }) {
    this.take = take;
    this.refuse = refuse;
    this.file = el('input', { type: 'file', accept: 'image/*,.npy,.dcm,.nii,.gz', class: 'hidden', tabindex: -1, 'aria-hidden': 'true', onchange: () => { this.taken(this.file.files); this.file.value = ''; } });
    const choose = el('button', { type: 'button', class: 'main-button', onclick: () => this.file.click() }, 'Choose a photo');
    const camera = navigator.mediaDevices?.getUserMedia ? el('button', { type: 'button', class: 'plain-button', onclick: () => this.camera() }, 'Camera') : null;
    const pictures = examples.map((name) => el('button', { type: 'button', class: 'example', title: name, onclick: () => example(name) },
      el('img', { src: `/example/${encodeURIComponent(name)}`, alt: name, loading: 'lazy' })));
    this.examples = examples.length ? el('div', { class: 'examples', role: 'group', 'aria-label': 'Examples' }, pictures) : null;
    this.element = el('section', { class: 'drop', 'aria-label': 'Photo' },
      el('div', { class: 'drop-words' }, el('h1', {}, 'What does the model see in your photo?'),
        el('p', { class: 'sub' }, 'Drop a photo anywhere on this page, or paste one. It stays on the machine that runs explain, in memory, and is forgotten.')),
      el('div', { class: 'buttons' }, choose, camera, this.file), this.examples);
    document.addEventListener('dragover', (event) => { event.preventDefault(); document.body.classList.add('dropping'); });
    document.addEventListener('dragleave', (event) => { if (!event.relatedTarget) document.body.classList.remove('dropping'); });
    document.addEventListener('drop', (event) => {
      event.preventDefault();
      document.body.classList.remove('dropping');
      this.taken(event.dataTransfer.files);
    });
    document.addEventListener('paste', (event) => this.taken(event.clipboardData.files));
  }

  taken(files) {
    const all = [...(files ?? [])];
    const file = all.find(({ type }) => !type || type.startsWith('image/') || type === 'application/dicom');
    if (file) this.take(file);
    else if (all.length) this.refuse(`${all[0].name} is no photo but ${all[0].type}; choose a JPEG, PNG or another picture.`);
  }

  // Once there is a photo, the examples come after all controls.
  small(has, body) {
    this.element.classList.toggle('small', has);
    if (this.examples) (has ? body : this.element).append(this.examples);
  }

  async camera() {
    const video = el('video', { autoplay: true, playsinline: true, muted: true });
    const words = el('p', { class: 'hint', role: 'status' }, 'Waiting for the camera …');
    const shoot = el('button', { type: 'button', class: 'main-button', disabled: true }, 'Take the photo');
    const dialog = el('dialog', { class: 'camera', 'aria-label': 'Camera' }, video, words, el('form', { method: 'dialog', class: 'buttons' }, shoot, el('button', { class: 'plain-button' }, 'Close')));
    document.body.append(dialog);
    let stream = null;
    dialog.addEventListener('close', () => { stream?.getTracks().forEach((track) => track.stop()); dialog.remove(); });
    dialog.showModal();
    try {
      stream = await navigator.mediaDevices.getUserMedia({ video: { width: { ideal: 1280 } } });
    } catch {
      words.textContent = 'No camera is available.';
      return;
    }
    if (!dialog.open) { stream.getTracks().forEach((track) => track.stop()); return; }
    video.srcObject = stream;
    words.textContent = '';
    shoot.disabled = false;
    shoot.addEventListener('click', () => {
      const canvas = el('canvas', {});
      canvas.width = video.videoWidth;
      canvas.height = video.videoHeight;
      canvas.getContext('2d').drawImage(video, 0, 0);
      canvas.toBlob((blob) => this.take(new File([blob], 'camera.jpg', { type: 'image/jpeg' })), 'image/jpeg', 0.92);
      dialog.close();
    });
  }
}
