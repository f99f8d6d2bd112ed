"""What can be known before any process starts: options, port, model folder, weight headers.

All of it without torch, so that a mistake costs a second and one line.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from runtime.checkpoint.check import check_model_folder
from runtime.checkpoint.hub import DEMO_MODEL, DEMO_NAME, resolve_model_folder
from runtime.checkpoint.model_spec import ModelSpec
from runtime.config.options import ServerConfig
from runtime.errors import StartupError
from runtime.ipc.transport import create_run_folder, remove_run_folder
from runtime.models.registry import read_model_spec
from runtime.text.tokenizer import Tokenizer
from server.hardware import detect_hardware
from server.resolve import Folders, Resolved, check_options, resolve
from server.tls import Certificate

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedEngine:
    """Everything that is known before the first child starts; no port in it."""

    resolved: Resolved
    model: ModelSpec
    tokenizer: Tokenizer
    folders: Folders


@dataclass(frozen=True)
class Prepared:
    """A prepared engine, the port that it will be served on, and the certificate for HTTPS."""

    engine: PreparedEngine
    listener: socket.socket
    certificate: Certificate | None

    @property
    def port(self) -> int:
        """The port that is bound; differs from the option when that was 0."""
        return int(self.listener.getsockname()[1])


def prepare(config: ServerConfig) -> Prepared:
    """Check options, certificate, port, model folder and weight headers, in this order.

    Raises:
        StartupError: the first thing wrong, in one line.
    """
    check_options(config)
    certificate = Certificate.wanted(config.http)
    listener = bind(config.http.host, config.http.port)
    try:
        return Prepared(prepare_engine(config), listener, certificate)
    except BaseException:
        listener.close()
        raise


def prepare_engine(config: ServerConfig) -> PreparedEngine:
    """Check options, model folder and weight headers, and settle what was left to us.

    Raises:
        StartupError: the first thing wrong, in one line.
    """
    check_options(config)
    config, model_folder = find_model(config)
    model = read_model_spec(model_folder)
    if config.model.load_format != "dummy":
        check_model_folder(model_folder, model)
    tokenizer_path = config.model.tokenizer_path
    tokenizer_folder = (
        resolve_model_folder(tokenizer_path, None)
        if tokenizer_path and tokenizer_path != config.model.model_path
        else model_folder
    )
    tokenizer = (
        Tokenizer.without_vocabulary()
        if config.model.skip_tokenizer_init
        else Tokenizer.from_folder(tokenizer_folder)
    )
    folders = Folders(create_run_folder(), model_folder, tokenizer_folder)
    try:
        resolved = resolve(config, model, detect_hardware(), folders, secrets.randbits(31))
    except BaseException:
        remove_run_folder(folders.run)
        raise
    for choice in resolved.choices:
        logger.info(choice)
    return PreparedEngine(resolved, model, tokenizer, folders)


def find_model(config: ServerConfig, *, only_config: bool = False) -> tuple[ServerConfig, Path]:
    """The local folder of the model that was asked for, or of the demo model.

    Args:
        config: as asked for.
        only_config: whether `config.json` will do; see `resolve_model_folder`.

    Returns:
        `config`, with the demo model's names where none was asked for, and the folder.

    Raises:
        StartupError: no such model.
    """
    path = config.model.model_path
    if path is not None:
        folder = resolve_model_folder(path, config.model.revision, only_config=only_config)
        return config, folder
    if not (DEMO_MODEL / "config.json").is_file():
        raise StartupError("The demo model is not installed; name a model with --model-path.")
    logger.warning(
        "No --model-path: serving the demo model, a toy of a few million parameters that knows "
        "little more than capitals and small sums."
    )
    model = dataclasses.replace(
        config.model,
        model_path=str(DEMO_MODEL),
        served_model_name=config.model.served_model_name or DEMO_NAME,
    )
    return dataclasses.replace(config, model=model), DEMO_MODEL


def bind(host: str, port: int) -> socket.socket:
    """Take the port without listening yet, so that nobody waits on a server that may not come.

    Raises:
        StartupError: the address is taken, not allowed or not ours.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise StartupError(f"--host {host}: {error.strerror}.") from None
    listener = socket.socket(family, kind)
    # A port left by a server that just ended may be taken at once; one in use may not.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise StartupError(describe_bind_error(error, host, port)) from None
    return listener


def describe_bind_error(error: OSError, host: str, port: int) -> str:
    """Why the address cannot be had, and what to do."""
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} is in use; stop what listens there or choose another with --port."
    if error.errno == errno.EACCES:
        return f"No permission to listen on port {port}; choose one above 1023 with --port."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is no address of this machine."
    return f"Cannot listen on {host}:{port}: {error.strerror}."
