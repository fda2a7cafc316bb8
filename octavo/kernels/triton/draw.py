"""Parts of the sampling kernels: the order of tokens, random numbers, and the search for what truncation keeps.

The order of tokens is (logit descending, id ascending), as in ``octavo.sampling.truncation``. What min_p, top_k and top_p
keep is a prefix of it, so it is found as a threshold in value plus how many of the tokens that tie there are kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64, as octavo.sampling.random
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
DRAWS_PER_POSITION = 16
LOWEST = -2139095041  # order_bits(-inf)
MANY = 1 << 30

_GOLDEN = tl.constexpr(GOLDEN)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)
_DRAWS = tl.constexpr(DRAWS_PER_POSITION)
_LOWEST = tl.constexpr(LOWEST)
_MANY = tl.constexpr(MANY)


@triton.jit
def order_bits(value):
    """float32 without NaN -> int32 that compare alike; both zeros give one number."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_order_bits(bits):
    """The float32 of ``order_bits``."""
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def mix64(value):
    """SplitMix64's finalizer on uint64."""
    value = (value ^ (value >> 30)) * _MIX_1
    value = (value ^ (value >> 27)) * _MIX_2
    return value ^ (value >> 31)


@triton.jit
def stream_state(key, position):
    """The generator state of a row's draw at a position: its random number 0 there, all 64 bits. int64 -> uint64."""
    counter = (position * _DRAWS + 1).to(tl.uint64)
    return mix64(key.to(tl.uint64) + counter * _GOLDEN)


@triton.jit
def gumbel(state, token):
    """Gumbel(0, 1) noise of tokens (int32, any shape): a function of (state, token id) alone.

    -log of an exponential variate -log(1 - u), u a multiple of 2**-32 plus a half. Small exponentials decide, so u near 0
    must keep its precision: there the series of -log(1 - u) stands in for the logarithm of a number close to 1.
    """
    bits = mix64(state + (token.to(tl.uint64) + 1) * _GOLDEN) >> 32
    u = tl.minimum((bits.to(tl.uint32).to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = u * (1.0 + u * (0.5 + u * (0.33333333 + u * (0.25 + u * 0.2))))
    return -tl.log(tl.where(u < 0.0625, series, -tl.log(1.0 - u)))


@triton.jit
def weight_of(value, top, temperature):
    """exp((value - top) / temperature) in float32; top is the row's largest, so the largest weight is 1."""
    return tl.exp((value - top) / temperature)


@triton.jit
def kth_largest(bits, k, top_bits):
    """The k-th largest of a tile of order_bits (int32 [N], N >= k entries above LOWEST or equal): three pivots a round."""
    low = tl.full([], _LOWEST, tl.int64)  # count(>= low) >= k
    high = top_bits.to(tl.int64) + 1  # count(>= high) < k
    while high - low > 1:
        quarter = tl.maximum((high - low) // 4, 1)
        p1 = low + quarter
        p2 = tl.minimum(p1 + quarter, high)
        p3 = tl.minimum(p2 + quarter, high)
        c1 = tl.sum((bits >= p1.to(tl.int32)).to(tl.int32), axis=0)
        c2 = tl.sum((bits >= p2.to(tl.int32)).to(tl.int32), axis=0)
        c3 = tl.sum((bits >= p3.to(tl.int32)).to(tl.int32), axis=0)
        new_low = tl.where(c3 >= k, p3, tl.where(c2 >= k, p2, tl.where(c1 >= k, p1, low)))
        high = tl.where(c3 >= k, high, tl.where(c2 >= k, p3, tl.where(c1 >= k, p2, p1)))
        low = new_low
    return low.to(tl.int32)


@triton.jit
def _tally(values_ptr, count, p1, p2, p3, top, temperature, min_p, BLOCK: tl.constexpr):
    """Of values[:count] with weight >= min_p: how many are >= each pivot (order_bits, int64), and their weight (float64)."""
    c1 = tl.zeros([BLOCK], tl.int32)
    c2 = tl.zeros([BLOCK], tl.int32)
    c3 = tl.zeros([BLOCK], tl.int32)
    m1 = tl.zeros([BLOCK], tl.float64)
    m2 = tl.zeros([BLOCK], tl.float64)
    m3 = tl.zeros([BLOCK], tl.float64)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(values_ptr + place, mask=place < count, other=float("-inf"))
        weight = weight_of(value, top, temperature).to(tl.float64)
        bits = order_bits(value)
        inside = (place < count) & (weight >= min_p)
        above1 = inside & (bits >= p1.to(tl.int32))
        above2 = inside & (bits >= p2.to(tl.int32))
        above3 = inside & (bits >= p3.to(tl.int32))
        c1 += above1.to(tl.int32)
        c2 += above2.to(tl.int32)
        c3 += above3.to(tl.int32)
        m1 += tl.where(above1, weight, 0.0)
        m2 += tl.where(above2, weight, 0.0)
        m3 += tl.where(above3, weight, 0.0)
    return tl.sum(c1, axis=0), tl.sum(c2, axis=0), tl.sum(c3, axis=0), tl.sum(m1, axis=0), tl.sum(m2, axis=0), tl.sum(m3, axis=0)


@triton.jit
def search(
    values_ptr, count, low, low_count, low_mass, high, k, target, top, temperature, min_p,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The threshold where the prefix of values[:count] reaches k tokens, or the mass ``target`` if BY_MASS.

    What is >= ``low`` reaches it (low_count tokens weighing low_mass), what is >= ``high`` does not; both int64.
    k: -1 if BY_MASS. Returns (threshold, count above it, mass above it): all above it are kept, and as many of those equal to
    it as it takes.
    """
    high_count = tl.full([], 0, tl.int32)
    high_mass = tl.full([], 0.0, tl.float64)
    # with one token between them, or with exactly k above ``low``, there is nothing left to find
    while (high - low > 1) & (low_count - high_count > 1) & (low_count != k):
        quarter = tl.maximum((high - low) // 4, 1)
        p1 = low + quarter
        p2 = tl.minimum(p1 + quarter, high)
        p3 = tl.minimum(p2 + quarter, high)
        c1, c2, c3, m1, m2, m3 = _tally(values_ptr, count, p1, p2, p3, top, temperature, min_p, BLOCK)
        if BY_MASS:
            r1 = m1 >= target
            r2 = m2 >= target
            r3 = m3 >= target
        else:
            r1 = c1 >= k
            r2 = c2 >= k
            r3 = c3 >= k
        r3 = r3 & (p3 < high)  # a pivot on ``high`` does not reach it, whatever rounding says
        r2 = r2 & (p2 < high)
        new_high = tl.where(r3, high, tl.where(r2, p3, tl.where(r1, p2, p1)))
        high_count = tl.where(r3, high_count, tl.where(r2, c3, tl.where(r1, c2, c1)))
        high_mass = tl.where(r3, high_mass, tl.where(r2, m3, tl.where(r1, m2, m1)))
        low_count = tl.where(r3, c3, tl.where(r2, c2, tl.where(r1, c1, low_count)))
        low_mass = tl.where(r3, m3, tl.where(r2, m2, tl.where(r1, m1, low_mass)))
        low = tl.where(r3, p3, tl.where(r2, p2, tl.where(r1, p1, low)))
        high = new_high
    found = high - low <= 1
    return tl.where(found, low, low - 1), tl.where(found, high_count, low_count), tl.where(found, high_mass, low_mass)


@triton.jit
def totals(values_ptr, count, top, temperature, min_p, BLOCK: tl.constexpr):
    """How many of values[:count] have weight >= min_p, and what they weigh: int32, float64."""
    number = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float64)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(values_ptr + place, mask=place < count, other=float("-inf"))
        weight = weight_of(value, top, temperature).to(tl.float64)
        inside = (place < count) & (weight >= min_p)
        number += inside.to(tl.int32)
        mass += tl.where(inside, weight, 0.0)
    return tl.sum(number, axis=0), tl.sum(mass, axis=0)
