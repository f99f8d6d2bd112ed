"""ctypes binding of the C++ library."""


def unavailable() -> str | None:
    """Return why the C++ library cannot be used here, or None."""
    return "not built yet"
