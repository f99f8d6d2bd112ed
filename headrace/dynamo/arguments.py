"""The command line of a worker: Dynamo's options together with those of the server."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from dynamo.common.backend import WorkerConfig
from dynamo.common.configuration.groups.runtime_args import (
    DynamoRuntimeArgGroup,
    DynamoRuntimeConfig,
)
from dynamo.common.utils.runtime import parse_endpoint

from runtime.config.options import ServerConfig
from runtime.launch.command_line import parse_args
from runtime.launch.prepare import find_model

logger = logging.getLogger(__name__)

_PROG = "python -m headrace.dynamo"
_COMPONENT = "backend"
_ENDPOINT = "generate"


def read_arguments(arguments: Sequence[str] | None) -> tuple[ServerConfig, WorkerConfig, Path]:
    """Read the command line.

    Args:
        arguments: the words after the command's name; `None` for those of this process.

    Returns:
        The options of the engine; those of the worker; and the folder of the model, from which the
        frontend reads the tokenizer.

    Raises:
        StartupError: there is no such model.
        SystemExit: an option is unknown or has a wrong value.
    """
    parser = argparse.ArgumentParser(
        _PROG,
        allow_abbrev=False,
        description="Serves a model as a worker of Dynamo.",
        epilog="All further options are those of `headrace serve`, such as --model-path.",
    )
    DynamoRuntimeArgGroup().add_arguments(parser)
    own, rest = parser.parse_known_args(arguments)
    parsed = parse_args(rest, prog=_PROG)
    for notice in parsed.notices:
        logger.warning(notice)
    config = parsed.config
    if config.parallel.dp_size > 1:
        parser.error("--dp-size: start a worker for each copy of the model; Dynamo routes.")
    config, folder = find_model(config, only_config=True)
    runtime = DynamoRuntimeConfig.from_cli_args(own)
    runtime.validate()
    endpoint = runtime.endpoint or f"{runtime.namespace}.{_COMPONENT}.{_ENDPOINT}"
    runtime.namespace, runtime.component, runtime.endpoint = parse_endpoint(endpoint)
    name = config.model.served_model_name or config.model.model_path
    return config, WorkerConfig.from_runtime_config(runtime, str(folder), name), folder


def with_kv_events(config: ServerConfig, socket: Path) -> ServerConfig:
    """Return options that also publish events of the prefix cache on the unix socket `socket`.

    Only this process may have access to the socket, because the events show the tokens of all
    prompts.
    """
    events = json.dumps({"endpoint": f"ipc://{socket}"})
    scheduling = dataclasses.replace(config.scheduling, kv_events_config=events)
    return dataclasses.replace(config, scheduling=scheduling)
