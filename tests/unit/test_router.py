"""Which replica a request goes to: by prefix, by load, in turn."""

from __future__ import annotations

import array
import random

import pytest

from runtime.client.prefix_index import PrefixIndex, prefix_hashes
from runtime.client.replica_link import ReplicaLink
from runtime.client.replica_router import MAX_SURPLUS, TOKENS_PER_REQUEST, Router, wanted_rank
from runtime.requests.image_input import ImageInput, PreparedImage


def prompt(num_tokens: int, seed: int = 0) -> bytes:
    draw = random.Random(seed)
    return array.array("i", [draw.randrange(1000) for _ in range(num_tokens)]).tobytes()


def links(count: int = 2) -> list[ReplicaLink]:
    made = [ReplicaLink(rank) for rank in range(count)]
    for link in made:
        link.ready = True
        link.num_rows = 2 * MAX_SURPLUS
    return made


def test_hashes_stand_for_whole_prefixes() -> None:
    text = prompt(700)
    whole = prefix_hashes(text, "")
    # 32 blocks of 16 tokens, then one of 128; the last token never counts.
    assert len(whole) == 33
    assert prefix_hashes(text[: 4 * 512], "") == whole[:31]
    assert prefix_hashes(text[: 4 * 513], "") == whole[:32]
    assert not set(prefix_hashes(text, "tenant")) & set(whole)
    # A first block that differs leaves nothing in common, whatever follows.
    assert not set(prefix_hashes(prompt(16, 1) + text[4 * 16 :], "")) & set(whole)
    assert prefix_hashes(prompt(1), "") == prefix_hashes(b"", "") == []


def test_the_index_is_bounded_and_forgets_ends_first() -> None:
    index = PrefixIndex(max_tokens=512)
    old, new = prefix_hashes(prompt(401), ""), prefix_hashes(prompt(401, 1), "")
    index.add(old)
    assert index.matched_tokens(old) == 400
    index.add(new)
    assert index.matched_tokens(new) == 400
    # Of the older prompt the start is left, which its continuations share.
    assert index.matched_tokens(old) == 112
    assert len(index) == 512 // 16
    for seed in range(2, 50):
        index.add(prefix_hashes(prompt(300, seed), ""))
    assert len(index) <= 512 // 16
    index.clear()
    assert index.matched_tokens(new) == 0


def test_a_conversation_stays_where_its_prefix_is() -> None:
    router = Router(links())
    text = prompt(900)
    home = router.choose(text[: 4 * 300], "")
    for turn in range(2, 9):
        router.choose(prompt(200, turn), "")
        assert router.choose(text[: 4 * 100 * turn], "") is home
    # The same words in another name space share no cache.
    assert {router.choose(text, f"tenant {each}").rank for each in range(4)} == {0, 1}


def test_a_question_goes_where_its_own_picture_is() -> None:
    """Placeholders are alike whatever the picture; its digest is not."""
    router, text = Router(links()), prompt(900)
    mine, other = (
        [ImageInput(3, PreparedImage(bytes([number]) * 16, (3, 1, 1), 800, b""))]
        for number in (1, 2)
    )
    home = router.choose(text, "", images=mine)
    assert router.choose(text, "", images=other) is not home
    for _ in range(3):
        assert router.choose(text, "", images=mine) is home


def test_hashes_know_pictures_by_their_digests() -> None:
    text = prompt(100)
    first, second = (
        prefix_hashes(text, "", [ImageInput(20, PreparedImage(name * 16, (3, 1, 1), 2, b""))])
        for name in (b"a", b"b")
    )
    # The text ahead is shared, nothing behind. A picture of two tokens covers no other.
    assert first[0] == second[0] == prefix_hashes(text, "")[0]
    assert not set(first[1:]) & set(second[1:])
    assert first == prefix_hashes(text[: 4 * 20] + b"a" * 8 + text[4 * 22 :], "")


def test_equal_replicas_take_turns() -> None:
    router = Router(links(3))
    ranks = [router.choose(prompt(100, seed), "").rank for seed in range(9)]
    assert sorted(ranks) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_load_outweighs_a_prefix_by_its_length() -> None:
    both = links()
    router = Router(both)
    short, long = prompt(TOKENS_PER_REQUEST + 1), prompt(100_000, 1)
    home = router.choose(short, "")
    assert router.choose(long, "", rank=home.rank) is home
    # One request more weighs as much as this prefix, two weigh more.
    home.num_in_flight = 2
    assert router.choose(short, "") is not home
    home.num_in_flight = MAX_SURPLUS
    assert router.choose(long, "") is home
    home.num_in_flight = MAX_SURPLUS + 1
    assert router.choose(long, "") is not home


def test_samples_of_one_prompt_share_a_replica_until_it_is_busy() -> None:
    router = Router(links())
    ranks = []
    for _ in range(20):
        link = router.choose(prompt(10 * TOKENS_PER_REQUEST), "")
        link.num_in_flight += 1
        ranks.append(link.rank)
    assert len(set(ranks[:9])) == 1
    # Once both hold the prompt they share the rest.
    assert abs(ranks.count(0) - ranks.count(1)) <= 2


def test_what_a_replica_lost_draws_nothing() -> None:
    both = links()
    router = Router(both)
    text = prompt(300)
    home = router.choose(text, "")
    other = both[1 - home.rank]
    home.ready = False
    assert router.choose(text, "") is other
    other.prefixes.clear()
    home.ready = True
    assert router.choose(text, "") is home
    # A restarted scheduler begins with an empty cache.
    home.connect(lambda _: None)
    assert home.prefixes.matched_tokens(prefix_hashes(text, "")) == 0


def test_no_prefix_draws_a_request_into_a_queue_beside_an_idle_replica() -> None:
    both = links()
    router = Router(both)
    text = prompt(100_000)
    home = router.choose(text, "")
    for link in both:
        link.num_rows = 8
    home.num_in_flight = 4
    assert router.choose(text, "") is home
    home.num_in_flight = 5
    assert router.choose(text, "") is not home


@pytest.mark.parametrize("method", ["cache_aware", "total_requests", "total_tokens", "round_robin"])
def test_a_full_queue_is_passed_over(method: str) -> None:
    both = links()
    for link in both:
        link.num_rows, link.max_queued = 1, 1
    both[0].num_in_flight = 2
    both[1].num_in_flight, both[1].num_prompt_tokens = 1, 10**6
    router = Router(both, method)
    assert {router.choose(prompt(50), "").rank for _ in range(4)} == {1}
    # Full everywhere: somebody has to say so.
    both[1].num_in_flight = 2
    assert router.choose(prompt(50), "") in both


@pytest.mark.parametrize(
    ("method", "chosen"), [("total_requests", 1), ("total_tokens", 0), ("round_robin", None)]
)
def test_other_methods_see_only_their_own_load(method: str, chosen: int | None) -> None:
    both = links()
    both[0].num_in_flight, both[0].num_prompt_tokens = 2, 100
    both[1].num_in_flight, both[1].num_prompt_tokens = 1, 9000
    router = Router(both, method)
    ranks = [router.choose(prompt(300), "").rank for _ in range(4)]
    assert ranks == ([chosen] * 4 if chosen is not None else [1, 0, 1, 0])


def test_a_rank_may_be_named_in_either_field() -> None:
    assert wanted_rank(None, None) is wanted_rank(-1, None) is None
    assert wanted_rank(None, 2) == wanted_rank(-1, 2) == 2
    assert wanted_rank(0, 2) == 0
