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
    const char *source = x;
    char *out = a->out + row * width * bytes;
    vf squares[2] = {vset(0), vset(0)};
    int which = 0;
    if (a->residual) {
        const char *residual = a->residual + row * width * bytes;
        char *sum = a->new_residual + row * width * bytes;
        for (int64_t i = 0; i < width; i += VL, which ^= 1) {
            vf v = round_as(type, load_n(type, x, i, width - i) + load_n(type, residual, i, width - i));
            store_n(type, sum, i, width - i, v);
            squares[which] = vfma(v, v, squares[which]);
        }
        source = sum;
    } else {
        for (int64_t i = 0; i < width; i += VL, which ^= 1) {
            vf v = load_n(type, x, i, width - i);
            squares[which] = vfma(v, v, squares[which]);
        }
    }
    vf factor = vset(1.0f / sqrtf(vsum(squares[0] + squares[1]) / (float)width + a->eps));
    for (int64_t i = 0; i < width; i += VL) {
        vf v = round_as(type, load_n(type, source, i, width - i) * factor);
        store_n(type, out, i, width - i, v * load_n(type, a->weight, i, width - i));
    }
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
