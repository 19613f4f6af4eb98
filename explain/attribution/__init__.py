"""`attribute`: a model and tensors in, `Attribution` values out; options, results, records,
concepts."""
