/* Threads. torch's OpenMP pool does the work, reached through GOMP_parallel (libgomp's entry point, which LLVM's and
 * Intel's runtimes export too), because a second pool would fight with it for the cores. */
#include "parallel.h"
#include <stdatomic.h>
#include <stddef.h>

typedef void (*gomp_parallel_fn)(void (*fn)(void *), void *data, unsigned threads, unsigned flags);

static gomp_parallel_fn gomp_parallel = NULL;

/* Below this much work a fork and join (1 to 3 microseconds) costs more than it saves. */
#define SERIAL_WORK 8192

typedef struct {
    range_body body;
    void *context;
    int64_t count, grain;
    _Atomic int64_t next;
} job;

static void run_ranges(void *data) {
    job *j = data;
    for (;;) {
        int64_t begin = atomic_fetch_add_explicit(&j->next, j->grain, memory_order_relaxed);
        if (begin >= j->count) return;
        int64_t end = begin + j->grain < j->count ? begin + j->grain : j->count;
        j->body(j->context, begin, end);
    }
}

void octavo_parallel(range_body body, void *context, int64_t count, int64_t grain, int64_t work, int threads) {
    if (count <= 0) return;
    int64_t ranges = (count + grain - 1) / grain;
    if (threads > ranges) threads = (int)ranges;
    if (!gomp_parallel || threads <= 1 || work < SERIAL_WORK) {
        body(context, 0, count);
        return;
    }
    job j = {.body = body, .context = context, .count = count, .grain = grain, .next = 0};
    gomp_parallel(run_ranges, &j, (unsigned)threads, 0);
}

/* Called once after loading; NULL leaves everything serial. */
void octavo_set_gomp_parallel(void *fn) { gomp_parallel = (gomp_parallel_fn)fn; }
