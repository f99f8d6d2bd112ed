"""Reads forms with uploaded files (`multipart/form-data`), within bounds."""

from __future__ import annotations

from dataclasses import dataclass, field

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from runtime.errors import InvalidRequest

MAX_PARTS = 32
MAX_FIELD_BYTES = 64 * 1024
MAX_FILENAME_CHARS = 255
_PIECE = 1 << 20


@dataclass
class Upload:
    """A file of a form: its name, and its content."""

    filename: str
    content: bytearray


@dataclass
class Form:
    """The parts of a form by name: texts, and files."""

    fields: dict[str, str] = field(default_factory=dict)
    files: dict[str, Upload] = field(default_factory=dict)


def read_form(body: bytes | bytearray, content_type: str) -> Form:
    """Parse a form; call this on a thread.

    Raises:
        InvalidRequest: the body is not a form, is malformed, or exceeds a limit.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise InvalidRequest("The Content-Type header must be multipart/form-data.")
    reader = _Reader()
    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": reader.begin,
                "on_header_field": reader.header_name,
                "on_header_value": reader.header_value,
                "on_header_end": reader.end_header,
                "on_headers_finished": reader.name_part,
                "on_part_data": reader.data,
                "on_part_end": reader.end,
                "on_end": reader.finish,
            },
        )
        for at in range(0, len(body), _PIECE):
            parser.write(bytes(body[at : at + _PIECE]))
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequest(f"The form is malformed: {error}.") from None
    if not reader.is_complete:
        raise InvalidRequest("The form is malformed: its end is missing.")
    return reader.form


class _Reader:
    """Collects the parts of a form; its methods are the parser's callbacks.

    Attributes:
        is_complete: whether the end of the form was read.
    """

    def __init__(self) -> None:
        self.form = Form()
        self.is_complete = False
        self._num_parts = 0
        self._header = (bytearray(), bytearray())
        self._headers: dict[bytes, bytes] = {}
        self._name = ""
        self._filename: str | None = None
        self._data = bytearray()

    def begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidRequest(f"A form may have at most {MAX_PARTS} parts.")
        self._headers = {}
        self._data = bytearray()

    def header_name(self, data: bytes, start: int, end: int) -> None:
        self._header[0].extend(data[start:end])

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1].extend(data[start:end])

    def end_header(self) -> None:
        name, value = self._header
        self._headers[bytes(name).lower()] = bytes(value)
        self._header = (bytearray(), bytearray())

    def name_part(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        if kind != b"form-data" or b"name" not in options:
            raise InvalidRequest("A part of the form has no name.")
        self._name = options[b"name"].decode("utf-8", "replace")
        filename = options.get(b"filename")
        self._filename = None if filename is None else filename.decode("utf-8", "replace")

    def data(self, data: bytes, start: int, end: int) -> None:
        self._data += data[start:end]
        if self._filename is None and len(self._data) > MAX_FIELD_BYTES:
            raise InvalidRequest(
                f"{self._name[:64]} may have at most {MAX_FIELD_BYTES} bytes.",
                param=self._name[:64],
            )

    def end(self) -> None:
        name = self._name
        if name in self.form.fields or name in self.form.files:
            raise InvalidRequest(f"{name[:64]} occurs twice in the form.", param=name[:64])
        if self._filename is not None:
            self.form.files[name] = Upload(self._filename, self._data)
            return
        try:
            self.form.fields[name] = self._data.decode()
        except UnicodeDecodeError:
            raise InvalidRequest(f"{name[:64]} is not UTF-8.", param=name[:64]) from None

    def finish(self) -> None:
        self.is_complete = True
