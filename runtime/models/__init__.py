"""One file an architecture, class names as in `transformers`."""
