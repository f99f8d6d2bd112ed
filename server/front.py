"""The front process: makes all quick checks, then serves HTTP."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import metadata

import uvloop

from runtime.config.options import ServerConfig
from runtime.errors import StartupError
from runtime.ipc.logging import announce, configure_logging
from runtime.ipc.spawn import end_ahead
from runtime.launch.assemble import run_node
from runtime.launch.command_line import PROG, parse_args
from runtime.launch.prepare import prepare_engine
from server.listener import prepare
from server.serving import serve
from server.startup_faults import as_one_line

logger = logging.getLogger(__name__)

# Seconds, a fifth of Python's default. The event loop needs the GIL several times for each answer.
_SWITCH_INTERVAL_S = 0.001


def run(argv: Sequence[str], prog: str | None = None) -> int:
    """Run the server until it is stopped.

    Args:
        argv: the options.
        prog: the command's name in messages about options; by default `PROG`.

    Returns:
        The exit status: 0 after an orderly stop, 1 if it cannot start or failed.
    """
    parsed = parse_args(argv, prog=prog or PROG)
    config = parsed.config
    node_rank = config.parallel.node_rank
    name = f"node {node_rank}" if node_rank else "front"
    configure_logging(config.logging.log_level, name, config.logging.log_format)
    _quiet_libraries(config)
    for notice in parsed.notices:
        logger.warning(notice)
    _warn_about_kernels_package()
    # A thread that runs Python code must give up the GIL after this time if the loop waits for it.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        if node_rank:
            end_ahead()
            with as_one_line("Preparing the node"):
                engine = prepare_engine(config)
            return run_node(engine)
        with as_one_line("Preparing the start"):
            prepared = prepare(config)
        return uvloop.run(serve(prepared))
    except StartupError as error:
        # A library's message may have several lines; they are joined to one.
        announce(f"headrace: {' '.join(error.message.splitlines())}")
        return 1


def _quiet_libraries(config: ServerConfig) -> None:
    # uvicorn warns of every malformed request, which is counted and answered already.
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
