"""Small helpers that programs import from `headrace.utils`, and pictures in all their forms."""

import base64
import json
import logging
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import httpx
import pydantic
import pytest

from headrace import utils
from headrace.media import load_image
from tests.support.fake_http import serve


def png() -> bytes:
    """One white dot."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + head
        + chunk(b"IDAT", zlib.compress(b"\0\xff\xff\xff"))
        + chunk(b"IEND", b"")
    )


class Capital(pydantic.BaseModel):
    name: str


def test_a_json_schema_becomes_text() -> None:
    assert utils.convert_json_schema_to_str('{"type": "object"}') == '{"type": "object"}'
    assert json.loads(utils.convert_json_schema_to_str({"type": "string"})) == {"type": "string"}
    schema = json.loads(utils.convert_json_schema_to_str(Capital))
    assert schema["properties"]["name"]["type"] == "string"
    for wrong in (3, None, int, Capital(name="Rome")):
        with pytest.raises(ValueError, match="is a dict, its text, or a class of pydantic"):
            utils.convert_json_schema_to_str(wrong)


@pytest.mark.parametrize(
    ("text", "printable"),
    [
        ("", ""),
        ("one line\n", "one line\n"),
        ("two wor", "two "),
        ("word", ""),
        ("a 世界", "a 世界"),
        ("a 世x", "a 世"),
        ("ends with space ", "ends with space "),
        ("\U00020000", "\U00020000"),
        ("né à", "né "),
    ],
)
def test_printable_text(text: str, printable: str) -> None:
    assert utils.find_printable_text(text) == printable


def test_texts_of_states_are_written_with_numbers(tmp_path: Path) -> None:
    class State:
        def text(self) -> str:
            return "of a state"

    path = tmp_path / "states.txt"
    utils.dump_state_text(str(path), ["a string", State()])
    utils.dump_state_text(str(path), ["appended"], mode="a")
    lines = path.read_text().splitlines()
    assert [line for line in lines if line.strip("= ").isdigit()] == [
        f"{'=' * 40} {number} {'=' * 40}" for number in (0, 1, 0)
    ]
    assert {"a string", "of a state", "appended"} <= set(lines)


def test_types_once_and_names(caplog: pytest.LogCaptureFixture) -> None:
    assert utils.is_same_type([])
    assert utils.is_same_type([1, 2])
    assert not utils.is_same_type([1, "2"])

    calls: list[int] = []
    once = utils.execute_once(calls.append)
    once(1)
    once(2)
    assert calls == [1]

    with caplog.at_level(logging.INFO):
        utils.info_once("said one time")
        utils.info_once("said one time")
    assert [record.message for record in caplog.records] == ["said one time"]

    assert utils.resolve_obj_by_qualname("json.decoder.JSONDecoder") is json.JSONDecoder
    with pytest.raises(AttributeError):
        utils.resolve_obj_by_qualname("json.Nothing")


def test_a_lazy_import_loads_at_first_use() -> None:
    code = (
        "import sys; from headrace.utils import LazyImport\n"
        "lazy = LazyImport('colorsys', 'rgb_to_hsv')\n"
        "assert 'colorsys' not in sys.modules\n"
        "assert lazy(1, 1, 1) == (0.0, 0.0, 1) and lazy.__name__ == 'rgb_to_hsv'\n"
        "assert 'colorsys' in sys.modules\n"
    )
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)


def test_a_dispatcher_calls_by_type() -> None:
    dispatcher = utils.TypeBasedDispatcher([(bool, lambda _: "bool"), (int, lambda _: "int")])
    dispatcher += utils.TypeBasedDispatcher([(str, str.upper)])
    assert [dispatcher(each) for each in (True, 2, "x")] == ["bool", "int", "X"]
    with pytest.raises(ValueError, match="float"):
        dispatcher(1.5)


def test_requests_give_failures_back() -> None:
    with serve({"/fails": (418, {"error": "teapot"}), "/ok": {"a": 1}}) as server:
        answer = utils.http_request(f"{server.url}/fails", json={"x": "é"}, api_key="k")
        assert (answer.status_code, answer.json()) == (418, {"error": "teapot"})
        assert "teapot" in answer.text
        assert server.requests[0].body == {"x": "é"}
        assert server.requests[0].headers["authorization"] == "Bearer k"
        assert utils.http_request(f"{server.url}/ok").json() == {"a": 1}
        assert [request.method for request in server.requests] == ["POST", "GET"]
        assert utils.http_request(f"{server.url}/ok", method="PUT").status_code == 200
        assert server.requests[-1].method == "PUT"


def test_a_stream_is_read_line_by_line() -> None:
    # The second line holds a separator that other readers take for a line's end.
    text = "data: one\r\n\ndata: a\u2028b\nlast".encode()
    cut = text.index(b"\xe2") + 1
    lines = ["data: one", "", "data: a\u2028b", "last"]
    with serve({"/stream": [text[:cut], text[cut:]]}) as server:
        with utils.http_request(f"{server.url}/stream", json={}, stream=True) as answer:
            assert list(answer.iter_lines(decode_unicode=True)) == lines
        answer = utils.http_request(f"{server.url}/stream", json={}, stream=True)
        assert list(answer.iter_lines()) == [line.encode() for line in lines]


def test_a_file_is_fetched_once(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    with serve({"/data.jsonl": {"a": 1}}) as server:
        for _ in range(2):
            assert utils.download_and_cache_file(f"{server.url}/data.jsonl", str(path)) == str(path)
        assert json.loads(path.read_text()) == {"a": 1}
        assert len(server.requests) == 1
        with pytest.raises(httpx.HTTPStatusError):
            utils.download_and_cache_file(f"{server.url}/none", str(tmp_path / "none"))
    assert [each.name for each in tmp_path.iterdir()] == ["data.jsonl"]


def test_t61_a_picture_in_every_form(tmp_path: Path) -> None:
    content = png()
    path = tmp_path / "dot.png"
    path.write_bytes(content)
    encoded = base64.b64encode(content).decode()

    class Drawn:
        """What Pillow's images can do."""

        size = (1, 1)

        def save(self, out, format):
            assert format == "PNG"
            out.write(content)

    with serve({"/dot.png": content}) as server:
        forms = [
            content,
            path,
            str(path),
            f"file://{path}",
            f"data:image/png;base64,{encoded}",
            encoded,
            f"{server.url}/dot.png",
            Drawn(),
            load_image(content),
        ]
        for form in forms:
            assert utils.encode_image_base64(form) == encoded
        with pytest.raises(OSError, match="cannot be fetched"):
            utils.encode_image_base64(f"{server.url}/none.png")
    assert load_image(Drawn())[1] == (1, 1)
    assert load_image(path)[1] is None


def test_what_is_no_picture() -> None:
    with pytest.raises(FileNotFoundError):
        utils.encode_image_base64("/no/such/file.png")
    with pytest.raises(TypeError, match="not int"):
        utils.encode_image_base64(3)


def test_a_video_says_what_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "film.mp4"
    with pytest.raises(OSError, match=r"film\.mp4"):
        utils.encode_video_base64(path)
    path.write_bytes(bytes(100))
    try:
        import cv2  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="pip install opencv-python-headless"):
            utils.encode_video_base64(path)
    else:
        with pytest.raises(OSError, match=r"film\.mp4"):
            utils.encode_video_base64(path)
