"""The base class of implementations that use the weights without packing."""

from torch import Tensor

from kernels.experts import PackedExperts


class PlainExperts(PackedExperts):
    """Experts whose two weight tensors are kept as they are.

    New weights are copied into the same memory, because CUDA graphs hold the addresses.
    """

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        self.num_experts = len(gate_up)
        self._gate_up, self._down = gate_up.contiguous(), down.contiguous()

    def unpack(self) -> tuple[Tensor, Tensor]:
        return self._gate_up, self._down

    def unpack_one(self, expert: int) -> tuple[Tensor, Tensor]:
        return self._gate_up[expert], self._down[expert]

    def repack(self, gate_up: Tensor, down: Tensor) -> None:
        self._gate_up.copy_(gate_up)
        self._down.copy_(down)

    @property
    def size_bytes(self) -> int:
        return self._gate_up.nbytes + self._down.nbytes
