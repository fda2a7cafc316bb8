#ifndef OCTAVO_PARALLEL_H
#define OCTAVO_PARALLEL_H

#include <stdint.h>

/* Runs body(context, begin, end) over ranges that cover 0 .. count, at most `grain` long, on the threads of the OpenMP
 * runtime that the process has already (torch's), or serially when work (about: elementary vector operations) is too
 * small to be worth waking them. Ranges are handed out first come first served. */
typedef void (*range_body)(void *context, int64_t begin, int64_t end);
void octavo_parallel(range_body body, void *context, int64_t count, int64_t grain, int64_t work, int threads);

/* An elementwise pass over rows: how many of them make a piece of work for one thread. */
static inline int64_t row_grain(int64_t rows, int threads) {
    int64_t grain = rows / (threads > 1 ? 4 * threads : 1);
    return grain > 1 ? grain : 1;
}

#endif
