"""Messages between the nodes of one worker: between rank 0 on node 0, and the other nodes."""

from __future__ import annotations

import msgspec

from runtime.ipc.weight_messages import RankReply


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    pass


class NodeTraits(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The facts that must be equal on all nodes.

    Attributes:
        version: version of Headrace.
        model: digest of the model's `config.json`, and of the names and sizes of its weight files.
    """

    version: str
    num_nodes: int
    tp_size: int
    model: str
    pp_size: int = 1


# ---- to rank 0 ----


class NodeHello(_Message, frozen=True):
    """Tells rank 0 that a node is running and has no ranks; repeated until rank 0 answers.

    Attributes:
        node_rank: index of the node.
        address: where the node receives messages.
        incarnation: random number of the node's process.
        traits: the facts that must be equal on all nodes.
    """

    node_rank: int
    address: str
    incarnation: int
    traits: NodeTraits


class NodeBeat(_Message, frozen=True):
    """Tells rank 0 regularly that a node is alive.

    Attributes:
        node_rank: index of the node.
        session: number of the start of the ranks, which tells messages of earlier starts apart.
    """

    node_rank: int
    session: int


class RankAddress(_Message, frozen=True):
    """Tells rank 0 that a rank has started, and receives the plans of steps at `address`."""

    rank: int
    address: str
    session: int


class RankEnded(_Message, frozen=True):
    """Tells rank 0 that the process of a rank has ended; `why` is one line that names the rank."""

    rank: int
    why: str
    session: int


LeaderInbound = NodeHello | NodeBeat | RankAddress | RankEnded | RankReply


# ---- to a node ----


class StartRanks(_Message, frozen=True):
    """Tells a node to start its ranks; `config` is rank 0's encoded `WorkerConfig`."""

    config: bytes


class NodeRefused(_Message, frozen=True):
    """Tells a node that rank 0 refuses it, and that it must end; `why` is one line."""

    why: str


class LeaderBeat(_Message, frozen=True):
    """Tells a node regularly that rank 0 is alive; `session` identifies the start of the ranks."""

    session: int


NodeInbound = StartRanks | NodeRefused | LeaderBeat
