"""Turns any error before the server is ready into one line."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from runtime.errors import StartupError

logger = logging.getLogger(__name__)
_MAX_CHARS = 300


@contextlib.contextmanager
def as_one_line(what: str) -> Iterator[None]:
    """Turn an unexpected exception into a `StartupError` that says that `what` failed.

    Model files hold unforeseen content, and a traceback does not help an operator.
    """
    try:
        yield
    except StartupError:
        raise
    except Exception as error:
        logger.debug("The start failed", exc_info=True)
        said = " ".join(str(error).split())[:_MAX_CHARS]
        raise StartupError(
            f"{what} failed: {type(error).__name__}: {said or 'no reason given'} "
            "(--log-level debug shows where)."
        ) from error
