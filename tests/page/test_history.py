# SPDX-License-Identifier: Apache-2.0
"""The last minutes of a server, as the page draws them."""

from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats

from entropykv_vllm.page.history import SECONDS, History
from entropykv_vllm.pages.manager import TierCounts


def counts(**numbers) -> dict[str, dict[str, int]]:
    return {"all": vars(TierCounts(**numbers))}


def stats(running=1, waiting=0, usage=0.5, queries=0, hits=0) -> SchedulerStats:
    found = PrefixCacheStats(queries=queries, hits=hits)
    return SchedulerStats(running, waiting, 2, kv_cache_usage=usage, prefix_cache_stats=found)


def test_a_second_has_its_last_pages_and_all_that_was_done_in_it():
    history = History(clock=lambda: 7.5)
    history.add(0, stats(queries=10, hits=4), counts(hot=3, cold=1, freed=5), preempted=1)
    history.add(0, stats(waiting=1, queries=5), counts(hot=2, cold=4, holes=6, freed=2), 2)
    (sample,) = history.samples
    assert sample.tiers["all"] == {
        "hot": 2,
        "cold": 4,
        "holes": 6,
        "freed": 7,
        "tokens_evicted": 0,
    }
    assert (sample.second, sample.queries, sample.hits, sample.preempted) == (7, 15, 4, 3)
    assert (sample.running, sample.waiting) == (1, 3), "those that wait for something count too"


def test_engines_are_added_up_and_share_the_pool():
    history = History(clock=lambda: 1.0)
    history.add(0, stats(usage=0.2), counts(hot=3), 0)
    history.add(1, stats(usage=0.4), counts(hot=4), 0)
    history.add(1, stats(usage=0.6), {}, 0)
    (sample,) = history.samples
    assert sample.tiers["all"]["hot"] == 7
    assert (sample.usage, sample.running) == (0.4, 2)


def test_it_forgets_and_never_goes_back():
    now = iter([*range(SECONDS + 50), 3])
    history = History(clock=lambda: next(now))
    for _ in range(SECONDS + 51):
        history.add(0, stats(), counts(), 0)
    seconds = [sample.second for sample in history.samples]
    assert seconds == list(range(50, SECONDS + 50)), "a clock that was set back adds to the last"
