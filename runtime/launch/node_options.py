"""Checks the options of several ranks and nodes, and finds the nodes' addresses."""

from __future__ import annotations

from runtime.checkpoint.model_spec import ModelSpec
from runtime.config.lora_options import LoraArgs
from runtime.config.parallel_options import NodeLink, ParallelArgs
from runtime.errors import StartupError
from runtime.ipc.node_links import (
    address_toward,
    is_local,
    is_private,
    is_unspecified,
    parse_address,
    resolve_host,
)
from runtime.launch.hardware import Hardware

MAX_NODES = 64
MIN_KEY_CHARS = 16
# How long a host name may stay unknown, seconds. A pod's name may be registered long after the pod
# has started; this also holds for node 0's own name.
NAME_PATIENCE_S = 300.0


def check_nodes(parallel: ParallelArgs, lora: LoraArgs) -> None:
    """Refuse options of nodes that contradict each other.

    Raises:
        StartupError: the first such option; the message is one line.
    """
    nodes = parallel.nnodes
    if parallel.dist_key is not None and len(parallel.dist_key) < MIN_KEY_CHARS:
        raise StartupError(f"--dist-key must have at least {MIN_KEY_CHARS} characters.")
    if nodes == 1:
        if parallel.dist_init_addr is not None:
            parse_address(parallel.dist_init_addr)
        return
    if parallel.dist_init_addr is None:
        raise StartupError(f"--nnodes {nodes} needs --dist-init-addr, the address of node 0.")
    parse_address(parallel.dist_init_addr)
    if parallel.dp_size > 1:
        raise StartupError(
            f"--nnodes {nodes} with --dp-size {parallel.dp_size}: a server on several nodes has "
            "one copy of the model. Start one server for each copy, and a router before them."
        )
    if parallel.num_ranks % nodes:
        ranks = f"--tp-size {parallel.tp_size}"
        if parallel.pp_size > 1:
            ranks += f" with --pp-size {parallel.pp_size}"
        raise StartupError(f"--nnodes {nodes}: {ranks} cannot be shared evenly by the nodes.")
    if lora.enable_lora or lora.lora_paths:
        raise StartupError(
            f"--nnodes {nodes}: adapters need a server on one node; omit --enable-lora and "
            "--lora-paths."
        )


def check_ranks(parallel: ParallelArgs, model: ModelSpec, device: str, hardware: Hardware) -> None:
    """Refuse a number of ranks that the model cannot be divided by, or that exceeds the machine.

    Raises:
        StartupError: the number of ranks is refused; the message is one line.
    """
    tp_size, dp_size = parallel.tp_size, parallel.dp_size
    num_local = parallel.num_ranks * dp_size // parallel.nnodes
    if device == "cuda" and num_local > hardware.num_gpus:
        asked = [f"--tp-size {tp_size}"] if tp_size > 1 or parallel.num_ranks * dp_size == 1 else []
        asked += [f"--pp-size {parallel.pp_size}"] if parallel.pp_size > 1 else []
        asked += [f"--dp-size {dp_size}"] if dp_size > 1 else []
        where = " on each node" if parallel.nnodes > 1 else ""
        raise StartupError(
            f"{' with '.join(asked)} needs {num_local} GPUs{where}; this machine shows "
            f"{hardware.num_gpus}."
        )
    ep_size = parallel.ep_size
    if ep_size != 1 and (ep_size != tp_size or not model.num_experts):
        reason = (
            f"it must be 1 or the value of --tp-size, {tp_size}"
            if model.num_experts
            else f"{model.architecture} has no experts"
        )
        raise StartupError(f"--ep-size {ep_size}: {reason}.")
    for what in model.uneven_parts(tp_size, ep_size):
        raise StartupError(f"--tp-size {tp_size}: the model's {what} cannot be shared evenly.")


def node_link(parallel: ParallelArgs, patience_s: float = NAME_PATIENCE_S) -> NodeLink | None:
    """Return the addresses with which this node reaches the others; `None` on a single node.

    Args:
        parallel: the options about nodes.
        patience_s: how long the host name of node 0 may stay unknown, seconds.

    Raises:
        StartupError: node 0's address is unknown; or this is node 0 and the address is not this
            machine's; or the address is public and there is no key. The message is one line.
    """
    if parallel.nnodes == 1 or parallel.dist_init_addr is None:
        return None
    host, port = parse_address(parallel.dist_init_addr)
    leader = resolve_host(host, patience_s)
    if is_unspecified(leader):
        raise StartupError(
            f"--dist-init-addr {parallel.dist_init_addr}: {leader} stands for every address. Give "
            "the one of node 0 on the nodes' network."
        )
    if not is_private(leader) and parallel.dist_key is None:
        raise StartupError(
            f"--dist-init-addr {parallel.dist_init_addr}: {leader} is not a private address. Set "
            "HEADRACE_DIST_KEY on every node, or use an address of a private network."
        )
    if parallel.node_rank == 0:
        if not is_local(leader):
            raise StartupError(
                f"--dist-init-addr {parallel.dist_init_addr}: {leader} is not an address of this "
                "machine, which is node 0."
            )
        own = leader
    else:
        own = address_toward(leader, port)
    return NodeLink(
        num_nodes=parallel.nnodes, leader=leader, port=port, host=own, key=parallel.dist_key or ""
    )
