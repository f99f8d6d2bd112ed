"""Describes the machine and its libraries, without importing any library."""

from __future__ import annotations

import shutil
from importlib import metadata

from headrace.bench.environment import describe_environment
from headrace.doctor.findings import Library, Machine
from runtime.launch.hardware import detect_hardware

# The instruction sets that `kernels/cpu` has code for, or that change the compiler's output.
_INSTRUCTION_SETS = ("avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")

# For each library its name on the package index, the features that it enables, and the extra of
# Headrace that installs it (empty for a required library).
_LIBRARIES = (
    ("torch", "every model", ""),
    ("tokenizers", "text in and out", ""),
    ("transformers", "tokenizers of models without a tokenizer.json", ""),
    ("llguidance", "structured output: JSON schemas, regular expressions, grammars", ""),
    ("triton", "kernels for NVIDIA GPUs", "cuda"),
    ("flashinfer-python", "--attention-backend flashinfer", "cuda"),
    ("xgrammar", "structured output with masks computed ahead", "grammar"),
)


def read_machine() -> Machine:
    """Describe this machine, except its free memory."""
    environment, hardware = describe_environment(), detect_hardware()
    return Machine(
        system=environment["system"],
        python=environment["python"],
        headrace=environment["headrace"],
        cpu=environment["cpu"],
        num_cores=hardware.num_cores,
        instruction_sets=[name for name in _INSTRUCTION_SETS if name in hardware.cpu_flags],
        memory_bytes=None,
        gpus=environment["gpus"] or [f"device {each}" for each in hardware.gpu_ids],
    )


def read_libraries() -> list[Library]:
    """Return the known libraries: whether each is installed, and which features it enables."""
    found = [
        Library(
            name=name,
            version=_version(name),
            gives=gives,
            install=f"pip install 'headrace[{extra}]'" if extra else f"pip install {name}",
            is_required=not extra,
        )
        for name, gives, extra in _LIBRARIES
    ]
    compiler = shutil.which("g++") or shutil.which("c++")
    return [
        *found,
        Library(
            name="g++",
            version=compiler,
            gives="the C++ kernels; without them a CPU is many times slower",
            install="apt-get install g++",
            is_required=False,
        ),
    ]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
