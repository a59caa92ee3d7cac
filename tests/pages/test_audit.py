# SPDX-License-Identifier: Apache-2.0
"""The count of who owns each page finds what is wrong with the books."""

import pytest

from entropykv_vllm.pages.audit import AuditError, audit

from .model import Engine
from .test_manager_model import TIERS, read_and_leave, run_to, tokens


@pytest.fixture
def engine() -> Engine:
    engine = Engine(TIERS["odd ratios"], 200)
    engine.add("a", tokens(0, 150))
    run_to(engine, 150, 64)
    return engine


def held(engine: Engine):
    return next(block for block in engine.tiers[0].req_to_blocks["a"] if not block.is_null)


def test_sound_books_pass(engine):
    engine.add("b", tokens(0, 170))  # shares pages with the first
    run_to(engine, 170, 64)
    audit(engine.pool, engine.tiers)


def leave_out(engine: Engine, page) -> None:
    table = engine.tiers[0].req_to_blocks["a"]
    table[table.index(page)] = engine.pool.null_block


@pytest.mark.parametrize("fault", ["held and free", "belong to nobody", "more or less often"])
def test_a_fault_is_told_with_its_pages(engine, fault):
    page = held(engine)
    if fault == "held and free":
        engine.pool.free_blocks([page])
    elif fault == "belong to nobody":
        leave_out(engine, page)
    else:
        page.ref_cnt += 1
    with pytest.raises(AuditError, match=fault) as caught:
        audit(engine.pool, engine.tiers)
    assert str(page.block_id) in str(caught.value)


def test_a_page_that_is_freed_twice_is_told(engine):
    page = held(engine)
    leave_out(engine, page)
    engine.pool.free_blocks([page])
    audit(engine.pool, engine.tiers)
    engine.pool.free_blocks([page])
    with pytest.raises(AuditError, match=f"less often than counted: {page.block_id}$"):
        audit(engine.pool, engine.tiers)


def test_pages_on_their_way_back_are_held(engine):
    blocks = engine.manager.pop_blocks_for_free(engine.requests["a"])
    audit(engine.pool, engine.tiers, blocks)
    with pytest.raises(AuditError, match="belong to nobody"):
        audit(engine.pool, engine.tiers)
    engine.pool.free_blocks(blocks)
    audit(engine.pool, engine.tiers)


def test_pages_that_only_the_prefix_cache_knows_are_free():
    engine = Engine(TIERS["one tier"], 300)
    read_and_leave(engine)
    audit(engine.pool, engine.tiers)
