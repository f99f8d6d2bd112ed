"""Options of several nodes: which are refused, and which addresses a node uses."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from runtime.config.lora_options import LoraArgs
from runtime.config.parallel_options import ParallelArgs
from runtime.errors import StartupError
from runtime.launch.node_options import NAME_PATIENCE_S, check_nodes, node_link

TWO: dict[str, Any] = {"nnodes": 2, "tp_size": 2, "dist_init_addr": "127.0.0.2:5000"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dist_init_addr": None}, "needs --dist-init-addr"),
        ({"dist_init_addr": "10.0.0.1"}, "HOST:PORT"),
        ({"dist_init_addr": "10.0.0.1:70000"}, "65535"),
        ({"nnodes": 1, "dist_init_addr": "nowhere"}, "HOST:PORT"),
        ({"tp_size": 3}, "cannot be shared evenly"),
        ({"tp_size": 1, "pp_size": 3}, "--tp-size 1 with --pp-size 3 cannot be shared evenly"),
        ({"dp_size": 2}, "one copy of the model"),
        ({"dist_key": "short"}, "at least 16 characters"),
    ],
)
def test_options_that_do_not_go_together_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(StartupError, match=why):
        check_nodes(ParallelArgs(**{**TWO, **changes}), LoraArgs())


def test_adapters_need_one_node() -> None:
    with pytest.raises(StartupError, match="adapters need a server on one node"):
        check_nodes(ParallelArgs(**TWO), LoraArgs(enable_lora=True))
    check_nodes(ParallelArgs(), LoraArgs(enable_lora=True))


def test_a_node_uses_the_address_that_leads_to_node_0() -> None:
    leader = node_link(ParallelArgs(**TWO))
    assert leader is not None
    assert (leader.leader, leader.port, leader.host) == ("127.0.0.2", 5000, "127.0.0.2")
    other = node_link(ParallelArgs(**TWO, node_rank=1))
    assert other is not None
    assert other.host.startswith("127.")
    assert node_link(ParallelArgs()) is None


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("8.8.8.8:5000", "not a private address"),
        ("0.0.0.0:5000", "stands for every address"),
        ("0:5000", "stands for every address"),
        ("[::]:5000", "stands for every address"),
        ("[::ffff:0.0.0.0]:5000", "stands for every address"),
        ("10.255.255.254:5000", "not an address of this machine"),
    ],
)
def test_node_0_listens_on_an_own_private_address(address: str, why: str) -> None:
    with pytest.raises(StartupError, match=why):
        node_link(ParallelArgs(**{**TWO, "dist_init_addr": address}))


def test_node_0_has_patience_for_its_own_name_too(caplog: pytest.LogCaptureFixture) -> None:
    """The record of a pod's name may come after the pod has started."""
    # No name server is asked for such a name.
    late = ParallelArgs(**{**TWO, "dist_init_addr": "[fe80::1%none]:5000"})
    with pytest.raises(StartupError, match="fe80::1%none"):
        node_link(late, patience_s=0.1)
    assert "trying for 0.1 s" in caplog.text
    signature = inspect.signature(node_link)
    assert signature.parameters["patience_s"].default == NAME_PATIENCE_S
