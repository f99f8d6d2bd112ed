"""Options about ranks, replicas and nodes, and the addresses that the nodes of a worker use."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.option_field import option


@dataclass(frozen=True, kw_only=True)
class ParallelArgs:
    """Options about several devices and machines."""

    tp_size: int = option(
        1, "Devices that share each layer.", aliases=("--tensor-parallel-size", "--tp")
    )
    pp_size: int = option(
        1,
        "Stages into which the layers are cut, each on --tp-size devices of its own.",
        aliases=("--pipeline-parallel-size", "--pp"),
    )
    dp_size: int = option(
        1,
        "Copies of the model, each on its own devices, behind one address.",
        aliases=("--data-parallel-size", "--dp"),
    )
    ep_size: int = option(
        1,
        "1, or the value of --tp-size: each device then holds some experts whole, instead of a "
        "slice of every expert.",
        aliases=("--expert-parallel-size", "--ep"),
    )
    load_balance_method: str = option(
        "auto",
        "How requests are distributed among the copies; auto is cache_aware, or total_requests "
        "without a prefix cache.",
        choices=("auto", "cache_aware", "round_robin", "total_requests", "total_tokens"),
    )
    nnodes: int = option(
        1, "Machines that share one model; --tp-size x --pp-size counts the devices of all of them."
    )
    node_rank: int = option(
        0, "Index of this machine, from 0 on. Node 0 serves HTTP; the others compute for it."
    )
    dist_init_addr: str | None = option(
        None,
        "HOST:PORT of node 0, on a network that only the nodes reach; the same on each of them.",
        metavar="HOST:PORT",
    )
    dist_key: str | None = option(
        None,
        "Key that the nodes share, at least 16 characters; needed if the address is not private. "
        "Rather set HEADRACE_DIST_KEY, or HEADRACE_DIST_KEY_FILE (see --api-key).",
    )

    @property
    def num_ranks(self) -> int:
        """Number of processes that compute one replica of the model, on all nodes."""
        return self.tp_size * self.pp_size


@dataclass(frozen=True, kw_only=True)
class NodeLink:
    """The addresses with which a node of a worker reaches the other nodes.

    Attributes:
        num_nodes: number of nodes of the worker.
        leader: IP address of node 0, without the port.
        port: port where node 0 listens.
        host: IP address of this node, for the other nodes.
        key: encrypts and authenticates the messages between nodes; empty for neither.
        session: random number of a start of all ranks. Messages with another number are ignored.
        store_port: port on node 0 where the ranks meet at their start.
        store_fd: file descriptor of this port's socket in the process of rank 0; -1 elsewhere.
    """

    num_nodes: int
    leader: str
    port: int
    host: str
    key: str = ""
    session: int = 0
    store_port: int = 0
    store_fd: int = -1
