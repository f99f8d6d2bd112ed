"""Checks options, model folder and weight headers before any process starts.

Nothing here imports torch, so that an error is reported in one line within a second.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from runtime.checkpoint.check import check_model_folder, warn_of_files
from runtime.checkpoint.demo import (
    DEMO_NAME,
    DEMO_NAMES,
    INSTRUCT_NAME,
    INSTRUCT_SAMPLING,
    find_demo,
)
from runtime.checkpoint.gguf.files import forget_headers
from runtime.checkpoint.hub import resolve_model_folder
from runtime.checkpoint.model_spec import ModelSpec
from runtime.config.options import ServerConfig
from runtime.errors import StartupError
from runtime.ipc.freed_memory import return_freed_memory
from runtime.ipc.transport import create_run_folder, remove_run_folder
from runtime.launch.adapters import GivenAdapters, read_adapters
from runtime.launch.hardware import detect_hardware
from runtime.launch.resolve import Folders, Resolved, check_options, resolve
from runtime.media.media_policy import MediaPolicy, read_policy
from runtime.models.quantization.registry import as_override
from runtime.models.registry import impl_override, read_model_spec
from runtime.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedEngine:
    """All that is known before the first child process starts.

    Attributes:
        resolved: the options and the processes' configurations, with all choices made.
        model: the model's numbers from its `config.json`.
        tokenizer: the tokenizer.
        folders: the folders of the model, the tokenizer and the sockets.
        media: limits on images in prompts.
        adapters: the LoRA adapters of the command line.
    """

    resolved: Resolved
    model: ModelSpec
    tokenizer: Tokenizer
    folders: Folders
    media: MediaPolicy
    adapters: GivenAdapters


def prepare_engine(config: ServerConfig) -> PreparedEngine:
    """Check the options, the model folder and the weight headers; make the automatic choices.

    Raises:
        StartupError: the first error; the message is one line.
    """
    check_options(config)
    media = read_policy(config.media)
    config, model_folder = find_model(config)
    overrides = _overrides(config.model.json_model_override_args)
    if overrides:
        logger.info("--json-model-override-args replaces %s of config.json", ", ".join(overrides))
    overrides |= as_override(config.model.quantization)
    overrides |= impl_override(config.model.model_impl)
    model = read_model_spec(model_folder, overrides, is_embedding=config.model.is_embedding)
    if config.model.load_format != "dummy":
        warn_of_files(model_folder, model, check_model_folder(model_folder, model))
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
    model = _with_turn_ends(model, tokenizer)
    adapters = read_adapters(config.lora, model)
    folders = Folders(create_run_folder(), model_folder, tokenizer_folder)
    try:
        seed = secrets.randbits(31)
        resolved = resolve(config, model, detect_hardware(), folders, seed, adapters)
    except BaseException:
        remove_run_folder(folders.run)
        raise
    for choice in resolved.choices:
        logger.info(choice)
    forget_headers()
    return_freed_memory()
    return PreparedEngine(resolved, model, tokenizer, folders, media, adapters)


def _overrides(text: str) -> dict[str, Any]:
    """Return the JSON object of `--json-model-override-args`.

    Raises:
        StartupError: the text is not a JSON object.
    """
    try:
        return msgspec.json.decode(text.encode(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise StartupError(
            f"--json-model-override-args must be a JSON object of keys of config.json: {error}"
        ) from None


def _with_turn_ends(model: ModelSpec, tokenizer: Tokenizer) -> ModelSpec:
    """Add the tokenizer's end-of-turn tokens to the tokens that end an output.

    A fine-tuned model often has the base model's `eos_token_id` in both config files. Then only the
    tokenizer's files name the token that it was trained to end with.
    """
    ends = [each for each in tokenizer.turn_end_ids if 0 <= each < model.vocab_size]
    ids = tuple(dict.fromkeys((*model.eos_token_ids, *ends)))
    if ids != model.eos_token_ids:
        logger.info("Tokens that end a text: %s, including the tokenizer's", list(ids))
    return dataclasses.replace(model, eos_token_ids=ids)


def find_model(config: ServerConfig, *, only_config: bool = False) -> tuple[ServerConfig, Path]:
    """Find the folder of the requested model, or of the demo model.

    Args:
        config: the options as parsed.
        only_config: whether `config.json` is enough; see `resolve_model_folder`.

    Returns:
        The options and the folder. If no model or a demo model was requested, the options have the
        demo model's path and name.

    Raises:
        StartupError: the model does not exist.
    """
    path = config.model.model_path
    # If a folder has the name of a demo model, the folder is used.
    if path is not None and (path not in DEMO_NAMES or Path(path).exists()):
        folder = resolve_model_folder(path, config.model.revision, only_config=only_config)
        return config, folder
    name, folder = find_demo(path or DEMO_NAME)
    logger.info("Serving the demo model %s", name)
    http = config.http
    if name == INSTRUCT_NAME and http.sampling_defaults == "model":
        sampling = http.preferred_sampling_params or INSTRUCT_SAMPLING
        http = dataclasses.replace(http, preferred_sampling_params=sampling)
    model = dataclasses.replace(
        config.model,
        model_path=str(folder),
        served_model_name=config.model.served_model_name or name,
    )
    return dataclasses.replace(config, model=model, http=http), folder
