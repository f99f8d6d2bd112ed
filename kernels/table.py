"""Tables that select one implementation of an op for a device.

A table lists import paths, and nothing is imported until an entry is chosen. A missing library
therefore causes an error only when its implementation is requested. `Table.choose` returns the
choice and its reason, which callers log.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from kernels.registry import Names, load_object

KernelsT = TypeVar("KernelsT")

# The machines on which the orders in `Table.preferred` were measured, by `benchmarks.h200.kernels`
# and `benchmarks.cpu_kernels`; the figures are in `benchmarks/results`.
MEASURED_ON = {"cpu": "an x86 CPU", "cuda": "an H200"}


@dataclass(frozen=True)
class Entry:
    """One implementation of an op: its module and its requirements.

    Attributes:
        module: import path of the module (or `module:attribute`) that has the functions.
        probe: `module:function` that returns `None` if the implementation can run here, or else the
            reason why it cannot. Empty if it always can.
        invariant: whether the bits of a result's row do not depend on the other rows of the step or
            on their number.
    """

    module: str
    probe: str = ""
    invariant: bool = False


@dataclass(frozen=True)
class Choice(Generic[KernelsT]):
    """The implementation that was chosen for an op on a device, and why.

    Attributes:
        op: name of the op.
        name: name of the implementation in its table.
        reason: one phrase for the log.
        kernels: the implementation itself.
    """

    op: str
    name: str
    reason: str
    kernels: KernelsT


class Table(Names[Entry], Generic[KernelsT]):
    """The implementations of one op: their names, import paths, and the order per device type."""

    def __init__(
        self, op: str, entries: Mapping[str, Entry], preferred: Mapping[str, tuple[str, ...]]
    ) -> None:
        """Keep the entries; import nothing.

        Args:
            op: name of the op, for messages.
            entries: the implementations by name.
            preferred: names of implementations by device type (of `MEASURED_ON`), the fastest
                first. Other device types use `reference`.
        """
        super().__init__(f"implementation of {op}", entries)
        self.op = op
        self.preferred = dict(preferred)

    def unavailable(self, name: str) -> str | None:
        """Return why the implementation `name` cannot run here, or `None` if it can."""
        probe = self.find(name).probe
        return None if not probe else cast("str | None", load_object(probe)())  # type: ignore[operator]

    def load(self, name: str) -> KernelsT:
        """Import and return the implementation `name`; see `find` for errors."""
        return cast("KernelsT", load_object(self.find(name).module))

    def is_invariant(self, name: str) -> bool:
        """Return whether the implementation `name` is batch-invariant; see `Entry.invariant`."""
        return self.find(name).invariant

    def choose(
        self, device_type: str, wanted: str | None = None, *, invariant: bool = False
    ) -> Choice[KernelsT]:
        """Choose the implementation for a device type.

        Args:
            device_type: `torch.device.type`.
            wanted: name of an implementation to use regardless of the order.
            invariant: whether only batch-invariant implementations in the device's order are
                considered. Implementations outside this order may run on the machine, but not on
                this device.

        Raises:
            ValueError: `wanted` is unknown.
            RuntimeError: `wanted` cannot run here, or no invariant implementation can.
        """
        if wanted is not None:
            why_not = self.unavailable(wanted)
            if why_not is not None:
                raise RuntimeError(f"{self.op}: {wanted!r} cannot run here: {why_not}")
            return Choice(self.op, wanted, "asked for", self.load(wanted))
        passed_over: list[str] = []
        names = (*self.preferred.get(device_type, ()), "reference")
        if invariant:
            names = tuple(n for n in dict.fromkeys(names) if self.is_invariant(n))
        for name in names:
            why_not = self.unavailable(name)
            if why_not is None:
                reason = "; ".join(passed_over) or self._why_first(device_type, name, invariant)
                return Choice(self.op, name, reason, self.load(name))
            passed_over.append(f"{name}: {why_not}")
        kind = "nothing batch-invariant" if invariant else "nothing"
        raise RuntimeError(f"{self.op}: {kind} runs on {device_type}: {'; '.join(passed_over)}")

    def _why_first(self, device_type: str, name: str, invariant: bool) -> str:
        if name not in self.preferred.get(device_type, ()):
            return f"nothing else for {device_type}"
        kind = "batch-invariant ones" if invariant else "those"
        return f"fastest of {kind} measured on {MEASURED_ON[device_type]}"
