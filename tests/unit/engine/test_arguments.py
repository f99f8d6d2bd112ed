"""Keyword arguments of `Engine`: the server's options, checked without starting anything."""

import argparse
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from headrace.engine.server_args import ServerArgs, read_keywords
from runtime.config.options import ServerConfig
from runtime.launch.command_line import build_parser, parse_args

ROOT = Path(__file__).resolve().parents[3]


def test_importing_the_package_loads_nothing_heavy():
    heavy = ("torch", "fastapi", "numpy", "transformers", "zmq", "msgspec", "httpx", "tqdm")
    code = (
        "import sys, headrace\n"
        "from headrace.utils import stream_and_merge, launch_server_cmd\n"
        f"print([name for name in {heavy!r} if name in sys.modules])\n"
        "from headrace import Engine\n"
        "print([name for name in ('torch', 'fastapi', 'numpy') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]


def test_every_public_name_is_there():
    assert headrace.__all__ == sorted(headrace.__all__)
    for name in headrace.__all__:
        assert getattr(headrace, name) is not None
        assert name in dir(headrace)
    assert isinstance(headrace.Engine, type)
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        headrace.Motor  # noqa: B018


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("headrace.srt.server_args", ["ServerArgs"]),
        ("headrace.test.test_utils", ["is_in_ci"]),
        ("headrace.test.doc_patch", ["launch_server_cmd"]),
        ("headrace.launch_server", ["main"]),
    ],
)
def test_modules_that_documents_import(module, names):
    # In a process of its own: one of them applies nest_asyncio.
    code = f"from {module} import {', '.join(names)}\nimport {module}"
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, check=True)


def test_the_flat_form_has_every_field_once():
    sections = [field.default_factory for field in dataclasses.fields(ServerConfig)]
    names = [field.name for section in sections for field in dataclasses.fields(section)]
    assert len(names) == len(set(names))
    assert {field.name for field in dataclasses.fields(ServerArgs)} == set(names)
    assert ServerArgs().to_config(incremental=False) == ServerConfig()
    assert ServerArgs.from_config(ServerConfig(model=ServerConfig().model)).port == 30000


def test_names_are_checked_with_a_hint():
    with pytest.raises(TypeError, match=r"'modelpath'. Did you mean 'model_path'\?"):
        read_keywords({"modelpath": "x"})
    with pytest.raises(TypeError, match="'zzz'"):
        read_keywords({"zzz": 1})


def test_values_are_checked_by_type_and_choice():
    arguments, notices = read_keywords(
        {"model_path": Path("/models/x"), "tp": 1, "max_total_tokens": 100, "dtype": "float32"}
    )
    assert (arguments.model_path, arguments.tp_size, notices) == ("/models/x", 1, [])
    with pytest.raises(ValueError, match="max_total_tokens"):
        read_keywords({"max_total_tokens": "many"})
    with pytest.raises(ValueError, match="dtype must be one of"):
        read_keywords({"dtype": "int3"})
    many, _ = read_keywords({"metrics_aliases": ["aibrix", "vllm"]})
    assert many.metrics_aliases == ["aibrix", "vllm"]
    with pytest.raises(ValueError, match="metrics_aliases must be one of"):
        read_keywords({"metrics_aliases": ["vllm", "tgi"]})
    with pytest.raises(ValueError, match="disable_radix_cache"):
        read_keywords({"disable_radix_cache": 1})


def test_arguments_of_the_reference():
    arguments, notices = read_keywords(
        {"cuda_graph_max_bs": 4, "enable_p2p_check": True, "attention_backend": "fa3"}
    )
    assert len(notices) == 1
    for name in ("cuda_graph_max_bs", "enable_p2p_check", "attention_backend='fa3'"):
        assert name in notices[0]
    assert arguments.attention_backend == "auto"
    # What asks for nothing passes in silence.
    neutral = {"is_embedding": False, "quantization": None, "ep_size": 1, "kv_cache_dtype": "auto"}
    assert read_keywords(neutral) == (ServerArgs(), [])
    for name, value in (("enable_eplb", True), ("torchao_config", "fp8wo"), ("cpu_offload_gb", 4)):
        with pytest.raises(ValueError, match=f"{name}={value!r}"):
            read_keywords({name: value})


def test_preferred_sampling_may_be_a_dict():
    arguments, _ = read_keywords({"preferred_sampling_params": {"temperature": 0}})
    assert arguments.preferred_sampling_params == '{"temperature": 0}'


def test_the_command_line_round_trip():
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    words = ["--model-path", "m", "--max-total-tokens", "32k", "--tp", "1", "--log-requests"]
    arguments = ServerArgs.from_cli_args(parser.parse_args(words))
    assert arguments.to_config(incremental=False) == parse_args(words, {}).config
    assert arguments.incremental_streaming_output is None
    assert arguments.to_config(incremental=True).http.incremental_streaming_output
    again, notices = read_keywords(
        {name: value for name, value in dataclasses.asdict(arguments).items() if value is not None}
    )
    assert again == arguments
    assert not notices
    assert build_parser().format_help()
