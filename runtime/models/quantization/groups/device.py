"""Chooses the class that stores a matrix of 4-bit or 8-bit codes, by its form and the device."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from runtime.checkpoint.model_spec import Quantization, WeightSpec
from runtime.models.layers.experts import ExpertsStore
from runtime.models.layers.matrix import Matrix
from runtime.models.layers.parameter import Parameter, Stored
from runtime.models.quantization.groups.coded_experts import GroupExperts
from runtime.models.quantization.groups.codes import Codes
from runtime.models.quantization.groups.front import GroupQuantization
from runtime.models.quantization.groups.products import GroupMatrix
from runtime.models.quantization.method import DeviceMethod

logger = logging.getLogger(__name__)


class Device(DeviceMethod):
    """Makes the objects that store matrices of quantized integers (codes).

    Codes stay in memory if kernels can multiply by them. Other matrices are converted to floats
    while they load ("widened").
    """

    def __init__(self, quantization: Quantization) -> None:
        assert isinstance(quantization, GroupQuantization)
        self._quantization = quantization
        self._num_widened = 0
        self._has_told = False

    def parameter(self, plain: Parameter, weights: Mapping[str, WeightSpec]) -> Parameter:  # noqa: ARG002
        return plain

    def matrix(self, plain: Parameter, weights: Mapping[str, WeightSpec]) -> Matrix | None:
        codes = self._codes("weight", plain, weights)
        if codes is None:
            return None
        keeps = plain.device.type == "cpu" or (
            self.implementation is None and plain.dtype in (torch.bfloat16, torch.float16)
        )
        self._num_widened += not keeps
        return GroupMatrix(codes, self.implementation, keeps=keeps)

    def experts(
        self, plain: Mapping[str, Parameter], weights: Stored, mine: range
    ) -> ExpertsStore | None:
        found = {}
        for name, parameter in plain.items():
            codes = self._codes(name, parameter, weights[name])
            if codes is None:
                codes = Codes(name, parameter, dict.fromkeys(parameter.shards), weights[name])
            found[name] = codes
        if not any(codes.has_codes for codes in found.values()):
            return None
        implementations = self.implementation, self.experts_implementation
        return GroupExperts(found, mine, implementations, self._tell_widened_experts)

    def _codes(
        self, name: str, plain: Parameter, weights: Mapping[str, WeightSpec]
    ) -> Codes | None:
        schemes = {shard: self._quantization.scheme(weight) for shard, weight in weights.items()}
        if len(plain.shape) != 2 or not any(schemes.values()):
            return None
        return Codes(name, plain, schemes, weights)

    def report(self) -> None:
        if self._num_widened:
            logger.info(
                "Widened to 16 bits while they load: %d parameters in codes (no kernel fits the "
                "type, or products must not vary)",
                self._num_widened,
            )

    def _tell_widened_experts(self) -> None:
        if not self._has_told:
            self._has_told = True
            logger.warning(
                "Experts in codes are widened to 16 bits: no kernel has their groups or the order "
                "of their columns"
            )
