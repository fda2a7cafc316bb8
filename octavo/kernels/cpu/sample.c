/* Tokens from rows of logits: argmax, and the inverse CDF after min_p (arXiv:2407.01082), top_k and top_p (arXiv:1904.09751).
 *
 * Tokens are ordered by (logit descending, id ascending); what the three options keep is a prefix of that order. Only the
 * candidates near the largest logit are sorted; if they don't decide where the prefix ends, more are taken. Sums run over
 * the same numbers in the same order whichever candidates were looked at, so a row's token is a function of the row alone.
 */
#include "parallel.h"
#include "vec.h"
#include <stdatomic.h>
#include <stdlib.h>

#define BLOCK 64 /* weights summed in float32; longer sums are made in double */

typedef struct {
    const float *logits;
    int64_t vocab, stride;
    const float *temperature;
    const int64_t *top_k;
    const double *top_p, *min_p, *uniform;
    int64_t *tokens;
    _Atomic int failed; /* no memory */
} sample_args;

/* Integers that ascend as (logit descends, id ascends). */
INLINE uint64_t key_of(float logit, int64_t id) {
    uint32_t bits;
    logit += 0.0f; /* one zero of two */
    memcpy(&bits, &logit, 4);
    const uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (uint64_t)~ascending << 32 | (uint64_t)id;
}

INLINE int64_t id_of(uint64_t key) { return (int64_t)(key & 0xffffffffu); }

/* Sorts keys that come in id order, by their upper halves (a stable radix sort in three passes). Returns where the result
 * lies: in a or b. */
static uint64_t *sort_keys(const uint64_t *keys, int64_t n, uint64_t *a, uint64_t *b) {
    static const int shifts[3] = {32, 43, 54};
    const uint64_t *from = keys;
    uint64_t *to = a;
    for (int pass = 0; pass < 3; pass++) {
        uint32_t starts[2048] = {0}, sum = 0;
        for (int64_t i = 0; i < n; i++) starts[from[i] >> shifts[pass] & 2047]++;
        for (int i = 0; i < 2048; i++) {
            const uint32_t count = starts[i];
            starts[i] = sum;
            sum += count;
        }
        for (int64_t i = 0; i < n; i++) to[starts[from[i] >> shifts[pass] & 2047]++] = from[i];
        from = to;
        to = to == a ? b : a;
    }
    return (uint64_t *)from;
}

/* The largest logit. *usable: it is finite and there is no NaN. */
static float largest(const float *x, int64_t n, int *usable) {
    vf best[4] = {vset(-INFINITY), vset(-INFINITY), vset(-INFINITY), vset(-INFINITY)};
    vi nan = {0};
    int64_t i = 0;
    for (; i + 4 * VL <= n; i += 4 * VL) {
        UNROLL for (int j = 0; j < 4; j++) {
            vf v = vload(x + i + j * VL);
            nan |= v != v;
            best[j] = vmax(v, best[j]);
        }
    }
    float top = vhmax(vmax(vmax(best[0], best[1]), vmax(best[2], best[3])));
    int bad = 0;
    for (int j = 0; j < VL; j++) bad |= nan[j];
    for (; i < n; i++) {
        bad |= x[i] != x[i];
        if (x[i] > top) top = x[i];
    }
    *usable = !bad && top > -INFINITY && top < INFINITY;
    return top;
}

/* The first token whose logit is the best finite one; token 0 if there is none. */
static int64_t best_finite(const float *x, int64_t n) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; i++)
        if (x[i] - x[i] == 0 && (best < 0 || x[i] > x[best])) best = i;
    return best < 0 ? 0 : best;
}

static int64_t first_equal(const float *x, int64_t n, float value) {
    int64_t i = 0;
    while (i + 1 < n && x[i] != value) i++;
    return i;
}

static void argmax_range(void *context, int64_t begin, int64_t end) {
    const sample_args *a = context;
    for (int64_t row = begin; row < end; row++) {
        const float *x = a->logits + row * a->stride;
        int usable;
        const float top = largest(x, a->vocab, &usable);
        a->tokens[row] = usable ? first_equal(x, a->vocab, top) : best_finite(x, a->vocab);
    }
}

/* exp((x - top) * scale / log2 e) of BLOCK logits from i on, zero past n. */
INLINE void block_weights(const float *x, int64_t i, int64_t n, float top, float scale, vf *w) {
    UNROLL for (int j = 0; j < BLOCK / VL; j++) {
        const int64_t at = i + j * VL, left = n - at;
        vf v = left >= VL ? vload(x + at) : left > 0 ? load_tail(F32, x, at, left) : vset(0);
        w[j] = vexp2((v - vset(top)) * vset(scale));
        if (left < VL)
            for (int64_t lane = left > 0 ? left : 0; lane < VL; lane++) w[j][lane] = 0;
    }
}

/* Sums of all weights, a block a number; returns the total. */
static double block_sums(const float *x, int64_t n, float top, float scale, double *sums) {
    double total = 0;
    for (int64_t i = 0; i < n; i += BLOCK) {
        vf w[BLOCK / VL], sum = vset(0);
        block_weights(x, i, n, top, scale, w);
        UNROLL for (int j = 0; j < BLOCK / VL; j++) sum = sum + w[j];
        sums[i / BLOCK] = vsum(sum);
        total += sums[i / BLOCK];
    }
    return total;
}

/* The point u of the way through a total, always short of its end. */
static double aim(double u, double total) {
    const double target = u * total;
    return target < total ? target : nextafter(total, 0);
}

static int64_t draw_from_all(const float *x, int64_t n, float top, float scale, double u, double *sums) {
    const int64_t blocks = (n + BLOCK - 1) / BLOCK;
    const double target = aim(u, block_sums(x, n, top, scale, sums));
    double before = 0;
    int64_t block = 0, chosen = -1;
    while (block + 1 < blocks && !(before + sums[block] > target)) before += sums[block++];
    vf w[BLOCK / VL];
    block_weights(x, block * BLOCK, n, top, scale, w);
    for (int i = 0; i < BLOCK; i++) {
        const float weight = w[i / VL][i % VL];
        if (weight > 0) chosen = block * BLOCK + i; /* if rounding leaves the target beyond the block: its last token */
        before += weight;
        if (weight > 0 && before > target) break;
    }
    return chosen;
}

static int64_t gather(const float *x, int64_t n, float floor, uint64_t *out) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += BLOCK) {
        const int64_t end = i + BLOCK < n ? i + BLOCK : n;
        if (end - i == BLOCK) { /* most blocks hold no candidate */
            vi any = {0};
            UNROLL for (int j = 0; j < BLOCK / VL; j++) any |= vload(x + i + j * VL) >= vset(floor);
            int32_t lanes = 0;
            UNROLL for (int j = 0; j < VL; j++) lanes |= any[j];
            if (!lanes) continue;
        }
        for (int64_t k = i; k < end; k++)
            if (x[k] >= floor) out[count++] = key_of(x[k], k);
    }
    return count;
}

/* The weights of candidates, by the same operations as block_weights. */
static void weigh(const float *x, const uint64_t *keys, int64_t n, float top, float scale, float *w) {
    for (int64_t i = 0; i < n; i++) w[i] = x[id_of(keys[i])];
    for (int64_t i = 0; i < n; i += VL) store_n(F32, w, i, n - i, vexp2((load_n(F32, w, i, n - i) - vset(top)) * vset(scale)));
}

/* How many of the sorted candidates are kept; 0 if they don't tell. w [count]: their weights, the best is 1. */
static int64_t kept_of(const float *w, int64_t count, int64_t vocab, int64_t top_k, double top_p, double min_p, double whole) {
    int64_t limit = 0;
    while (limit < count && limit < top_k && w[limit] >= min_p) limit++;
    const int bounded = limit < count || top_k <= count || count == vocab;
    if (top_p >= 1) return bounded ? limit : 0;
    if (!bounded && !(whole > 0)) return 0;
    double mass = whole, sum = 0; /* whole: the vocabulary's, where nothing but top_p cuts */
    if (!(whole > 0))
        for (int64_t i = 0; i < limit; i++) mass += w[i];
    for (int64_t i = 0; i < limit; i++) {
        sum += w[i];
        if (sum >= top_p * mass) return i + 1;
    }
    return bounded ? limit : 0;
}

typedef struct { /* [vocab] each, but sums */
    uint64_t *keys, *a, *b;
    float *w;
    double *sums;
} scratch;

static int64_t draw_truncated(const sample_args *a, int64_t row, const float *x, float top, float scale, scratch s) {
    const int64_t n = a->vocab, top_k = a->top_k[row];
    const double top_p = a->top_p[row], min_p = a->min_p[row];
    const double whole = top_p < 1 && top_k >= n && !(min_p > 0) ? block_sums(x, n, top, scale, s.sums) : 0;
    int64_t kept = 0, count = 0;
    uint64_t last = 0;
    for (float reach = 2; !kept; reach *= 2) { /* log2 of how much lighter than the best a candidate may be */
        count = gather(x, n, reach > 600 ? -INFINITY : top - reach / scale, s.keys);
        const uint64_t *sorted = sort_keys(s.keys, count, s.a, s.b);
        weigh(x, sorted, count, top, scale, s.w);
        kept = kept_of(s.w, count, n, top_k, top_p, min_p, whole);
        if (kept) last = sorted[kept - 1];
    }
    int64_t chosen = 0;
    for (int64_t i = 0; i < count; i++) /* back to id order */
        if (s.keys[i] <= last) s.keys[chosen++] = s.keys[i];
    weigh(x, s.keys, chosen, top, scale, s.w);
    double total = 0, sum = 0;
    for (int64_t i = 0; i < chosen; i++) total += s.w[i];
    const double target = aim(a->uniform[row], total);
    int64_t token = 0;
    for (int64_t i = 0; i < chosen && !(sum > target); i++) {
        if (s.w[i] > 0) token = id_of(s.keys[i]);
        sum += s.w[i];
    }
    return token;
}

static void sample_range(void *context, int64_t begin, int64_t end) {
    sample_args *a = context;
    const size_t n = (size_t)a->vocab;
    char *memory = malloc(n * (3 * sizeof(uint64_t) + sizeof(float)) + (n / BLOCK + 2) * sizeof(double));
    if (!memory) {
        atomic_store(&a->failed, 1);
        return;
    }
    uint64_t *keys = (uint64_t *)memory;
    double *sums = (double *)(keys + 3 * n);
    const scratch s = {keys, keys + n, keys + 2 * n, (float *)(sums + n / BLOCK + 2), sums};
    for (int64_t row = begin; row < end; row++) {
        const float *x = a->logits + row * a->stride, t = a->temperature[row];
        int usable;
        const float top = largest(x, a->vocab, &usable), scale = t > 1e-30f ? LOG2E / t : 1e30f; /* finite: 0 * infinity would be NaN */
        if (!usable) a->tokens[row] = best_finite(x, a->vocab);
        else if (!(t > 0)) a->tokens[row] = first_equal(x, a->vocab, top);
        else if (a->top_k[row] < a->vocab || a->top_p[row] < 1 || a->min_p[row] > 0)
            a->tokens[row] = draw_truncated(a, row, x, top, scale, s);
        else a->tokens[row] = draw_from_all(x, a->vocab, top, scale, a->uniform[row], sums);
    }
    free(memory);
}

/* logits [rows][vocab], stride floats between rows -> tokens [rows]. */
void octavo_argmax_rows(const float *logits, int64_t rows, int64_t vocab, int64_t stride, int64_t *tokens, int threads) {
    sample_args a = {.logits = logits, .vocab = vocab, .stride = stride, .tokens = tokens};
    octavo_parallel(argmax_range, &a, rows, row_grain(rows, threads), rows * vocab / VL, threads);
}

/* The options are arrays [rows]: temperature (0: argmax), top_k (vocab: all), top_p (1: all), min_p (0: all), uniform in
 * [0, 1). Returns 0, or 1 without memory. */
int octavo_sample_rows(const float *logits, int64_t rows, int64_t vocab, int64_t stride, const float *temperature, const int64_t *top_k,
                       const double *top_p, const double *min_p, const double *uniform, int64_t *tokens, int threads) {
    sample_args a = {logits, vocab, stride, temperature, top_k, top_p, min_p, uniform, tokens, 0};
    octavo_parallel(sample_range, &a, rows, row_grain(rows, threads), rows * vocab * 8 / VL, threads);
    return atomic_load(&a.failed);
}
