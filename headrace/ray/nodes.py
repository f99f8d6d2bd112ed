"""The nodes of a replica whose model is split among several machines.

Node 0 is the replica's own actor. Each other node is an actor in another bundle of the replica's
placement group.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_current_placement_group, get_node_ip_address
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace.ray.engine_options import read_options
from runtime.config.parallel_options import ParallelArgs
from runtime.errors import StartupError
from runtime.ipc.logging import configure_logging
from runtime.ipc.transport import remove_run_folder
from runtime.launch.assemble import assemble_node
from runtime.launch.prepare import prepare_engine

logger = logging.getLogger(__name__)

_PAUSE_S = 2.0


class Node:
    """A Ray actor that runs the ranks of one node above 0; they end with the actor."""

    def run(self, keywords: Mapping[str, Any]) -> str:
        """Run ranks whenever node 0 asks for them; return only if this node cannot run them.

        Args:
            keywords: the options of this node; see `read_options`.

        Returns:
            Why this node cannot start, why node 0 refuses it, or how it failed.
        """
        try:
            config = read_options(keywords)
            node_rank = config.parallel.node_rank
            configure_logging(
                config.logging.log_level, f"node {node_rank}", config.logging.log_format
            )
            prepared = prepare_engine(config)
            try:
                assemble_node(prepared).run()
            finally:
                remove_run_folder(prepared.folders.run)
        except StartupError as error:
            return error.message
        except Exception as error:
            logger.exception("The node failed")
            return f"{type(error).__name__}: {error}"
        return "The node was stopped."


class OtherNodes:
    """Starts the actors of the other nodes, and starts each again when it ends.

    Attributes:
        keywords: the options of node 0, which is the actor that owns this object.
    """

    def __init__(self, keywords: Mapping[str, Any], parallel: ParallelArgs) -> None:
        """Choose the address of node 0 and the key of the nodes.

        Args:
            keywords: the options that the user gave.
            parallel: the options about nodes.

        Raises:
            StartupError: the actor's placement group does not have a bundle for each node.
        """
        self._num_nodes = parallel.nnodes
        self.keywords = dict(keywords)
        self._tasks: list[asyncio.Task[None]] = []
        self._actors: dict[int, Any] = {}
        self._group: Any = None
        if self._num_nodes == 1:
            return
        self._group = get_current_placement_group()
        num_bundles = 0 if self._group is None else self._group.bundle_count
        if num_bundles != self._num_nodes:
            raise StartupError(
                f"--nnodes {self._num_nodes} needs a placement group with a bundle for each node, "
                f"as build_app makes it; there are {num_bundles} bundles."
            )
        host = get_node_ip_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as probe:
            port = probe.getsockname()[1]
        self.keywords["dist_init_addr"] = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.keywords["dist_key"] = parallel.dist_key or secrets.token_hex(32)

    def start(self, failed: Callable[[str], None], has_started: Callable[[], bool]) -> None:
        """Start the actors, without waiting for them.

        Args:
            failed: called with one line if a node cannot take part before the engine has started.
            has_started: whether the engine has started.
        """
        for rank in range(1, self._num_nodes):
            self._tasks.append(asyncio.create_task(self._keep(rank, failed, has_started)))

    async def stop(self) -> None:
        """End all actors and their ranks."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for actor in self._actors.values():
            ray.kill(actor)

    async def _keep(
        self, rank: int, failed: Callable[[str], None], has_started: Callable[[], bool]
    ) -> None:
        resources = dict(self._group.bundle_specs[rank])
        node = ray.remote(Node).options(
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            resources=resources,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=rank
            ),
        )
        keywords = {**self.keywords, "node_rank": rank}
        while True:
            # If the bundle's machine is lost, Ray moves the bundle to another one, and the actor
            # starts there.
            actor = self._actors[rank] = node.remote()
            is_lost = False
            try:
                why = await actor.run.remote(keywords)
            except RayError as error:
                is_lost, why = True, " ".join(str(error).split())
            # An actor that Ray cannot reach may still run, and hold the bundle.
            ray.kill(actor)
            if not is_lost and not has_started():
                failed(f"Node {rank} of the replica: {why}")
                return
            # After a start, node 0 may refuse a node because it has not yet noticed the end of the
            # node's predecessor.
            logger.error("Node %d of the replica ended and is started again: %s", rank, why)
            await asyncio.sleep(_PAUSE_S)
