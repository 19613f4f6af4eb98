"""Photos and tensors: image files, model inputs, files that appear whole."""
