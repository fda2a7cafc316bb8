/* Per-head RMSNorm of q and k, rotary embedding (Su et al. 2021, arXiv:2104.09864), and K and V into the paged cache. */
#include "attention.h"
#include "parallel.h"
#include "vec.h"
#include <stdatomic.h>
#include <stddef.h>

typedef struct {
    const step_args *step;
    const layer_args *layer;
    char *qkv;
    _Atomic int error;
} rope_job;

INLINE void norm_head(const int type, float *x, const char *weight, int64_t dim, float eps) {
    vf squares = vset(0);
    for (int64_t i = 0; i < dim; i += VL) {
        vf v = vload(x + i);
        squares = vfma(v, v, squares);
    }
    vf factor = vset(1.0f / sqrtf(vsum(squares) / (float)dim + eps));
    for (int64_t i = 0; i < dim; i += VL)
        vstore(x + i, round_as(type, round_as(type, vload(x + i) * factor) * load_as(type, weight, i)));
}

INLINE void rotate(float *x, const float *cos, int64_t rotary, int64_t interleaved) {
    const int64_t half = rotary / 2;
    const float *sin = cos + half;
    if (interleaved) {
        for (int64_t i = 0; i < half; i++) {
            float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cos[i] - b * sin[i];
            x[2 * i + 1] = b * cos[i] + a * sin[i];
        }
        return;
    }
    for (int64_t i = 0; i < half; i += VL) {
        vf a = load_n(F32, x, i, half - i), b = load_n(F32, x + half, i, half - i);
        vf c = load_n(F32, cos, i, half - i), s = load_n(F32, sin, i, half - i);
        store_n(F32, x, i, half - i, a * c - b * s);
        store_n(F32, x + half, i, half - i, b * c + a * s);
    }
}

INLINE void load_head(const int type, const char *head, int64_t dim, float *x) {
    for (int64_t i = 0; i < dim; i += VL) vstore(x + i, load_as(type, head, i));
}

INLINE void store_head(const int type, const float *x, int64_t dim, char *head) {
    for (int64_t i = 0; i < dim; i += VL) store_as(type, head, i, vload(x + i));
}

INLINE void write_kv(const int type, const char *k, const char *v, char *k_block, char *v_block, int64_t dim, int64_t size, int64_t offset) {
    if (type == F32) {
        for (int64_t d = 0; d < dim; d++) ((float *)k_block)[d * size + offset] = ((const float *)k)[d];
        memcpy((float *)v_block + offset * dim, v, (size_t)dim * 4);
        return;
    }
    for (int64_t d = 0; d < dim / 2; d++) memcpy(k_block + (d * size + offset) * 4, k + d * 4, 4);
    uint16_t *v_pairs = (uint16_t *)v_block + offset / 2 * dim * 2 + offset % 2;
    for (int64_t d = 0; d < dim; d++) v_pairs[2 * d] = ((const uint16_t *)v)[d];
}

INLINE int rope_token(const int type, const rope_job *j, int64_t token) {
    const layer_args *l = j->layer;
    const int64_t dim = l->head_dim, bytes = size_of(type), size = j->step->block_size;
    const int64_t position = j->step->positions[token], slot = j->step->slots[token];
    char *head = j->qkv + token * (l->num_heads + 2 * l->num_kv_heads) * dim * bytes;
    _Alignas(64) float x[MAX_HEAD_DIM];
    if (l->rope && (position < 0 || position >= l->rope_rows)) return BAD_POSITION;
    if (slot < -1 || slot >= l->num_blocks * size) return BAD_SLOT;
    const float *cos = l->rope ? l->rope + position * l->rotary_dim : NULL;
    for (int64_t h = 0; h < l->num_heads + l->num_kv_heads; h++, head += dim * bytes) {
        const char *weight = h < l->num_heads ? l->q_norm : l->k_norm;
        if (!weight && !cos) continue;
        load_head(type, head, dim, x);
        if (weight) norm_head(type, x, weight, dim, l->eps);
        if (cos) rotate(x, cos, l->rotary_dim, l->interleaved);
        store_head(type, x, dim, head);
    }
    if (slot < 0) return OK;
    const char *v = head, *k = head - l->num_kv_heads * dim * bytes;
    for (int64_t h = 0; h < l->num_kv_heads; h++) {
        const int64_t at = (slot / size * l->num_kv_heads + h) * dim * size * bytes;
        write_kv(type, k + h * dim * bytes, v + h * dim * bytes, l->k_cache + at, l->v_cache + at, dim, size, slot % size);
    }
    return OK;
}

static void rope_tokens(void *context, int64_t begin, int64_t end) {
    rope_job *j = context;
    for (int64_t token = begin; token < end; token++) {
        const int64_t type = j->layer->type;
        int error = type == F32 ? rope_token(F32, j, token) : type == BF16 ? rope_token(BF16, j, token) : rope_token(F16, j, token);
        if (error) atomic_store(&j->error, error);
    }
}

/* Normalizes and rotates q and k in qkv [T, (heads + 2 kv_heads) * dim] in place, and writes K and V to their slots. */
int octavo_rope_and_write_kv(const step_args *step, const layer_args *layer, void *qkv) {
    rope_job j = {step, layer, qkv, OK};
    const int64_t heads = layer->num_heads + 2 * layer->num_kv_heads, tokens = step->num_tokens;
    octavo_parallel(rope_tokens, &j, tokens, row_grain(tokens, (int)layer->threads), tokens * heads * layer->head_dim * 6 / VL,
                    (int)layer->threads);
    return atomic_load(&j.error);
}
