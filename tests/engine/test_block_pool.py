from __future__ import annotations

import random

import pytest

from octavo.engine.block_pool import BlockPool


def test_fresh_blocks_come_in_order_and_released_ones_last_first() -> None:
    pool = BlockPool(4)
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, 3]
    assert pool.num_free == 0
    pool.begin_step(1)
    for block in (2, 0):
        pool.unref(block, 0, keep=True)
    pool.unref(3, 0, keep=False)
    assert pool.free_list() == [3, 2, 0], "worthless first, then least recently used"


def test_a_referenced_block_leaves_the_middle_of_the_free_list() -> None:
    pool = BlockPool(5)
    pool.ref(2)
    assert pool.free_list() == [0, 1, 3, 4] and not pool.is_free(2)
    pool.ref(2)
    pool.begin_step(1)
    pool.unref(2, 0, keep=True)
    assert not pool.is_free(2)
    pool.unref(2, 0, keep=True)
    assert pool.free_list() == [0, 1, 3, 4, 2]


def test_a_block_is_reused_only_after_the_last_step_that_touches_it() -> None:
    pool = BlockPool(1)
    pool.begin_step(3)
    block = pool.allocate()
    pool.ref(block)
    pool.unref(block, 5, keep=False)  # one owner: step 5 still reads it
    pool.unref(block, 2, keep=False)  # the last owner was done earlier
    assert (pool.num_free, pool.num_freeing) == (0, 1)
    pool.begin_step(5)
    assert pool.num_free == 0
    pool.begin_step(6)
    assert (pool.num_free, pool.num_freeing) == (1, 0)


def test_a_freeing_block_can_be_taken_back() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.unref(block, 0, keep=True)
    pool.ref(block)  # a prefix hit while it is freeing
    pool.begin_step(1)
    assert pool.free_list() == [1] and pool.refs[block] == 1
    pool.unref(block, 1, keep=True)
    pool.begin_step(2)
    assert sorted(pool.free_list()) == [0, 1]


def test_misuse_is_found_out() -> None:
    pool = BlockPool(1)
    pool.allocate()
    with pytest.raises(RuntimeError, match="no free block"):
        pool.allocate()
    pool.unref(0, -1, keep=False)
    with pytest.raises(RuntimeError, match="more often"):
        pool.unref(0, -1, keep=False)


@pytest.mark.parametrize("seed", range(20))
def test_against_a_list(seed: int) -> None:
    """The linked list against a plain one, over random operations."""
    rng = random.Random(seed)
    size = rng.randint(1, 12)
    pool, free, refs, freeing = BlockPool(size), list(range(size)), [0] * size, []
    touched = [-1] * size
    step = 0

    def set_free(block: int, keep: bool) -> None:
        if touched[block] >= step:
            freeing.append((block, keep))
        else:
            free.insert(len(free) if keep else 0, block)

    for _ in range(500):
        what = rng.random()
        used = [b for b in range(size) if refs[b]]
        if what < 0.3 and free:
            block = free.pop(0)
            refs[block] = 1
            assert pool.allocate() == block
        elif what < 0.5:
            block = rng.randrange(size)
            if block in free:
                free.remove(block)
            freeing[:] = [(b, k) for b, k in freeing if b != block]
            refs[block] += 1
            pool.ref(block)
        elif what < 0.9 and used:
            block, keep, last = rng.choice(used), rng.random() < 0.5, rng.randint(step - 2, step)
            refs[block] -= 1
            touched[block] = max(touched[block], last)
            pool.unref(block, last, keep)
            if refs[block] == 0:
                set_free(block, keep)
        else:
            step += 1
            pool.begin_step(step)
            ready, freeing[:] = list(freeing), []
            for block, keep in ready:
                set_free(block, keep)
        assert pool.num_free == len(free) and pool.num_freeing == len(freeing)
        assert pool.refs == refs
        assert pool.free_list() == free
