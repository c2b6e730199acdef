/* shard_slice: the bytes of a part of a matrix, in the order in which a shard folder stores them.
 *
 * Private to the writing and the checking of shard folders, which differ in nothing but where the bytes go. */
#ifndef TANDEM_SHARD_SLICE_H
#define TANDEM_SHARD_SLICE_H

#include "base.h"
#include "model_slice.h"
#include "quant.h"

/* Takes bytes; false: stop. */
struct shard_sink {
    void *ctx;
    bool (*put)(void *ctx, const void *bytes, size_t n_bytes);
};

/* A slice's spans as a window of the matrix: ascending, apart, columns widened to whole steps. spans: room for all of the slice's
 * rows and columns. */
struct quant_window shard_window_of(const struct quant_matrix *m, const struct model_slice *s, struct quant_span *spans);

size_t shard_codes_bytes(const struct quant_matrix *m, const struct quant_window *w); /* w NULL: all */
size_t shard_scales_bytes(const struct quant_matrix *m, const struct quant_window *w); /* 0: there are none beside the codes */
/* m is whole. False when the sink said so. */
bool shard_put_codes(const struct quant_matrix *m, const struct quant_window *w, const struct shard_sink *to);
bool shard_put_scales(const struct quant_matrix *m, const struct quant_window *w, const struct shard_sink *to);

#endif
