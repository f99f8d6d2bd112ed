"""Names that users' programs import, under the reference's module names."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
API = ("assistant", "function", "gen", "image", "select", "set_default_backend", "user", "video")
SURFACE = {
    "headrace": (
        *(*API, "Runtime", "RuntimeEndpoint", "OpenAI", "Anthropic", "LiteLLM", "VertexAI"),
        *("Crusoe", "Engine", "ServerArgs", "global_config", "separate_reasoning", "flush_cache"),
    ),
    "headrace.lang.api": (*API, "gen_int", "gen_string", "get_server_info", "system_begin"),
    "headrace.lang.ir": (
        *("REGEX_INT", "REGEX_FLOAT", "REGEX_BOOL", "REGEX_STR", "SglGen", "SglExprList"),
        *("SglSeparateReasoning", "SglSamplingParams", "SglFunction"),
    ),
    "headrace.lang.choices": ("token_length_normalized", "greedy_token_selection"),
    "headrace.lang.chat_template": (
        *("get_chat_template", "get_chat_template_by_model_path", "register_chat_template"),
        *("register_chat_template_matching_function", "ChatTemplate", "ChatTemplateStyle"),
    ),
    "headrace.lang.interpreter": ("ProgramState", "StreamExecutor"),
    "headrace.lang.backend.anthropic": ("Anthropic",),
    "headrace.lang.backend.base": ("BaseBackend",),
    "headrace.lang.backend.litellm": ("LiteLLM",),
    "headrace.lang.backend.openai": ("OpenAI",),
    "headrace.lang.backend.runtime_endpoint": ("RuntimeEndpoint",),
    "headrace.srt.server_args": ("ServerArgs",),
    "headrace.srt.utils": ("load_image",),
    "headrace.test.doc_patch": ("launch_server_cmd",),
    "headrace.test.test_programs": ("test_mt_bench", "test_select", "test_stream"),
    "headrace.test.test_utils": ("is_in_ci",),
    "headrace.utils": (
        *("print_highlight", "terminate_process", "wait_for_server", "launch_server_cmd"),
        *("convert_json_schema_to_str", "find_printable_text", "http_request", "dump_state_text"),
    ),
}


@pytest.mark.parametrize("module", SURFACE)
def test_names_are_there_and_import_nothing_heavy(module: str) -> None:
    heavy = ("torch", "transformers", "openai", "litellm", "IPython", "numpy", "aiohttp", "PIL")
    code = (
        f"import sys\nfrom {module} import {', '.join(SURFACE[module])}\n"
        f"print([name for name in {heavy!r} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
