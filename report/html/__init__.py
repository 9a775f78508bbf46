"""One HTML page with everything of a results folder; it opens from disk, without a network."""
