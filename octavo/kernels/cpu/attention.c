/* Paged attention with an online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135).
 *
 * Decodes and chunks are the same: rows = (token, query head) of one KV head, against that head's keys, in tiles of TILE
 * keys. Every row goes through the keys in one order that depends on key positions alone: tile by tile within a segment of
 * SEGMENT keys, then segment results merged in order, starting at position 0. Rows never mix, masked keys add an exact
 * zero. So a row's result has the same bits whatever the batch, the chunking, the threads and the splits.
 */
#include "attention.h"
#include "parallel.h"
#include "vec.h"
#include <stdatomic.h>
#include <stdlib.h>

#if defined(ISA_AVX512) || defined(ISA_NEON)
#define NV 4 /* accumulators are GROUP x NV vectors; 32 registers */
#else
#define NV 2 /* 16 registers */
#endif
enum { GROUP = 6, STRIP = NV * VL };

#if defined(HAVE_DPBF16)
INLINE vf dot_pairs(vf acc, vu a, vu b) { return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }
#define DIRECT(type) ((type) != F16) /* the left operand is used as it lies in memory, one unit a step */
#else
#define DIRECT(type) ((type) == F32)
#endif

/* acc[r][j] += a[r][unit k] * b[j] for rows x nv vectors of units. a holds units if DIRECT, else floats. */
INLINE void multiply(const int type, const int rows, const int nv, const uint32_t *const *a, int64_t k, const vu *b, vf (*acc)[NV]) {
    if (type == F32) {
        UNROLL for (int r = 0; r < rows; r++) {
            vf x = (vf)vset_u(a[r][k]);
            UNROLL for (int j = 0; j < nv; j++) acc[r][j] = vfma(x, (vf)b[j], acc[r][j]);
        }
        return;
    }
#if defined(HAVE_DPBF16)
    if (type == BF16) {
        UNROLL for (int r = 0; r < rows; r++) {
            vu x = vset_u(a[r][k]);
            UNROLL for (int j = 0; j < nv; j++) acc[r][j] = dot_pairs(acc[r][j], x, b[j]);
        }
        return;
    }
#endif
    UNROLL for (int part = 0; part < 2; part++) {
        vf half[NV];
        UNROLL for (int j = 0; j < nv; j++) {
            if (type == BF16) half[j] = part ? (vf)(b[j] & 0xffff0000u) : (vf)(b[j] << 16);
            else half[j] = from_f16(part ? b[j] >> 16 : b[j] & 0xffff);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            vf x = (vf)vset_u(a[r][2 * k + part]);
            UNROLL for (int j = 0; j < nv; j++) acc[r][j] = vfma(x, half[j], acc[r][j]);
        }
    }
}

/* A tile of keys: where its blocks lie. */
typedef struct {
    const uint32_t *k[TILE / VL]; /* each vector of keys, at dimension 0 */
    const uint32_t *v[TILE / 8];  /* each block's part of the tile */
    int64_t k_stride;             /* units from one step of dimensions to the next */
    int64_t v_keys;               /* keys in each of v */
    int64_t num_keys;             /* valid keys, 1 .. TILE */
    _Alignas(64) uint32_t packed[MAX_HEAD_DIM * TILE]; /* K, copied, if blocks are shorter than a vector */
} tile;

/* s[r][0 .. TILE) = q[r] . k */
INLINE void score_rows(const int type, const int rows, const uint32_t *const *q, const tile *t, int64_t dim, float (*s)[TILE]) {
    const int64_t steps = type == F32 ? dim : dim / 2;
    for (int strip = 0; strip * STRIP < t->num_keys; strip++) {
        vf acc[GROUP][NV];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < NV; j++) acc[r][j] = vset(0);
        const uint32_t *const *columns = t->k + strip * NV;
        for (int64_t k = 0; k < steps; k++) {
            vu b[NV];
            UNROLL for (int j = 0; j < NV; j++) b[j] = vload_u(columns[j] + k * t->k_stride);
            multiply(type, rows, NV, q, k, b, acc);
        }
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < NV; j++) vstore(s[r] + strip * STRIP + j * VL, acc[r][j]);
    }
}

/* acc[r][column ..] = acc[r][column ..] * keep[r] + p[r] . v for nv vectors of dimensions */
INLINE void weigh_strip(const int type, const int rows, const int nv, const uint32_t *const *p, const tile *t, int64_t dim,
                        int64_t column, const float *keep, float *const *out) {
    vf acc[GROUP][NV];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < nv; j++) acc[r][j] = vload(out[r] + column + j * VL) * vset(keep[r]);
    const int64_t per_unit = type == F32 ? 1 : 2;
    int64_t unit = 0;
    for (int64_t i = 0, left = t->num_keys; left > 0; i++, left -= t->v_keys) {
        const int64_t keys = left < t->v_keys ? left : t->v_keys;
        const uint32_t *v = t->v[i] + column;
        vu b[NV];
        for (int64_t k = 0; k < keys / per_unit; k++, unit++, v += dim) {
            UNROLL for (int j = 0; j < nv; j++) b[j] = vload_u(v + j * VL);
            multiply(type, rows, nv, p, unit, b, acc);
        }
        if (keys % per_unit) { /* the odd key's partner was never written, and may hold anything */
            UNROLL for (int j = 0; j < nv; j++) b[j] = vload_u(v + j * VL) & 0xffff;
            multiply(type, rows, nv, p, unit, b, acc);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < nv; j++) vstore(out[r] + column + j * VL, acc[r][j]);
}

INLINE void weigh_rows(const int type, const int rows, const uint32_t *const *p, const tile *t, int64_t dim, const float *keep,
                       float *const *out) {
    int64_t column = 0;
    for (; column + STRIP <= dim; column += STRIP) weigh_strip(type, rows, NV, p, t, dim, column, keep, out);
    for (; column < dim; column += VL) weigh_strip(type, rows, 1, p, t, dim, column, keep, out);
}

#define FOR_ROWS(call_of)                                                                                                       \
    switch (rows) {                                                                                                             \
    case 1: call_of(1); break;                                                                                                  \
    case 2: call_of(2); break;                                                                                                  \
    case 3: call_of(3); break;                                                                                                  \
    case 4: call_of(4); break;                                                                                                  \
    case 5: call_of(5); break;                                                                                                  \
    default: call_of(GROUP);                                                                                                    \
    }

#define DEFINE_TYPE(name, type)                                                                                                 \
    static void score_##name(int rows, const uint32_t *const *q, const tile *t, int64_t dim, float (*s)[TILE]) {                \
        FOR_ROWS(SCORE_##name)                                                                                                  \
    }                                                                                                                           \
    static void weigh_##name(int rows, const uint32_t *const *p, const tile *t, int64_t dim, const float *keep,                 \
                             float *const *out) {                                                                               \
        FOR_ROWS(WEIGH_##name)                                                                                                  \
    }
#define SCORE_f32(n) score_rows(F32, n, q, t, dim, s)
#define WEIGH_f32(n) weigh_rows(F32, n, p, t, dim, keep, out)
#define SCORE_bf16(n) score_rows(BF16, n, q, t, dim, s)
#define WEIGH_bf16(n) weigh_rows(BF16, n, p, t, dim, keep, out)
#define SCORE_f16(n) score_rows(F16, n, q, t, dim, s)
#define WEIGH_f16(n) weigh_rows(F16, n, p, t, dim, keep, out)
DEFINE_TYPE(f32, F32)
DEFINE_TYPE(bf16, BF16)
DEFINE_TYPE(f16, F16)

/* Running softmax of up to MAX_ROWS rows: sum of 2^(score - max), and of the same times V. sum 0: no key so far. */
typedef struct {
    float *max, *sum, *acc; /* [rows], [rows], [rows][dim] */
} partial;

typedef struct {
    const step_args *step;
    const layer_args *layer;
    const char *qkv;
    char *out;
    const task *tasks;
    int64_t num_tasks;
    float *slots;
    _Atomic int32_t *arrived;
    _Atomic int error;
} attention_job;

/* What a task holds while it runs; on the stack of its thread. */
typedef struct {
    const uint32_t *q[MAX_ROWS];
    int64_t low[MAX_ROWS], high[MAX_ROWS]; /* row r attends to positions low .. high - 1 */
    int64_t rows;
    tile t;
    _Alignas(64) float s[GROUP][TILE];
    _Alignas(64) float p[GROUP][TILE];
    _Alignas(64) float q_floats[MAX_ROWS * MAX_HEAD_DIM];
    float max[2][MAX_ROWS], sum[2][MAX_ROWS];
    _Alignas(64) float acc[2][MAX_ROWS * MAX_HEAD_DIM];
} workspace;

/* Scores -> weights p of one row, and the factor by which what was summed before shrinks. first .. last - 1: valid keys. */
INLINE float soften(const layer_args *l, const float *s, float *p, int64_t first, int64_t last, const int as_bf16, float *max, float *sum) {
    vf x[TILE / VL], highest = vset(-INFINITY);
    const float factor = l->soft_cap > 0 ? l->scale / l->soft_cap : l->scale * LOG2E;
    vi lane;
    UNROLL for (int i = 0; i < VL; i++) lane[i] = i;
    UNROLL for (int i = 0; i < TILE / VL; i++) {
        x[i] = vload(s + i * VL) * vset(factor);
        if (l->soft_cap > 0) x[i] = vtanh(x[i]) * vset(l->soft_cap * LOG2E);
        if (first > i * VL || last < (i + 1) * VL) {
            vi key = lane + i * VL;
            x[i] = vselect((key >= (int32_t)first) & (key < (int32_t)last), x[i], vset(-INFINITY));
        }
        highest = vmax(x[i], highest);
    }
    const float before = *max, here = vhmax(highest), now = here > before ? here : before;
    if (now == -INFINITY) { /* no visible key yet: add nothing, but keep a NaN, which comparisons lose, visible */
        UNROLL for (int i = 0; i < TILE / VL; i++) {
            for (int n = 0; n < VL; n++) if (x[i][n] != x[i][n]) *sum = NAN;
            if (as_bf16) store_as(BF16, p, i * VL, vset(0));
            else vstore(p + i * VL, vset(0));
        }
        return 1.0f;
    }
    vf total = vset(0);
    UNROLL for (int i = 0; i < TILE / VL; i++) {
        vf e = vexp2(x[i] - vset(now));
        total = total + e;
        if (as_bf16) store_as(BF16, p, i * VL, e);
        else vstore(p + i * VL, e);
    }
    const float keep = now == before ? 1.0f : vexp2(vset(before - now))[0];
    *max = now;
    *sum = *sum * keep + vsum(total);
    return keep;
}

/* One tile against the rows of a task. start: position of the tile's first key. */
static void tile_rows(const layer_args *l, workspace *w, int64_t start, partial to) {
    const int64_t dim = l->head_dim;
    for (int64_t r0 = 0; r0 < w->rows; r0 += GROUP) {
        const int n = w->rows - r0 < GROUP ? (int)(w->rows - r0) : GROUP;
        if (w->high[r0 + n - 1] <= start) continue; /* before these rows' keys end: exactly nothing to add */
        const uint32_t *p[GROUP];
        float *acc[GROUP], keep[GROUP];
        if (l->type == F32) score_f32(n, w->q + r0, &w->t, dim, w->s);
        else if (l->type == BF16) score_bf16(n, w->q + r0, &w->t, dim, w->s);
        else score_f16(n, w->q + r0, &w->t, dim, w->s);
        for (int r = 0; r < n; r++) {
            const int64_t row = r0 + r;
            const int as_bf16 = l->type == BF16 && DIRECT(BF16);
            keep[r] = soften(l, w->s[r], w->p[r], w->low[row] - start, w->high[row] - start, as_bf16, to.max + row, to.sum + row);
            p[r] = (const uint32_t *)w->p[r];
            acc[r] = to.acc + row * dim;
        }
        if (l->type == F32) weigh_f32(n, p, &w->t, dim, keep, acc);
        else if (l->type == BF16) weigh_bf16(n, p, &w->t, dim, keep, acc);
        else weigh_f16(n, p, &w->t, dim, keep, acc);
    }
}

/* Finds the blocks of the tile that starts at a position; end: one past the last key that any row attends to. */
static int find_tile(const attention_job *j, const task *task, int64_t start, int64_t end, tile *t) {
    const layer_args *l = j->layer;
    const int64_t size = j->step->block_size, dim = l->head_dim, part = size < TILE ? size : TILE;
    const int64_t units = l->type == F32 ? 1 : 2; /* elements in a unit */
    const int32_t *table = j->step->block_tables + task->seq * j->step->table_stride;
    const uint32_t *k_parts[TILE / 8];
    t->num_keys = end - start < TILE ? end - start : TILE;
    t->v_keys = part;
    t->k_stride = size;
    const int64_t parts = (t->num_keys + part - 1) / part;
    if (parts < 1 || parts > TILE / 8) return BAD_LENGTH;
    for (int64_t i = 0; i < parts; i++) {
        const int64_t position = start + i * part, block = table[position / size], offset = position % size;
        if (block < 0 || block >= l->num_blocks) return BAD_BLOCK;
        const int64_t at = (block * l->num_kv_heads + task->kv_head) * dim * size / units;
        k_parts[i] = (const uint32_t *)l->k_cache + at + offset;
        t->v[i] = (const uint32_t *)l->v_cache + at + offset / units * dim;
    }
    if (part >= VL) { /* vectors past the valid keys read the last part again; their scores are masked or unused */
        for (int64_t i = 0; i < TILE / VL; i++) {
            const int64_t at = i * VL / part;
            t->k[i] = at < parts ? k_parts[at] + i * VL % part : k_parts[parts - 1];
        }
        return OK;
    }
    const int64_t steps = dim / units;
    for (int64_t d = 0; d < steps; d++)
        for (int64_t i = 0; i < parts; i++) memcpy(t->packed + d * TILE + i * part, k_parts[i] + d * size, (size_t)part * 4);
    t->k_stride = TILE;
    for (int64_t i = 0; i < TILE / VL; i++) t->k[i] = t->packed + i * VL;
    return OK;
}

/* Asks for the tile's memory ahead of time: blocks lie anywhere, which no hardware prefetcher can guess. */
static void prefetch_tile(const attention_job *j, const task *task, int64_t start, int64_t end) {
    const layer_args *l = j->layer;
    const int64_t size = j->step->block_size, bytes = l->head_dim * size_of((int)l->type), part = size < TILE ? size : TILE;
    const int32_t *table = j->step->block_tables + task->seq * j->step->table_stride;
    if (end > start + TILE) end = start + TILE;
    for (int64_t position = start; position < end; position += part) {
        const int64_t block = table[position / size];
        if (block < 0 || block >= l->num_blocks) return;
        const int64_t at = ((block * l->num_kv_heads + task->kv_head) * size + position % size) * bytes;
        for (int64_t i = 0; i < part * bytes; i += 64) __builtin_prefetch(l->v_cache + at + i, 0, 2);
        if (size > TILE) continue; /* K's part would be scattered over the block */
        for (int64_t i = 0; i < part * bytes; i += 64) __builtin_prefetch(l->k_cache + at + i, 0, 2);
    }
}

static void prefetch_first(const attention_job *j, const task *task) {
    const int64_t last = j->step->seq_lens[task->seq] - j->step->query_start[task->seq + 1] + task->first_token + task->num_tokens;
    prefetch_tile(j, task, task->first_segment * SEGMENT, last);
}

static int segment_rows(const attention_job *j, const task *task, workspace *w, int64_t segment, partial to) {
    const int64_t dim = j->layer->head_dim;
    int64_t begin = segment * SEGMENT, end = begin + SEGMENT;
    for (int64_t r = 0; r < w->rows; r++) to.max[r] = -INFINITY, to.sum[r] = 0;
    memset(to.acc, 0, (size_t)(w->rows * dim) * sizeof(float));
    if (end > w->high[w->rows - 1]) end = w->high[w->rows - 1];
    if (begin < w->low[0]) begin = w->low[0] / TILE * TILE;
    for (int64_t start = begin; start < end; start += TILE) {
        int error = find_tile(j, task, start, end, &w->t);
        if (error) return error;
        if (start + TILE < w->high[w->rows - 1]) prefetch_tile(j, task, start + TILE, w->high[w->rows - 1]);
        else if (task + 1 < j->tasks + j->num_tasks) prefetch_first(j, task + 1);
        tile_rows(j->layer, w, start, to);
    }
    return OK;
}

/* total = total and then part */
static void merge(partial total, partial part, int64_t rows, int64_t dim) {
    for (int64_t r = 0; r < rows; r++) {
        if (part.sum[r] == 0) continue;
        float *acc = total.acc + r * dim;
        const float *add = part.acc + r * dim;
        if (total.sum[r] == 0) {
            total.max[r] = part.max[r], total.sum[r] = part.sum[r];
            memcpy(acc, add, (size_t)dim * sizeof(float));
            continue;
        }
        const float max = part.max[r] > total.max[r] ? part.max[r] : total.max[r];
        const vf x = vexp2(vset(total.max[r] - max)), y = vexp2(vset(part.max[r] - max));
        total.max[r] = max;
        total.sum[r] = total.sum[r] * x[0] + part.sum[r] * y[0];
        for (int64_t d = 0; d < dim; d += VL) vstore(acc + d, vfma(vload(acc + d), x, vload(add + d) * y));
    }
}

static partial slot_of(const attention_job *j, const task *task, int64_t rows, int64_t segment) {
    float *at = j->slots + task->slot + (segment - task->group_first) * rows * (j->layer->head_dim + 2);
    return (partial){at, at + rows, at + 2 * rows};
}

INLINE void write_rows(const int type, const attention_job *j, const task *task, int64_t rows, partial total) {
    const int64_t dim = j->layer->head_dim, heads = j->layer->num_heads, group = heads / j->layer->num_kv_heads;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t token = task->first_token + r / group, head = task->kv_head * group + r % group;
        char *out = j->out + (token * heads + head) * dim * size_of(type);
        const vf factor = vset(1.0f / total.sum[r]);
        for (int64_t d = 0; d < dim; d += VL) store_as(type, out, d, vload(total.acc + r * dim + d) * factor);
    }
}

static void set_up_rows(const attention_job *j, const task *task, workspace *w) {
    const step_args *s = j->step;
    const layer_args *l = j->layer;
    const int64_t dim = l->head_dim, group = l->num_heads / l->num_kv_heads, bytes = size_of((int)l->type);
    const int64_t first = s->seq_lens[task->seq] - s->query_start[task->seq + 1]; /* + token index = position */
    w->rows = task->num_tokens * group;
    for (int64_t r = 0; r < w->rows; r++) {
        const int64_t token = task->first_token + r / group, head = task->kv_head * group + r % group;
        const char *q = j->qkv + (token * (l->num_heads + 2 * l->num_kv_heads) + head) * dim * bytes;
        w->high[r] = first + token + 1;
        w->low[r] = l->window > 0 && w->high[r] > l->window ? w->high[r] - l->window : 0;
        w->q[r] = (const uint32_t *)q;
        if (DIRECT((int)l->type)) continue;
        float *floats = w->q_floats + r * dim;
        for (int64_t d = 0; d < dim; d += VL) vstore(floats + d, l->type == BF16 ? load_as(BF16, q, d) : load_as(F16, q, d));
        w->q[r] = (const uint32_t *)floats;
    }
}

static int run_task(attention_job *j, const task *task) {
    const layer_args *l = j->layer;
    workspace w; /* uninitialized on purpose: hundreds of kilobytes, of which a decode uses a few */
    set_up_rows(j, task, &w);
    partial total = {w.max[0], w.sum[0], w.acc[0]}, part = {w.max[1], w.sum[1], w.acc[1]};
    for (int64_t segment = task->first_segment; segment < task->last_segment; segment++) {
        const int is_first = segment == task->group_first;
        partial to = task->pieces > 1 ? slot_of(j, task, w.rows, segment) : is_first ? total : part;
        int error = segment_rows(j, task, &w, segment, to);
        if (error) return error;
        if (task->pieces == 1 && !is_first) merge(total, part, w.rows, l->head_dim);
    }
    if (task->pieces > 1) {
        if (atomic_fetch_add_explicit(&j->arrived[task->group], 1, memory_order_acq_rel) != task->pieces - 1) return OK;
        for (int64_t r = 0; r < w.rows; r++) total.sum[r] = 0;
        for (int64_t segment = task->group_first; segment < task->group_last; segment++)
            merge(total, slot_of(j, task, w.rows, segment), w.rows, l->head_dim);
    }
    if (l->type == F32) write_rows(F32, j, task, w.rows, total);
    else if (l->type == BF16) write_rows(BF16, j, task, w.rows, total);
    else write_rows(F16, j, task, w.rows, total);
    return OK;
}

static void run_tasks(void *context, int64_t begin, int64_t end) {
    attention_job *j = context;
    for (int64_t i = begin; i < end; i++) {
        int error = run_task(j, j->tasks + i);
        if (error) atomic_store(&j->error, error);
    }
}

static int most_costly_first(const void *a, const void *b) {
    const task *x = a, *y = b;
    return x->cost < y->cost ? 1 : x->cost > y->cost ? -1 : x->slot < y->slot ? -1 : x->slot > y->slot;
}

/* Keys times (rows + what reading a key costs by itself). */
static int64_t cost_of(int64_t keys, int64_t rows) { return keys * (rows + 4); }

typedef struct {
    task *tasks;
    int64_t capacity, count, groups, slots, target;
} planner;

/* Adds the tasks of one row tile for every KV head, split so that no piece costs much more than the target. */
static void plan_rows(planner *p, const layer_args *l, int64_t seq, int64_t token, int64_t tokens, int64_t position) {
    const int64_t rows = tokens * (l->num_heads / l->num_kv_heads), end = position + tokens;
    const int64_t low = l->window > 0 && position + 1 > l->window ? position + 1 - l->window : 0;
    const int64_t first = low / SEGMENT, last = (end - 1) / SEGMENT + 1, segments = last - first;
    int64_t pieces = p->target > 0 ? (cost_of(end - low, rows) + p->target - 1) / p->target : 1;
    if (pieces > segments) pieces = segments;
    for (int64_t head = 0; head < l->num_kv_heads; head++) {
        for (int64_t i = 0; i < pieces; i++, p->count++) {
            if (p->count >= p->capacity) continue;
            const int64_t begin = first + segments * i / pieces, stop = first + segments * (i + 1) / pieces;
            const int64_t from = begin * SEGMENT > low ? begin * SEGMENT : low, to = stop * SEGMENT < end ? stop * SEGMENT : end;
            p->tasks[p->count] = (task){.cost = cost_of(to - from, rows), .slot = p->slots, .seq = (int32_t)seq, .kv_head = (int32_t)head,
                .first_token = (int32_t)token, .num_tokens = (int32_t)tokens, .first_segment = (int32_t)begin, .last_segment = (int32_t)stop,
                .group = (int32_t)p->groups, .pieces = (int32_t)pieces, .group_first = (int32_t)first, .group_last = (int32_t)last};
        }
        if (pieces > 1) p->slots += segments * rows * (l->head_dim + 2), p->groups++;
    }
}

/* Fills tasks; returns how many there are (call again with more room if that is above capacity), or -1 for lengths that
 * contradict each other. needs[0]: floats of slots; needs[1]: split groups. Depends on heads, head_dim, window, threads. */
int64_t octavo_attention_plan(const step_args *step, const layer_args *layer, task *tasks, int64_t capacity, int64_t *needs) {
    planner p = {.tasks = tasks, .capacity = capacity};
    const int64_t group = layer->num_heads / layer->num_kv_heads, tile_tokens = group >= TARGET_ROWS ? 1 : TARGET_ROWS / group;
    int64_t total = 0;
    for (int pass = 0; pass < 2; pass++) { /* first the total cost, then the tasks */
        for (int64_t s = 0; s < step->num_seqs; s++) {
            const int64_t begin = step->query_start[s], end = step->query_start[s + 1];
            const int64_t start = step->seq_lens[s] - (end - begin);
            if (end < begin || end > step->num_tokens || (end > begin && start < 0)) return -1;
            if (end > begin && (step->seq_lens[s] + step->block_size - 1) / step->block_size > step->table_stride) return -1;
            for (int64_t token = begin; token < end; token += tile_tokens) {
                const int64_t tokens = end - token < tile_tokens ? end - token : tile_tokens, position = start + token - begin;
                int64_t keys = position + tokens;
                if (layer->window > 0 && keys > layer->window + tokens) keys = layer->window + tokens;
                if (!pass) total += cost_of(keys, tokens * group) * layer->num_kv_heads;
                else plan_rows(&p, layer, s, token, tokens, position);
            }
        }
        if (layer->threads > 1) p.target = total / (4 * layer->threads) + 1;
    }
    needs[0] = p.slots, needs[1] = p.groups;
    if (p.count <= capacity) qsort(tasks, (size_t)p.count, sizeof(task), most_costly_first);
    return p.count;
}

/* qkv as octavo_rope_and_write_kv leaves it -> out [T, heads * dim]. arrived [groups] is this call's scratch. */
int octavo_paged_attention(const step_args *step, const layer_args *layer, const task *tasks, int64_t num_tasks, float *slots,
                           int32_t *arrived, int64_t num_groups, const void *qkv, void *out) {
    attention_job j = {step, layer, qkv, out, tasks, num_tasks, slots, (_Atomic int32_t *)arrived, OK};
    const int64_t row_bytes = layer->num_heads * layer->head_dim * size_of((int)layer->type), used = step->query_start[step->num_seqs];
    int64_t work = 0;
    for (int64_t i = 0; i < num_tasks && work < INT32_MAX; i++) work += tasks[i].cost;
    if (num_groups) memset(arrived, 0, (size_t)num_groups * sizeof(int32_t));
    if (used < step->num_tokens) memset((char *)out + used * row_bytes, 0, (size_t)((step->num_tokens - used) * row_bytes));
    octavo_parallel(run_tasks, &j, num_tasks, 1, work * layer->head_dim / 32, (int)layer->threads);
    return atomic_load(&j.error);
}

int octavo_rope_and_write_kv(const step_args *step, const layer_args *layer, void *qkv);

/* Both, in one call. */
int octavo_attention_layer(const step_args *step, const layer_args *layer, const task *tasks, int64_t num_tasks, float *slots,
                           int32_t *arrived, int64_t num_groups, void *qkv, void *out) {
    int error = octavo_rope_and_write_kv(step, layer, qkv);
    return error ? error : octavo_paged_attention(step, layer, tasks, num_tasks, slots, arrived, num_groups, qkv, out);
}
