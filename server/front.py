"""The front process: checks everything cheap, then opens the port."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import metadata

import uvloop

from runtime.config.options import ServerConfig
from runtime.errors import StartupError
from runtime.ipc.logging import configure_logging
from runtime.launch.command_line import PROG, parse_args
from server.listener import prepare
from server.serving import serve
from server.startup_faults import as_one_line

logger = logging.getLogger(__name__)

# A fifth of Python's own: the loop asks for the GIL several times to answer one request.
_SWITCH_INTERVAL_S = 0.001


def run(argv: Sequence[str], prog: str | None = None) -> int:
    """Run the server until it is told to stop.

    Args:
        argv: the options.
        prog: what was called, for messages about them; else `PROG`.

    Returns:
        The process's status: 0 stopped in order, 1 cannot start or broke.
    """
    parsed = parse_args(argv, prog=prog or PROG)
    config = parsed.config
    configure_logging(config.logging.log_level, "front")
    _quiet_libraries(config)
    for notice in parsed.notices:
        logger.warning(notice)
    _warn_about_kernels_package()
    # Threads that compute in Python beside the event loop give it the GIL back this soon.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        with as_one_line("Preparing the start"):
            prepared = prepare(config)
        return uvloop.run(serve(prepared))
    except StartupError as error:
        # What a library says may have several lines.
        print(f"headrace: {' '.join(error.message.splitlines())}", file=sys.stderr, flush=True)
        return 1


def _quiet_libraries(config: ServerConfig) -> None:
    # uvicorn warns about every malformed request; those are counted and answered, not news.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    for name in ("asyncio", "httpx", "urllib3", "filelock"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if config.logging.log_level_http:
        logging.getLogger("server.access").setLevel(config.logging.log_level_http.upper())


def _warn_about_kernels_package() -> None:
    try:
        version = metadata.version("kernels")
    except metadata.PackageNotFoundError:
        return
    logger.warning(
        "The PyPI package `kernels` %s is installed; it has the name of a package of this server. "
        "If imports fail, run: pip uninstall kernels && pip install --force-reinstall headrace",
        version,
    )
