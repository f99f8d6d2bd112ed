"""The command line has the configuration's fields, and tolerates SGLang's other options."""

import dataclasses

import pytest

from runtime.config.options import ServerConfig
from runtime.launch.command_line import build_parser, option_name, parse_args, parse_int
from runtime.launch.reference_flags import REFERENCE_FLAGS


def fails_with(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parse_args(argv, {})
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def test_nothing_given_is_the_default_configuration():
    assert parse_args([], {}).config == ServerConfig()


def test_every_field_is_an_option_with_help():
    text = build_parser().format_help()
    for section in dataclasses.fields(ServerConfig):
        for field in dataclasses.fields(section.default_factory):
            assert option_name(field.name) in text
            assert field.metadata["help"]


def test_values_reach_their_fields():
    config = parse_args(
        [
            *("--model", "m", "--port", "8000", "--tp", "2", "--dp", "3"),
            *("--context-length", "32K", "--mem-fraction-static", "0.7"),
            *("--enable-metrics", "--allow-origins", "http://a", "http://b"),
        ],
        {},
    ).config
    assert config.model.model_path == "m"
    assert config.http.port == 8000
    assert (config.parallel.tp_size, config.parallel.dp_size) == (2, 3)
    assert config.model.context_length == 32768
    assert config.scheduling.mem_fraction_static == 0.7
    assert config.logging.enable_metrics is True
    assert config.http.allow_origins == ["http://a", "http://b"]


def test_the_launch_lines_of_the_documents_parse():
    line = "--model-path M --host 0.0.0.0 --port 1 --log-level warning"
    assert parse_args(line.split(), {}).config.http.host == "0.0.0.0"


@pytest.mark.parametrize(
    ("text", "value"),
    [("32k", 32000), ("32K", 32768), ("1.5k", 1500), ("-1", -1), ("2M", 2**21), ("4096", 4096)],
)
def test_integers_take_units(text, value):
    assert parse_int(text) == value


def test_a_huge_integer_is_exact():
    assert parse_int("9007199254740993") == 9007199254740993


def test_unknown_options_get_a_suggestion(capsys):
    assert "did you mean --port?" in fails_with(capsys, "--prot", "1")
    assert "did you mean --page-size?" in fails_with(capsys, "--page_size", "1")
    assert "did you mean" not in fails_with(capsys, "--xyzzy")
    assert "unexpected argument 'serve'" in fails_with(capsys, "serve")


def test_wrong_values_name_the_option(capsys):
    assert "--port" in fails_with(capsys, "--port", "many")
    assert "--dtype" in fails_with(capsys, "--dtype", "int3")
    assert "--log-level-http" in fails_with(capsys, "--log-level-http", "loud")


def test_kernel_flags_of_the_reference_pass_with_one_notice():
    parsed = parse_args(
        ["--sleep-on-idle", "--cuda-graph-bs", "1", "2", "--port", "5", "--ep-size", "1"], {}
    )
    assert parsed.config.http.port == 5
    assert len(parsed.notices) == 1
    assert "--sleep-on-idle, --cuda-graph-bs" in parsed.notices[0]


def test_kernel_names_of_the_reference_become_the_automatic_choice():
    parsed = parse_args(["--attention-backend", "fa3"], {})
    assert parsed.config.kernels.attention_backend == "auto"
    assert "fa3" in parsed.notices[0]


@pytest.mark.parametrize(
    "argv",
    [["--torchao-config", "fp8wo"], ["--cpu-offload-gb", "4"], ["--hicache-size=1"]],
)
def test_flags_that_ask_for_other_behaviour_are_refused(capsys, argv):
    assert argv[0].split("=")[0] in fails_with(capsys, *argv)


def test_no_flag_of_the_reference_hides_one_of_ours():
    _, unknown = build_parser().parse_known_args(list(REFERENCE_FLAGS))
    assert unknown == list(REFERENCE_FLAGS)


def test_keys_come_from_the_environment_unless_given():
    environment = {
        "HEADRACE_API_KEY": "e",
        "HEADRACE_ADMIN_API_KEY": "a",
        "DISABLE_OPENAPI_DOC": "1",
    }
    config = parse_args(["--api-key", "c"], environment).config
    assert config.http.api_key == "c"
    assert config.http.admin_api_key == "a"
    assert config.http.disable_docs is True
    assert parse_args([], {"DISABLE_OPENAPI_DOC": "false"}).config.http.disable_docs is False


def test_secrets_come_from_files_and_options_that_show_them_are_told(tmp_path, capsys):
    path = tmp_path / "key"
    path.write_text("from a file\n")
    files = {"HEADRACE_API_KEY_FILE": str(path), "HEADRACE_ADMIN_API_KEY_FILE": str(path)}
    parsed = parse_args([], files | {"HEADRACE_ADMIN_API_KEY": "a"})
    assert (parsed.config.http.api_key, parsed.config.http.admin_api_key) == ("from a file", "a")
    assert parsed.notices == []
    parsed = parse_args(["--api-key", "shown"], {})
    (notice,) = parsed.notices
    assert "process list" in notice
    assert "HEADRACE_API_KEY_FILE" in notice
    assert "shown" not in notice
    for content in (None, "", "two\nlines"):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content)
        with pytest.raises(SystemExit):
            parse_args([], files)
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "HEADRACE_API_KEY_FILE" in said
