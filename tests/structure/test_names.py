"""A file's name identifies it: basenames are unique in a package, except files of one kind."""

from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Files of one kind, a folder or an entry each: the name says the kind, the folder says which.
KINDS = {
    "kernels": {
        # The truth, and implementations of it by device.
        "reference.py": "kernels/*",
        "cpu.py": "kernels/*",
        "triton.py": "kernels/*",
        "triton_invariant.py": "kernels/*",
        "table.py": "kernels/*",
    },
    "runtime": {
        # A family of models; `runtime/models/model.py` says what all of them have.
        "spec.py": "runtime/models/*",
        "model.py": "runtime/models/*, runtime/models",
        # The halves of an extra or a method of quantization, and what a large extra answers with.
        "front.py": "runtime/extras/*, runtime/models/quantization/*",
        "device.py": "runtime/extras/*, runtime/models/quantization/*",
        "answer.py": "runtime/extras/*",
        # What a registry is, that of the models and that of methods.
        "registry.py": "runtime/*, runtime/models/*",
    },
    "openai_api": {
        "registry.py": "openai_api/*_parsers",
        # An endpoint and its schema.
        "batches.py": "openai_api/*",
        "classify.py": "openai_api/*",
        "completions.py": "openai_api/*",
        "embeddings.py": "openai_api/*",
        "responses.py": "openai_api/*",
    },
    "server": {},
    # The second of each is where programs written for SGLang import it from.
    "headrace": {"server_args.py": "headrace/*", "utils.py": "headrace, headrace/srt"},
}


@pytest.mark.parametrize("package", KINDS)
def test_no_basename_means_two_things(package: str) -> None:
    folders = defaultdict(list)
    for path in (ROOT / package).rglob("*.py"):
        if path.name != "__init__.py":
            folders[path.name].append(path.parent.relative_to(ROOT))
    twice = {
        name: [str(folder) for folder in found]
        for name, found in folders.items()
        if len(found) > 1
        and not all(
            any(map(folder.match, KINDS[package].get(name, "none").split(", "))) for folder in found
        )
    }
    assert not twice


# Each room would want a file of this name for its own.
WORDS = (
    *("context", "control", "errors", "extras", "generation", "health", "logprobs", "options"),
    *("process", "progress", "request", "utils", "warmup", "weights"),
)


@pytest.mark.parametrize("name", WORDS)
def test_a_word_that_fits_everywhere_is_one_file(name: str) -> None:
    found = [
        str(path.relative_to(ROOT))
        for package in KINDS
        for path in (ROOT / package).rglob(f"{name}.py")
        if path.parent.name != "headrace"  # `headrace.utils` is where SGLang's programs look
    ]
    assert len(found) <= 1, found
