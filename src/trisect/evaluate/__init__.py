"""What a model is worth after the cut: one file per kind of measurement."""
