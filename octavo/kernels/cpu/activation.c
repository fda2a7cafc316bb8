/* Gated activations: act(x[:, :n]) * x[:, n:]. */
#include "parallel.h"
#include "vec.h"

enum { SILU = 0, GELU_TANH = 1, GELU = 2 };

typedef struct {
    int type, kind;
    const char *x;
    char *out;
    int64_t width, pieces;
} act_args;

INLINE vf verfc(vf x) {
    float v[VL];
    memcpy(v, &x, sizeof v);
    for (int i = 0; i < VL; i++) v[i] = erfcf(v[i]); /* rare: no model family of ours uses the exact variant in a hot path */
    return vload(v);
}

INLINE vf activate(const int kind, vf x) {
    if (kind == SILU) return x / (vset(1.0f) + vexp(-x));
    if (kind == GELU_TANH) {
        vf inner = vset(0.7978845608028654f) * vfma(vset(0.044715f) * x * x, x, x); /* sqrt(2 / pi) (x + 0.044715 x^3) */
        return x / (vset(1.0f) + vexp(vset(-2.0f) * inner)); /* 0.5 x (1 + tanh(inner)), without its cancellation */
    }
    return vset(0.5f) * x * verfc(x * vset(-0.7071067811865476f)); /* 0.5 x (1 + erf(x / sqrt(2))), likewise */
}

#define PIECE 512 /* elements of a row that one range index stands for */

INLINE void act_piece(const int type, const int kind, const act_args *a, int64_t index) {
    const int64_t row = index / a->pieces, first = index % a->pieces * PIECE, bytes = size_of(type);
    const int64_t last = first + PIECE < a->width ? first + PIECE : a->width;
    const char *gate = a->x + row * 2 * a->width * bytes, *up = gate + a->width * bytes;
    char *out = a->out + row * a->width * bytes;
    int64_t i = first;
    /* rounded between the two steps, as two separate torch operations would */
    for (; i + VL <= last; i += VL)
        store_as(type, out, i, round_as(type, activate(kind, load_as(type, gate, i))) * load_as(type, up, i));
    if (i < last)
        store_tail(type, out, i, last - i, round_as(type, activate(kind, load_tail(type, gate, i, last - i))) * load_tail(type, up, i, last - i));
}

INLINE void act_range(const int type, const act_args *a, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
        if (a->kind == SILU) act_piece(type, SILU, a, i);
        else if (a->kind == GELU_TANH) act_piece(type, GELU_TANH, a, i);
        else act_piece(type, GELU, a, i);
    }
}

static void act_ranges(void *context, int64_t begin, int64_t end) {
    const act_args *a = context;
    if (a->type == F32) act_range(F32, a, begin, end);
    else if (a->type == BF16) act_range(BF16, a, begin, end);
    else act_range(F16, a, begin, end);
}

/* x [rows, 2 * width] contiguous -> out [rows, width]. */
void octavo_act_and_mul(const void *x, void *out, int64_t rows, int64_t width, int kind, int type, int threads) {
    act_args a = {type, kind, x, out, width, (width + PIECE - 1) / PIECE};
    octavo_parallel(act_ranges, &a, rows * a.pieces, row_grain(rows * a.pieces, threads), rows * width * 12 / VL, threads);
}
