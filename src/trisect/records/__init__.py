"""Records that every folder shares: the shapes of a model, its parts and solutions, and plans."""
