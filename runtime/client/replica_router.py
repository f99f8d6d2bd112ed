"""Chooses the replica for a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runtime.client.prefix_index import prefix_hashes
from runtime.client.replica_link import ReplicaLink
from runtime.requests.image_input import ImageInput

# Cost of one more request in flight, in prompt tokens. A decode step must read all weights once; in
# that time a GPU could compute about this many prompt tokens.
TOKENS_PER_REQUEST = 128
# A replica is not chosen for its cached prefix if it has this many more requests in flight than the
# least loaded one, or more by half the rows of its running batch. So no request is queued for its
# prefix while another replica is idle.
MAX_SURPLUS = 32


class Router:
    """Chooses a replica for each request, among those that take requests.

    The methods are:

    - `cache_aware`: the replica with the lowest cost. The cost is the number of prompt tokens that
      the replica would have to compute, plus `TOKENS_PER_REQUEST` for each of its requests in
      flight. So a longer cached prefix lowers the cost, and a higher load raises it. Replicas with
      too many more requests than the least loaded one (`MAX_SURPLUS`) are excluded. Cached prefixes
      are estimated from the prompts that were sent (`PrefixIndex`). Source: the cost is that of
      NVIDIA Dynamo's KV router (prefill blocks plus active blocks), the bound on imbalance that of
      SGLang's router (`balance_abs_threshold`).
    - `total_requests`: the replica with the fewest requests in flight.
    - `total_tokens`: the replica with the fewest prompt tokens in flight.
    - `round_robin`: one replica after the other.

    Replicas of equal cost take turns. A replica whose queue is full is skipped if another one has
    room.
    """

    def __init__(self, links: Sequence[ReplicaLink], method: str = "cache_aware") -> None:
        """Prepare to choose among `links`.

        Args:
            links: all replicas.
            method: one of the methods that the class describes.

        Raises:
            KeyError: `method` is unknown.
        """
        self._links = links
        self._turn = 0
        self._is_cache_aware = method == "cache_aware"
        costs: dict[str, Callable[[ReplicaLink], int]] = {
            "cache_aware": lambda link: link.num_in_flight,
            "total_requests": lambda link: link.num_in_flight,
            "total_tokens": lambda link: link.num_prompt_tokens,
            "round_robin": lambda _: 0,
        }
        self._cost = costs[method]

    @property
    def has_ready(self) -> bool:
        """Whether any replica takes requests."""
        return any(link.ready for link in self._links)

    def choose(
        self,
        input_ids: bytes,
        namespace: str,
        rank: int | None = None,
        images: Sequence[ImageInput] = (),
    ) -> ReplicaLink:
        """Return the replica for a request, and note that the replica will cache its prompt.

        Args:
            input_ids: the prompt's ids, int32 bytes.
            namespace: namespace of the prefix cache.
            rank: number of the replica that the caller chose; `None` for any.
            images: images of the prompt.
        """
        if len(self._links) == 1:
            return self._links[0]
        hashes = prefix_hashes(input_ids, namespace, images) if self._is_cache_aware else []
        if rank is not None:
            link = self._links[rank]
        else:
            # No replica is ready while the only one is being replaced.
            ready = [each for each in self._links if each.ready] or list(self._links)
            link = self._best([each for each in ready if each.has_room] or ready, hashes)
        link.prefixes.add(hashes)
        return link

    def _best(self, links: list[ReplicaLink], hashes: list[int]) -> ReplicaLink:
        self._turn += 1
        turn = self._turn % len(links)
        candidates = links[turn:] + links[:turn]
        if not hashes:
            return min(candidates, key=self._cost)
        least = min(link.num_in_flight for link in links)
        return min(
            (
                link
                for link in candidates
                if link.num_in_flight <= least + min(MAX_SURPLUS, link.num_rows // 2)
            ),
            key=lambda link: (
                TOKENS_PER_REQUEST * link.num_in_flight - link.prefixes.matched_tokens(hashes)
            ),
        )


def wanted_rank(*ranks: int | None) -> int | None:
    """Return the first replica number that is given; `None` if all are `None` or -1 (any)."""
    return next((rank for rank in ranks if rank is not None and rank != -1), None)
