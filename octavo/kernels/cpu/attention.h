/* The paged KV cache and what one step and one layer look like to the kernels.
 *
 * Layout of one layer's cache, P = 2 elements for 16-bit types and 1 for float (so P elements are one 32-bit unit):
 *     K [num_blocks][kv_heads][head_dim / P][block_size][P]     a vector of units = neighbouring tokens, P dimensions each
 *     V [num_blocks][kv_heads][block_size / P][head_dim][P]     a vector of units = neighbouring dimensions, P tokens each
 * Scores and weighted sums then need no sum across lanes, and a unit is what vdpbf16ps multiplies.
 * head_dim is a multiple of 16 and at most 256; block_size a multiple of 8, and of 64 or a divisor of it.
 */
#ifndef OCTAVO_ATTENTION_H
#define OCTAVO_ATTENTION_H

#include <stdint.h>

enum { MAX_HEAD_DIM = 256, TILE = 64, SEGMENT = 256, MAX_ROWS = 64, TARGET_ROWS = 48 };
enum { OK = 0, BAD_SLOT = 1, BAD_POSITION = 2, BAD_BLOCK = 3, BAD_LENGTH = 4 };

typedef struct { /* mirrors AttentionMetadata */
    int64_t num_tokens, num_seqs, block_size, table_stride;
    const int64_t *positions, *slots;
    const int32_t *query_start, *seq_lens, *block_tables;
} step_args;

typedef struct { /* mirrors AttentionLayerSpec, with its cache */
    int64_t type, num_heads, num_kv_heads, head_dim, num_blocks;
    char *k_cache, *v_cache;
    const float *rope; /* [rope_rows][rotary_dim]: cosines, then sines; NULL: no rotation */
    int64_t rope_rows, rotary_dim, interleaved;
    const char *q_norm, *k_norm; /* [head_dim] of the type, or NULL */
    int64_t window;              /* 0: none */
    int64_t threads;
    float eps, scale, soft_cap; /* soft_cap 0: none */
} layer_args;

/* Rows (token, head of one KV head's group) of a sequence against segments [first_segment, last_segment) of its keys.
 * A task that is one of several pieces leaves each segment's partial result in its slot; whichever piece finishes last
 * merges them in segment order. */
typedef struct {
    int64_t cost, slot; /* slot: first float of the first segment's partial result */
    int32_t seq, kv_head, first_token, num_tokens, first_segment, last_segment;
    int32_t group, pieces, group_first, group_last; /* pieces 1: not split */
} task;

#endif
