"""Turns an unexpected error during the start into a message of one line."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from runtime.errors import StartupError

logger = logging.getLogger(__name__)
_MAX_CHARS = 300


@contextlib.contextmanager
def as_one_line(what: str) -> Iterator[None]:
    """Turn an unexpected exception of the block into a `StartupError`: `what` failed, and why.

    A model's files may have any content, so such errors happen, and a traceback would not help the
    operator.
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
