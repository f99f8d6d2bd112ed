"""Chooses the replica for a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runtime.client.prefix_index import prefix_hashes
from runtime.client.replica_link import ReplicaLink
from runtime.requests.image_input import ImageInput

# Cost of one more request in flight, in prompt tokens. A GPU computes about as many tokens in the
# time in which it reads the weights once for a decode step.
TOKENS_PER_REQUEST = 128
# A cached prefix of any length outweighs at most this many requests in flight, and at most half the
# rows of the running batch. So it never sends a request to a queue while another replica is idle.
MAX_SURPLUS = 32


class Router:
    """Chooses among the replicas that take requests; equals take turns.

    - `cache_aware`: the cost of a replica is the prompt tokens that it would have to compute plus
      `TOKENS_PER_REQUEST` for each request in flight there; the lowest cost wins. So a longer
      cached prefix attracts a request and a higher load repels it. Replicas with too many more
      requests than the least loaded one (`MAX_SURPLUS`) are excluded. Cached prefixes are estimated
      from the prompts that were sent (`PrefixIndex`). Source: the cost is that of NVIDIA Dynamo's
      KV router (prefill blocks plus active blocks), the bound on imbalance that of SGLang's router
      (`balance_abs_threshold`).
    - `total_requests`: the fewest requests in flight.
    - `total_tokens`: the fewest prompt tokens in flight.
    - `round_robin`: one after the other.

    A replica whose queue is full is skipped while another one has room.
    """

    def __init__(self, links: Sequence[ReplicaLink], method: str = "cache_aware") -> None:
        """Choose among `links` by `method`, a name that the class describes.

        Raises:
            KeyError: no such method.
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
        """Return `rank`, or the best replica that is ready; at least one must be ready.

        Args:
            input_ids: the prompt's ids, int32 bytes.
            namespace: namespace of the prefix cache.
            rank: the replica that the caller chose; `None` for any.
            images: images of the prompt.
        """
        if len(self._links) == 1:
            return self._links[0]
        hashes = prefix_hashes(input_ids, namespace, images) if self._is_cache_aware else []
        if rank is not None:
            link = self._links[rank]
        else:
            # None is ready while the only one is replaced.
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
    """Return the replica that a request names in one of several fields; -1 names none."""
    return next((rank for rank in ranks if rank is not None and rank != -1), None)
