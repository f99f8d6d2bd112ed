"""Tools of the event loop: bodies as JSON, long work in slices, tasks in the background."""
