"""`Explainer` and `Explanation`: a photo and a model in; pictures, files and records out."""
