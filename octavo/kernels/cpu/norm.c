/* RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), fused with the residual addition before it. */
#include "parallel.h"
#include "vec.h"

typedef struct {
    int type;
    const char *x, *weight, *residual;
    char *out, *new_residual;
    int64_t width, x_stride;
    float eps;
} norm_args;

INLINE void norm_row(const int type, const norm_args *a, int64_t row) {
    const int64_t width = a->width, bytes = size_of(type);
    const char *x = a->x + row * a->x_stride * bytes;
    char *out = a->out + row * width * bytes;
    const char *residual = a->residual ? a->residual + row * width * bytes : 0;
    char *sum = a->residual ? a->new_residual + row * width * bytes : 0;
    vf even = vset(0), odd = vset(0); /* two chains of additions, to hide their latency */
    int64_t i = 0;
    for (; i + 2 * VL <= width; i += 2 * VL) {
        vf u = load_as(type, x, i), v = load_as(type, x, i + VL);
        if (residual) {
            u = round_as(type, u + load_as(type, residual, i));
            v = round_as(type, v + load_as(type, residual, i + VL));
            store_as(type, sum, i, u);
            store_as(type, sum, i + VL, v);
        }
        even = vfma(u, u, even);
        odd = vfma(v, v, odd);
    }
    for (; i < width; i += VL) {
        vf u = load_n(type, x, i, width - i);
        if (residual) {
            u = round_as(type, u + load_n(type, residual, i, width - i));
            store_n(type, sum, i, width - i, u);
        }
        even = vfma(u, u, even);
    }
    if (residual) x = sum;
    vf factor = vset(1.0f / sqrtf(vsum(even + odd) / (float)width + a->eps));
    for (i = 0; i + VL <= width; i += VL)
        store_as(type, out, i, round_as(type, load_as(type, x, i) * factor) * load_as(type, a->weight, i));
    if (i < width)
        store_tail(type, out, i, width - i, round_as(type, load_tail(type, x, i, width - i) * factor) * load_tail(type, a->weight, i, width - i));
}

static void norm_rows(void *context, int64_t begin, int64_t end) {
    const norm_args *a = context;
    for (int64_t row = begin; row < end; row++) {
        if (a->type == F32) norm_row(F32, a, row);
        else if (a->type == BF16) norm_row(BF16, a, row);
        else norm_row(F16, a, row);
    }
}

/* x [rows, width] with x_stride elements between rows; everything else contiguous. residual NULL: out only. */
void octavo_rms_norm(const void *x, const void *weight, const void *residual, void *out, void *new_residual, int64_t rows,
                     int64_t width, int64_t x_stride, float eps, int type, int threads) {
    norm_args a = {type, x, weight, residual, out, new_residual, width, x_stride, eps};
    octavo_parallel(norm_rows, &a, rows, row_grain(rows, threads), rows * width * 4 / VL, threads);
}
